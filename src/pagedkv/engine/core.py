"""The loop: apply messages, plan, submit, collect, commit. No torch, no clock, no text."""

from __future__ import annotations

import queue
import threading

import numpy as np

from pagedkv.cache import SeqId
from pagedkv.errors import RequestError
from pagedkv.scheduling.messages import Abort, Add, Delta, Drain, Message, StepStats
from pagedkv.scheduling.scheduler import Scheduler
from pagedkv.scheduling.step import Executor, Step


class EngineCore:
    """Drives a Scheduler and an Executor.

    `send` may be called from any thread; `step` by one thread at a time, which owns the scheduler.
    Messages take effect at the start of the next `step`, in the order they were sent.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._ids: set[str] = set()  # requests sent and not yet ended
        self._lock = threading.Lock()  # of `_ids`

    def send(self, message: Message) -> None:
        """Queues a message.

        RequestError: an Add whose id is that of a request which has not ended yet.
        """
        if isinstance(message, Add):
            with self._lock:
                if message.request_id in self._ids:
                    raise RequestError(
                        f"request_id {message.request_id!r} is in use: choose another"
                    )
                self._ids.add(message.request_id)
        self._messages.put(message)

    def has_unfinished(self) -> bool:
        """Whether a `step` has anything to do."""
        return len(self.scheduler) > 0 or not self._messages.empty()

    def step(self, now: float) -> tuple[list[Delta], StepStats | None]:
        """Runs one iteration; `now` in seconds.

        Returns what there is to deliver, and the step's numbers (None: nothing was computed).
        An error of the executor ends the requests of its batch and is reported in their deltas.
        """
        deltas = self._apply_messages()
        preempted = self.scheduler.stats.num_preemptions
        step = self.scheduler.plan(now)
        deltas += self.scheduler.take_deltas()
        stats = None
        if step is not None:
            preempted = self.scheduler.stats.num_preemptions - preempted
            peak = self.scheduler.manager.num_held_blocks
            more, duration = self._execute(step, now)
            deltas += more
            stats = self._stats(step, now, duration, preempted, peak)
        self._forget_ended(deltas)
        return deltas, stats

    def _apply_messages(self) -> list[Delta]:
        deltas: list[Delta] = []
        while not self._messages.empty():
            match self._messages.get():
                case Add() as add:
                    deltas += self.scheduler.add(add)
                case Abort() as abort:
                    deltas += self.scheduler.abort(abort)
                case Drain():
                    self.scheduler.drain()
        return deltas

    def _execute(self, step: Step, now: float) -> tuple[list[Delta], float]:
        """Computes a planned step; returns its deltas and its duration in seconds."""
        try:
            result = self.executor.collect(self.executor.submit(step))
        except Exception as error:
            message = f"step {step.index} failed: {type(error).__name__}: {error}"
            return self.scheduler.fail(message, now), 0.0
        except BaseException as error:  # an interrupt: leave a usable engine behind
            message = f"step {step.index} was interrupted by {error!r}"
            self._forget_ended(self.scheduler.fail(message, now))
            raise
        return self.scheduler.commit(result, now), result.duration

    def _forget_ended(self, deltas: list[Delta]) -> None:
        """Frees the ids of requests that have ended, for new requests."""
        for delta in deltas:
            if delta.finish_reason is not None and delta.request_id not in self.scheduler:
                with self._lock:
                    self._ids.discard(delta.request_id)

    def _stats(
        self, step: Step, now: float, duration: float, preempted: int, peak: int
    ) -> StepStats:
        scheduler, manager = self.scheduler, self.scheduler.manager
        counts = scheduler.stats
        sequences = scheduler.sequences
        return StepStats(
            step=step.index,
            now=now,
            duration=duration,
            num_running=counts.num_running,
            num_waiting=counts.num_waiting,
            num_tokens=step.num_tokens,
            num_preempted=preempted,
            blocks_free=manager.num_free_blocks,
            blocks_cached=manager.num_cached_blocks,
            blocks_held=manager.num_held_blocks,
            blocks_peak=peak,
            slots_filled=self._slots_filled(sequences),
            slots_reserved=len(sequences) * scheduler.config.max_model_len,
        )

    def _slots_filled(self, sequences: list[SeqId]) -> int:
        """Committed tokens of the sequences, those in shared slots counted once."""
        manager = self.scheduler.manager
        csr = manager.tables(sequences).csr()
        filled = np.zeros(manager.num_blocks + 1, np.int64)
        ends = csr.indptr[1:][np.diff(csr.indptr) > 0] - 1
        is_tail = np.zeros(len(csr.indices), np.bool_)
        is_tail[ends] = True
        np.maximum.at(filled, csr.indices[ends], csr.last_page_len[np.diff(csr.indptr) > 0])
        filled[csr.indices[~is_tail]] = manager.block_size
        return int(filled.sum())
