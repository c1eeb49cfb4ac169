"""The engine as a user of the library drives it: add requests, step, read outputs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable

from transformers import PreTrainedTokenizerBase

from pagedkv.cache import BlockManager
from pagedkv.engine.core import EngineCore
from pagedkv.engine.front_end import FrontEnd
from pagedkv.engine.interrupts import deferred_interrupt
from pagedkv.engine.output import RequestOutput
from pagedkv.engine.requests import ChatMessages, Prepared, Prompt
from pagedkv.errors import PagedKVError
from pagedkv.scheduling.cost import CostModel
from pagedkv.scheduling.explain import explain
from pagedkv.scheduling.messages import StepStats
from pagedkv.scheduling.params import BeamSearchParams, SamplingParams
from pagedkv.scheduling.tiering import TieringStats


class LLMEngine:
    """Text in, text out, over an EngineCore.

    `add_request` and `abort_request` may be called from any thread, `step` from one at a time.
    `clock` gives seconds; arrival times are on it. `seed` starts the generator that draws a seed
    for each request that brings none.
    """

    def __init__(
        self,
        core: EngineCore,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.core = core
        self.clock = clock
        self.last_stats: StepStats | None = None
        self._front = FrontEnd(
            tokenizer, core.scheduler.validate, core.send, seed=seed, clock=lambda: self.clock()
        )
        self._undelivered: list[RequestOutput] = []
        self._stepping = threading.Lock()

    @property
    def block_manager(self) -> BlockManager:
        """The block pool. To look at; the scheduler alone may change it."""
        return self.core.scheduler.manager

    @property
    def cost(self) -> CostModel:
        """What steps have taken so far."""
        return self.core.scheduler.cost

    @property
    def tiering(self) -> TieringStats | None:
        """Blocks moved to and from the tiers below so far; None without any."""
        tiering = self.core.scheduler.tiering
        return None if tiering is None else tiering.stats

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams,
        *,
        arrival_time: float | None = None,
        priority: int = 0,
        tenant: str | None = None,
        cache_salt: str | None = None,
        ttft_slo: float | None = None,
        tpot_slo: float | None = None,
        deadline: float | None = None,
    ) -> None:
        """Queues a request; it runs from the next `step` on.

        arrival_time: seconds on the engine's clock, now by default; requests are served in its
        order unless the policy has another. priority: from -1000 to 1000, lower numbers first under
        the policy "priority". tenant: who is to be served fairly and has a quota; requests of
        different tenants share no K/V but public prefixes. It is the caller's
        to say who its client is; never take it from what a client has sent.
        cache_salt: what the client gives; requests of a tenant share K/V only where it is equal.
        ttft_slo, tpot_slo: seconds, above 0, from the arrival to the first token and from each
        token to the next; policies with deadlines aim at them. deadline: time on the engine's
        clock from which on the output is worth nothing; what is not finished by then ends with
        finish reason "deadline", under every policy.
        RequestError: it can never run as given, or its id is that of a request whose last output
        has not been returned yet. Nothing is allocated and nothing has changed then.
        """
        arrival = self.clock() if arrival_time is None else arrival_time
        self.submit(
            self._front.reader.read(
                request_id,
                prompt,
                params,
                arrival=arrival,
                priority=priority,
                tenant=tenant,
                cache_salt=cache_salt,
                ttft_slo=ttft_slo,
                tpot_slo=tpot_slo,
                deadline=deadline,
            )
        )

    def prepare(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams,
        *,
        tenant: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        ttft_slo: float | None = None,
        tpot_slo: float | None = None,
        deadline: float | None = None,
    ) -> Prepared:
        """The checks of `add_request`, all but that of the id, without adding the request."""
        return self._front.reader.read(
            request_id,
            prompt,
            params,
            arrival=self.clock(),
            tenant=tenant,
            cache_salt=cache_salt,
            priority=priority,
            ttft_slo=ttft_slo,
            tpot_slo=tpot_slo,
            deadline=deadline,
        )

    @property
    def has_chat_template(self) -> bool:
        return self._front.reader.has_chat_template

    def chat_prompt(self, messages: ChatMessages) -> Prompt:
        """The prompt that the model's chat template makes of a conversation."""
        return self._front.reader.chat(messages)

    def submit(self, prepared: Prepared) -> None:
        """Queues what `prepare` has checked."""
        self._front.submit(prepared)

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """Ends a request, or several, in any state; the next `step` reports and releases them.

        Ids that are unknown or have ended are ignored.
        """
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        self._front.abort(i for i in ids if isinstance(i, str))

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes, between two steps. Only from the thread that steps.

        Requests that are running keep their blocks, and nothing of them is found later.
        """
        if not self._stepping.acquire(blocking=False):
            raise PagedKVError("another thread is in a step of this engine: reset from that one")
        try:
            self.core.reset_prefix_cache()
        finally:
            self._stepping.release()

    def explain(self, request_id: str) -> str:
        """In words, with the numbers: why a request waited, was preempted, or ended.

        From the last decisions, `SchedulerConfig.decision_log` of them; earlier requests of this id
        come first. From any thread. RequestError: they have none of this request.
        """
        log = self.core.scheduler.log
        return explain(log.decisions, request_id, log.num_dropped)

    def cancel(self, request_ids: Collection[str]) -> None:
        """Ends requests now and reports nothing of them. Only from the thread that steps.

        Also cleans up after a step that an interrupt has cut off.
        """
        self._front.discard(request_ids)
        self._undelivered = [o for o in self._undelivered if o.request_id not in request_ids]
        self._advance()

    def step(self) -> list[RequestOutput]:
        """One iteration of the loop: one output for each request that has something new.

        Ctrl-C is seen when the iteration is over; what it brought is returned by the next call.
        PagedKVError: another thread is stepping this engine.
        """
        self._advance()
        if not len(self._front):
            # Whoever is left in the loop has been ended by a stop string: release its blocks.
            self._advance()
        outputs, self._undelivered = self._undelivered, []
        newest = {output.request_id: output for output in outputs}
        if len(newest) == len(outputs):
            return outputs
        return [o for o in outputs if o.finished or newest[o.request_id] is o]

    def put_back(self, outputs: list[RequestOutput]) -> None:
        """Outputs that the caller of `step` has no use for, for the next `step` to return."""
        self._undelivered += outputs

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to do or to return."""
        return bool(self._undelivered) or self.core.has_unfinished()

    def _advance(self) -> None:
        if not self.core.has_unfinished():
            return
        if not self._stepping.acquire(blocking=False):
            raise PagedKVError("another thread is in a step of this engine: step from one thread")
        try:
            with deferred_interrupt():
                self._iterate()
        finally:
            self._stepping.release()

    def _iterate(self) -> None:
        deltas, stats = self.core.step(self.clock())
        if stats is not None:
            self.last_stats = stats
        self._undelivered += self._front.process(deltas)
