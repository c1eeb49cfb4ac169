"""The loop: apply messages, plan, submit, collect, commit. No torch, no text."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from pagedkv.cache import SanitizerError
from pagedkv.engine.recording import Recorder
from pagedkv.errors import RequestError
from pagedkv.scheduling.messages import Abort, Add, Delta, Drain, Message, Resume, StepStats
from pagedkv.scheduling.report import refused, refused_resume
from pagedkv.scheduling.scheduler import Scheduler
from pagedkv.scheduling.step import Executor, Result, Step


class _Use(NamedTuple):
    """What sequences take while a step runs: see StepStats."""

    blocks: int
    blocks_unshared: int
    slots_filled: int
    slots_unshared: int
    slots_reserved: int


class EngineCore:
    """Drives a Scheduler and an Executor.

    `send` may be called from any thread; `step` by one thread at a time, which owns the scheduler.
    Messages take effect at the start of the next `step`, in the order they were sent.
    recorder: told of all that comes in. clock: seconds, for the parts of a step in StepStats alone:
    nothing that is decided depends on it. None: they are 0.0.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        recorder: Recorder | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self._recorder = recorder
        self._clock = clock or _no_clock
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._ids: set[str] = set()  # requests sent whose end was not handed out yet
        self._lock = threading.Lock()  # of `_ids`
        self._deltas: list[Delta] = []  # not handed out yet: a step that raises leaves some
        # Whether blocks are held for requests that are being moved.
        self.guests: Callable[[], bool] = _no_guests

    def send(self, message: Message) -> None:
        """Queues a message.

        RequestError: no message, or an Add or Resume whose id is that of a request whose end no
        `step` has returned yet.
        """
        if not isinstance(message, (Add, Abort, Drain, Resume)):
            raise RequestError(f"{message!r:.200} is no message: send Add, Abort, Drain or Resume")
        if not isinstance(message, Drain) and not isinstance(message.request_id, str):
            raise RequestError(f"request_id={message.request_id!r:.200} must be a string")
        if isinstance(message, (Add, Resume)):
            with self._lock:
                if message.request_id in self._ids:
                    raise RequestError(
                        f"request_id {message.request_id!r} is in use: choose another"
                    )
                self._ids.add(message.request_id)
        self._messages.put(message)

    def __contains__(self, request_id: object) -> bool:
        """Whether the request was sent, and its end not handed out."""
        with self._lock:
            return request_id in self._ids

    @property
    def request_ids(self) -> list[str]:
        """Of all requests that were sent, and whose end was not handed out."""
        with self._lock:
            return list(self._ids)

    @property
    def is_recorded(self) -> bool:
        """Whether a Recorder is told of what comes in."""
        return self._recorder is not None

    def has_unfinished(self) -> bool:
        """Whether a `step` has anything to do or to hand out."""
        return bool(self._deltas) or self.scheduler.has_work or not self._messages.empty()

    def step(self, now: float) -> tuple[list[Delta], StepStats | None]:
        """Runs one iteration; `now` in seconds.

        Returns what there is to deliver, and the step's numbers (None: nothing was computed).
        An error of the executor ends the requests of its batch and is reported in their deltas.
        What was decided before an interrupt or an InvariantError is delivered by the next call.
        InvariantError, SanitizerError: the state is not to be trusted any more.
        """
        try:
            stats = self._iterate(now)
        finally:
            self._deltas += self.scheduler.take_deltas()
        sanitizer = self.scheduler.manager.sanitizer
        if sanitizer is not None and not self.scheduler.has_work and not self.guests():
            sanitizer.check_idle()
        deltas, self._deltas = self._deltas, []
        self._release_ids(deltas)
        return deltas, stats

    def take_messages(self, now: float) -> None:
        """Lets what was sent take effect now; what follows is handed out by the next `step`.

        Only between two steps, from the thread that steps.
        """
        while not self._messages.empty():
            self._apply(self._messages.get(), now)

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes. Only between two steps, from the thread that steps."""
        if self._recorder is not None:
            self._recorder.reset_cache()
        self.scheduler.manager.reset_cache()

    def release(self, request_id: str, now: float) -> Resume:
        """Gives up a request that has not ended, to go on elsewhere; nothing of it is delivered.

        Only between two steps, from the thread that steps. KeyError: no such request is here.
        """
        if self._recorder is not None:
            self._recorder.release(request_id, now)
        resume = self.scheduler.release(request_id, now)
        with self._lock:
            self._ids.discard(request_id)
        return resume

    def _iterate(self, now: float) -> StepStats | None:
        started = self._clock()
        if self._recorder is not None:
            self._recorder.begin(now)
        self.take_messages(now)
        preempted = self.scheduler.stats.num_preemptions
        step = self.scheduler.plan(now)
        self._deltas += self.scheduler.take_deltas()
        if step is None:
            return None
        preempted = self.scheduler.stats.num_preemptions - preempted
        use = self._use(step)
        planned = self._clock()
        result, computed = self._execute(step, now)
        sampling = 0.0 if result is None else result.sample_duration
        manager, counts = self.scheduler.manager, self.scheduler.stats
        return StepStats(
            step=step.index,
            now=now,
            duration=0.0 if result is None else result.duration,
            num_running=counts.num_running,
            num_waiting=counts.num_waiting,
            num_tokens=step.num_tokens,
            num_preempted=preempted,
            blocks_free=manager.num_free_blocks,
            blocks_cached=manager.num_cached_blocks,
            blocks_held=manager.num_held_blocks,
            blocks_peak=use.blocks,
            blocks_unshared=use.blocks_unshared,
            slots_filled=use.slots_filled,
            slots_unshared=use.slots_unshared,
            slots_reserved=use.slots_reserved,
            shared_spans=0 if result is None else result.shared_spans,
            schedule_seconds=planned - started,
            execute_seconds=computed - planned - sampling,
            sample_seconds=sampling,
            deliver_seconds=self._clock() - computed,
        )

    def _apply(self, message: Message, now: float) -> None:
        if self._recorder is not None:
            self._recorder.message(message)
        match message:
            case Add() as add:
                try:
                    self._deltas += self.scheduler.add(add, now)
                except Exception as error:  # its own end, not the loop's
                    why = f"the request cannot be read: {type(error).__name__}: {error}"
                    self._deltas += refused(add, why, "engine")
            case Resume() as resume:
                try:
                    self._deltas += self.scheduler.resume(resume, now)
                except Exception as error:
                    why = f"the request cannot be read: {type(error).__name__}: {error}"
                    self._deltas += refused_resume(resume, why, "engine")
            case Abort() as abort:
                self._deltas += self.scheduler.abort(abort, now)
            case Drain():
                self.scheduler.drain()

    def _execute(self, step: Step, now: float) -> tuple[Result | None, float]:
        """Computes a planned step; None: it failed. And when that was done, by the clock."""
        try:
            result = self._compute(step)
        except SanitizerError as error:  # not the fault of the step's requests alone
            with suppress(Exception):  # a damaged state may fail in any way
                self._deltas += self.scheduler.fail(f"step {step.index}: {error}", now)
            raise
        except Exception as error:
            message = f"step {step.index} failed: {type(error).__name__}: {error}"
            computed = self._clock()
            self._deltas += self.scheduler.fail(message, now)
            return None, computed
        except BaseException as error:  # an interrupt: leave a usable engine behind
            message = f"step {step.index} was interrupted by {error!r}"
            self._deltas += self.scheduler.fail(message, now)
            raise
        computed = self._clock()
        self._deltas += self.scheduler.commit(result, now)
        return result, computed

    def _compute(self, step: Step) -> Result:
        """The executor's Result, or what it raises; recorded."""
        try:
            result = self.executor.collect(self.executor.submit(step))
        except BaseException as error:
            if self._recorder is not None:
                self._recorder.failure(error)
            raise
        if self._recorder is not None:
            self._recorder.result(result)
        return result

    def _release_ids(self, deltas: list[Delta]) -> None:
        """The ids of requests that have ended are free for new ones: their ends are handed out."""
        for delta in deltas:
            if delta.finish_reason is not None and delta.request_id not in self.scheduler:
                with self._lock:
                    self._ids.discard(delta.request_id)

    def _use(self, step: Step) -> _Use:
        """Blocks and slots in use while the step runs. Costs O(sequences), not O(pool)."""
        scheduler, manager = self.scheduler, self.scheduler.manager
        size, held = manager.block_size, manager.num_held_blocks
        ends = step.slots[np.cumsum(step.query_lens) - 1]
        num_samples = scheduler.num_samples
        reserved = num_samples * scheduler.config.max_model_len
        if num_samples == scheduler.num_sequences == len(ends) and not len(step.copies):
            # Every sequence has a row, a block to itself at its end, and one sample.
            return _Use(
                held,
                int((-(-step.context_lens // size)).sum()),
                held * size - int((size - 1 - ends % size).sum()),
                int(step.context_lens.sum()),
                reserved,
            )
        # Held blocks are full, but for the last of each sequence and what is about to be copied.
        tails = dict(zip((ends // size).tolist(), (ends % size + 1).tolist(), strict=True))
        lengths = dict(zip(step.seqs.tolist(), step.context_lens.tolist(), strict=True))
        slots_unshared = blocks_unshared = 0
        for seq, samples in scheduler.sharers.items():
            if seq not in lengths:
                lengths[seq] = int(manager.tables([seq]).lengths[0])  # with what is being loaded
                # Last blocks; a sequence that was opened on nothing, and has to wait, has none.
                for tail in manager.block_table(seq)[-1:].tolist():
                    tails[tail] = max(tails.get(tail, 0), (lengths[seq] - 1) % size + 1)
            slots_unshared += samples * lengths[seq]
            blocks_unshared += samples * -(-lengths[seq] // size)
        copies = Counter(step.copies[:, 0].tolist())
        for source, _, filled in step.copies.tolist():
            if source in tails or manager.refcount(source) == copies[source]:
                tails[source] = max(filled, tails.get(source, 0))
        return _Use(
            held,
            blocks_unshared,
            held * size - sum(size - filled for filled in tails.values()),
            slots_unshared,
            reserved,
        )


def _no_clock() -> float:
    return 0.0


def _no_guests() -> bool:
    return False
