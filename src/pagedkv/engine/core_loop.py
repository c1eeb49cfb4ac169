"""A thread of its own for an EngineCore: take messages, step, post what came of it."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pagedkv.engine.core import EngineCore
from pagedkv.engine.facts import Facts
from pagedkv.engine.moves import Moves
from pagedkv.engine.picture import take_picture
from pagedkv.engine.status import core_status
from pagedkv.engine.wire import (
    Answer,
    Ask,
    Batch,
    Close,
    Complete,
    Died,
    Disown,
    FromCore,
    FromPeer,
    Move,
    MoveOrder,
    Own,
    PeerGone,
    ToCore,
)
from pagedkv.errors import RequestError
from pagedkv.scheduling.explain import explain
from pagedkv.scheduling.messages import (
    Abort,
    Add,
    Delta,
    Drain,
    Message,
    Resume,
    StepStats,
)
from pagedkv.scheduling.report import refused, refused_resume

# What a core waits at most, before its next step, for the word of the front end on a request that
# has come, so that it is in that step: a share of its last step, or so many seconds if it is more.
_WORD_SHARE, _WORD = 0.5, 0.01

# Answers a question about the core between two steps, from its argument.
Answerer = Callable[[EngineCore, str], Any]


def _explain(core: EngineCore, request_id: str) -> str:
    log = core.scheduler.log
    return explain(log.decisions, request_id, log.num_dropped)


def _pool(core: EngineCore, _: str) -> dict[str, Any]:
    return take_picture(core)


ANSWERS: Mapping[str, Answerer] = {"explain": _explain, "pool": _pool}


def core_facts(core: EngineCore, folder: str | None = None, report: Sequence[str] = ()) -> Facts:
    """What a front has to know of this core."""
    manager = core.scheduler.manager
    return Facts(
        core.scheduler.config,
        manager.num_blocks,
        manager.block_size,
        min(manager.num_blocks, manager.max_blocks_per_seq),
        folder,
        tuple(report),
    )


class CoreLoop:
    """Steps a core while it has work and waits for messages while it has none.

    `send` may be called from any thread; `run` owns the core and calls `post`, in its thread, with
    a Batch at once and after every iteration, with Answers, and with Died when the core cannot go
    on. clock: seconds, that of the requests' arrivals. moves: of the core, if requests move between
    it and others; they go on between the steps, and what they want sent is posted after the Batch.
    """

    def __init__(
        self,
        core: EngineCore,
        post: Callable[[FromCore], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        moves: Moves | None = None,
    ) -> None:
        self.core, self.clock, self._moves = core, clock, moves
        self._stalled = False  # the last plan had no room for anything
        self._word_due = -math.inf  # until then the front end's word on a move is waited for
        self._took = 0.0  # seconds: the last step
        self._post = post
        self._inbox: queue.SimpleQueue[ToCore] = queue.SimpleQueue()
        self._applied = 0
        self._held = 0  # blocks, as of the last status that was posted
        self.step_began: float | None = None  # on the clock; None between two steps
        self.thread: int | None = None  # id of the one in `run`

    def send(self, message: ToCore) -> None:
        """Takes effect before the next step."""
        self._inbox.put(message)

    def run(self) -> bool:
        """Until Close, then True; False: the core cannot go on, and Died was posted."""
        self.thread = threading.get_ident()
        self._post_batch((), None)
        try:
            while self._take_messages():
                self._move_on()
                if self.core.has_unfinished():
                    self._step()
        except BaseException as error:  # what a step cannot contain: whoever waits is told
            self._post(Died(type(error).__name__, str(error)))
            return False
        return True

    def _step(self) -> None:
        self.step_began = self.clock()
        deltas, stats = self.core.step(self.step_began)
        self._took = self.clock() - self.step_began
        self.step_began = None
        self._stalled = stats is None and not deltas
        self._post_batch(tuple(deltas), stats)
        self._move_on()

    def _take_messages(self) -> bool:
        """All that have come; waits for one if there is nothing else to do. False: it was Close.

        What comes meanwhile waits for a step, if there is one to do: peers answer each other at
        once, and requests that run would stand still until all K/V of another have come.
        """
        left = self._inbox.qsize()
        while left > 0 or self._idle or self._word_due > self.clock():
            left -= 1
            try:
                message = self._inbox.get(timeout=self._pause)
            except queue.Empty:  # it is time to look at the moves
                return True
            self._stalled = False
            match message:
                case Close():
                    return False
                case Ask() as ask:
                    self._post(self._answer(ask))
                case Move() | FromPeer() | Own() | Disown() | PeerGone() as order:
                    self._hand_to_moves(order)
                    if isinstance(order, (Own, Disown)):
                        self._word_due = -math.inf
                case Add() | Abort() | Drain() | Resume() as message:
                    self._hand_over(message)
        return True

    @property
    def _idle(self) -> bool:
        """Whether there is nothing to do before something comes."""
        return not self.core.has_unfinished() or (self._stalled and self._moves is not None)

    @property
    def _pause(self) -> float | None:
        """Seconds that may pass without a message. None: any time."""
        moves = self._moves
        if not self._idle:
            return max(0.0, self._word_due - self.clock())
        return None if moves is None or not (moves.busy or self._stalled) else moves.pause

    def _hand_to_moves(self, order: MoveOrder) -> None:
        if self._moves is not None:
            self._moves.handle(order, self.clock())
            self._move_on()

    def _move_on(self) -> None:
        """Between two steps: moves go on, as far as they can."""
        if self._moves is not None:
            self._moves.advance(self.clock(), self._stalled)
            for news in self._moves.take_news():
                self._post(news)
                if isinstance(news, Complete):
                    self._word_due = self.clock() + max(_WORD, _WORD_SHARE * self._took)
            held = self.core.scheduler.manager.num_held_blocks
            if held != self._held and not self.core.has_unfinished():
                self._post_batch((), None)  # no step will say it

    def _post_batch(self, deltas: tuple[Delta, ...], stats: StepStats | None) -> None:
        status = core_status(self.core)
        self._held = status.blocks_held
        self._post(Batch(deltas, stats, self._applied, status))

    def _hand_over(self, message: Message) -> None:
        self._applied += 1
        try:
            self.core.send(message)
        except RequestError as error:  # such as an id that is in use
            ends = []
            if isinstance(message, Add):
                ends = refused(message, str(error), "invalid")
            elif isinstance(message, Resume):
                ends = refused_resume(message, str(error), "invalid")
            if ends:
                self._post(Batch(tuple(ends), None, self._applied))

    def _answer(self, ask: Ask) -> Answer:
        answerer = ANSWERS.get(ask.kind)
        if answerer is None:
            return Answer(ask.id, error=f"nothing is known of {ask.kind!r:.100}")
        try:
            return Answer(ask.id, answerer(self.core, ask.argument))
        except Exception as error:
            return Answer(ask.id, error=f"{type(error).__name__}: {error}")
