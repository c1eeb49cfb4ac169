"""The host of a core's transfer machines: requests that move to other workers, and from them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from pagedkv.engine.core import EngineCore
from pagedkv.engine.leaving import Leaving
from pagedkv.engine.transfers import Payloads
from pagedkv.engine.transports import Transport
from pagedkv.engine.wire import (
    Complete,
    Disown,
    FromPeer,
    Move,
    MoveFailed,
    MoveNews,
    MoveOrder,
    Own,
    PeerGone,
    ToPeer,
)
from pagedkv.errors import ConfigError, PagedKVError
from pagedkv.scheduling.messages import Abort, Resume
from pagedkv.scheduling.request import Request
from pagedkv.transfer.actions import (
    Abandoned,
    Action,
    Completed,
    Copy,
    Free,
    Park,
    Reclaimed,
    Released,
    Resumed,
    Send,
    SendData,
    Write,
)
from pagedkv.transfer.arrival import ReceiverState
from pagedkv.transfer.endpoint import Endpoint
from pagedkv.transfer.limits import TransferLimits
from pagedkv.transfer.messages import (
    Commit,
    Data,
    FrameError,
    Hello,
    Message,
    MoveId,
    Naming,
    Part,
    Reserve,
    pack,
    unpack,
)
from pagedkv.transfer.payload import as_blocks, filled, store
from pagedkv.transfer.state import StateError, pack_state, unpack_state

# Looks at the clock while messages are awaited, in one `TransferLimits.retry`.
_TICKS = 4


class Moves:
    """Carries out what the machines of `transfer` want, between two steps, by the stepping thread.

    core: its requests' ids are "<id>@<epoch>". ours: what this worker is. Sequences that come in
    take rows of the block table beyond those of the scheduler: as many as `max_seqs` is more than
    its seats. `news` collects what is to be sent, in order.

    What moves is a whole request, with the K/V of all of its samples.
    """

    def __init__(
        self,
        core: EngineCore,
        payloads: Payloads,
        transport: Transport,
        ours: Hello,
        limits: TransferLimits | None = None,
    ) -> None:
        self.core, self._scheduler, self._manager = core, core.scheduler, core.scheduler.manager
        self._payloads, self._transport = payloads, transport
        if not self._manager.prefix_caching:
            raise ConfigError(
                "prefix caching is off: a request finds the K/V that were moved with it by their "
                "names, and would be computed again: switch it on where requests are moved"
            )
        rows = self._manager.max_seqs - self._scheduler.config.seats
        if rows < 1:
            raise ConfigError(
                f"the block table has max_seqs={self._manager.max_seqs}, all for requests that "
                "run: give it more, for those that are moved here"
            )
        if core.is_recorded:
            raise ConfigError(
                "a recording does not hold what other workers send: leave `record` out where "
                "requests are moved"
            )
        # What starts leaves so much of the pool to those who run, wherever it comes from.
        watermark = self._scheduler.config.watermark_blocks(self._manager.num_blocks)
        limits = limits or TransferLimits()
        limits = replace(limits, spare_blocks=max(watermark, limits.spare_blocks))
        self.endpoint = Endpoint(self._manager, ours, limits, rows)
        self.news: list[MoveNews] = []
        self._leaving: dict[MoveId, Leaving] = {}
        self._owned: set[MoveId] = set()  # resumed here, and not admitted yet
        self._next_tick = 0.0
        core.guests = lambda: bool(self._leaving or self.endpoint.receiver.moves)

    @property
    def busy(self) -> bool:
        """Whether anything is under way: `advance` is to be called every `pause` seconds then."""
        endpoint = self.endpoint
        return bool(endpoint.sender.moves or endpoint.receiver.moves)

    @property
    def pause(self) -> float:
        """Seconds between two looks at the clock."""
        return self.endpoint.limits.retry / _TICKS

    @property
    def leaving(self) -> set[str]:
        """Ids, here, of requests that are on their way to other workers."""
        return {it.request_id for it in self._leaving.values()}

    @property
    def coming(self) -> list[MoveId]:
        """Moves that hold blocks here for requests which are not ours yet."""
        receiver = self.endpoint.receiver
        return [m for m in receiver.moves if receiver.state(m) is not ReceiverState.OWNED]

    def take_news(self) -> list[MoveNews]:
        """What is to be sent since the last call."""
        news, self.news = self.news, []
        return news

    # ---- what comes in ------------------------------------------------------------------------

    def handle(self, order: MoveOrder, now: float) -> None:
        """Takes a frame of the front end or of another worker. Broken ones change nothing."""
        endpoint = self.endpoint
        match order:
            case Move():
                self._begin(order, now)
            case FromPeer(worker, frame):
                try:
                    message = unpack(frame)
                except FrameError:
                    return
                self._carry_out(self._heard(worker, message, now), now)
            case Own():
                self._carry_out(endpoint.own(MoveId(order.request_id, order.epoch), now), now)
            case Disown():
                self._disown(MoveId(order.request_id, order.epoch), now)
            case PeerGone(worker):
                self._carry_out(endpoint.peer_gone(worker, now), now)

    def advance(self, now: float, stalled: bool = False) -> None:
        """Goes on with all moves: after each step, after messages, and as time passes.

        stalled: the last plan had no room for anything. What is kept for requests that have come,
        and do not run yet, is let go of then: it may be evicted, and computed again.
        """
        endpoint = self.endpoint
        for move in list(self._leaving):
            self._progress(move, now)
        for move in list(self._owned):
            request = self._scheduler.roster.requests.get(move.owned_id)
            running = request is not None and bool(request.branches)
            if running or stalled or move.owned_id not in self.core:
                self._owned.discard(move)
                self._carry_out(endpoint.admitted(move, now), now)
        if now >= self._next_tick:
            self._next_tick = now + self.pause
            self._carry_out(endpoint.tick(now), now)

    def close(self) -> None:
        """Nothing is sent or received any more. Moves under way are left where they are."""
        self._transport.close()

    # ---- leaving ------------------------------------------------------------------------------

    def _begin(self, order: Move, now: float) -> None:
        move = MoveId(order.request_id, order.epoch)
        found = self._newest(order.request_id, order.epoch)
        if found is None:
            reason = f"request {order.request_id!r} is not at worker {self.endpoint.ours.worker!r}"
            self.news.append(MoveFailed(*move, reason, ended=True))
            return
        if move in self._leaving:
            return
        if found not in self._scheduler:  # the K/V of its first step are to go while they come
            self.core.take_messages(now)
        request = self._scheduler.roster.requests.get(found)
        if request is None:
            self.news.append(MoveFailed(*move, "the request has ended", ended=True))
            return
        leaving = self._leaving[move] = Leaving.of(request, order.mode)
        actions = self.endpoint.start(
            move,
            order.to,
            request.common_tokens(),
            Naming(request.namespace, request.public),
            order.mode,
            self._manager.block_size,
            now,
            leaving.own_lengths(request),
        )
        self._carry_out(actions, now)

    def _newest(self, request_id: str, below: int) -> str | None:
        """The id here of a request, of several the one with the highest epoch below this."""
        epochs = []
        for owned_id in self.core.request_ids:
            name, _, epoch = owned_id.rpartition("@")
            if name == request_id and epoch.isdecimal() and int(epoch) < below:
                epochs.append(int(epoch))
        return MoveId(request_id, max(epochs)).owned_id if epochs else None

    def _progress(self, move: MoveId, now: float) -> None:
        leaving = self._leaving[move]
        request = self._scheduler.roster.requests.get(leaving.request_id)
        if request is None:  # it has ended
            self._leaving.pop(move, None)
            self._carry_out(self.endpoint.cancel(move, "the request has ended"), now)
            return
        held = leaving.held(request)
        if held is None:
            if leaving.parked:  # it computes nothing: waiting would have no end
                why = "K/V of the request that stands still cannot be read here"
                told = self.endpoint.cancel(move, why)
                self._carry_out([*told, Reclaimed(move, why)], now)
            return
        self._carry_out(self.endpoint.progress(move, held.seq, now, held.parted), now)
        if leaving.mode == "prefilled" and request.started:
            leaving.to_park = True
        if leaving.to_park and not leaving.parked and move in self.endpoint.sender:
            resume = self._scheduler.park(leaving.request_id, now)
            if resume is not None:
                leaving.parked = True
                self._parked(move, leaving, request, resume, now)

    def _parked(
        self, move: MoveId, leaving: Leaving, request: Request, resume: Resume, now: float
    ) -> None:
        held = leaving.held(request)
        if held is None:
            raise PagedKVError(f"request {leaving.request_id!r} is parked and has no K/V")
        # The beams of a search are not reported before its end.
        silent = request.search is not None
        counts = tuple(0 if silent else len(output.tokens) for output in resume.outputs)
        ended = tuple(output.finish_reason is not None for output in resume.outputs)
        state = pack_state(resume)
        self._carry_out(
            self.endpoint.parked(move, held.seq, state, counts, ended, now, held.parted), now
        )

    def _disown(self, move: MoveId, now: float) -> None:
        """Who owns a request is decided elsewhere: neither the front end nor a peer is told."""
        for mine in [m for m, it in self._leaving.items() if it.request_id == move.owned_id]:
            del self._leaving[mine]
            told = self.endpoint.cancel(mine, "it has another owner")
            self._carry_out([action for action in told if not isinstance(action, Send)], now)
        why = "the front end has given this copy up"
        self._carry_out(self.endpoint.disown(move, why, now), now)
        if move.owned_id in self._scheduler:
            self.core.release(move.owned_id, now)
        elif move.owned_id in self.core:  # sent, and not taken in yet
            self.core.send(Abort(move.owned_id))

    # ---- coming -------------------------------------------------------------------------------

    def _heard(self, worker: str, message: Message, now: float) -> list[Action]:
        if not isinstance(message, (Reserve, Part)):
            return self.endpoint.handle(worker, message, now)
        receiver, move = self.endpoint.receiver, message.move
        before = receiver.cached(move)
        actions = self.endpoint.handle(worker, message, now)
        self._scheduler.tally.moved(cached=max(0, receiver.cached(move) - before))
        return actions

    def _resume(self, move: MoveId, commit: Commit, now: float) -> list[Action]:
        try:
            resume = unpack_state(commit.state, Resume)
            ended = tuple(output.finish_reason is not None for output in resume.outputs)
            if ended != commit.ended:  # by which the front end has judged the copy
                raise StateError(
                    f"samples ended by the state: {ended}, by the commit: {commit.ended}"
                )
            add = replace(resume.add, request_id=move.owned_id)
            self.core.send(replace(resume, add=add))
        except PagedKVError as error:  # such as another release's state
            return [*self.endpoint.admitted(move, now), Abandoned(move, str(error))]
        self._owned.add(move)
        return []

    def _write(self, action: Write, now: float) -> list[Action]:
        theirs, data = self.endpoint.peer(action.worker), action.data
        blocks = as_blocks(data, theirs, self._transport.get(data.payload))
        bad = store(action, blocks, self.endpoint.ours, theirs, self._payloads)
        if not self._transport.is_intact():  # it may have changed between the check and the copy
            bad = data.start
        stop = data.stop if bad is None else max(action.start, bad)
        self._scheduler.tally.moved(sent=stop - action.start)
        return self.endpoint.written(action.move, bad, now)

    # ---- carrying out -------------------------------------------------------------------------

    def _carry_out(self, actions: Iterable[Action], now: float) -> None:
        todo = deque(actions)
        while todo:
            action = todo.popleft()
            match action:
                case Send(to, message):
                    self.news.append(ToPeer(to, pack(message)))
                case SendData(to, data):
                    self.news.append(ToPeer(to, pack(self._filled(action, data))))
                case Free(move, number):
                    self._transport.free(move, number)
                case Write():
                    todo.extendleft(reversed(self._write(action, now)))
                case Copy(copies):
                    self._payloads.copy(copies)
                case Park(move, _):
                    self._leaving[move].to_park = True
                case Released(move):
                    leaving = self._leaving.pop(move, None)
                    if leaving is not None and leaving.request_id in self._scheduler:
                        self.core.release(leaving.request_id, now)
                case Reclaimed(move, reason):
                    leaving = self._leaving.pop(move, None)
                    if leaving is not None and leaving.request_id in self._scheduler:
                        self._scheduler.unpark(leaving.request_id, now)
                    self.news.append(MoveFailed(*move, reason))
                case Completed(move, counts, ended):
                    self.news.append(Complete(*move, counts, ended))
                case Resumed(move, commit):
                    todo.extendleft(reversed(self._resume(move, commit, now)))
                case Abandoned(move, reason):
                    self.news.append(MoveFailed(*move, reason))

    def _filled(self, action: SendData, data: Data) -> Data:
        blocks = np.ascontiguousarray(self._payloads.read(action.blocks))
        return filled(action, blocks, self._transport.put(data.move, data.number, blocks))
