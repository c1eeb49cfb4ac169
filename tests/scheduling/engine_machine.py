"""Random sequences of everything that can happen to an engine, checked after each of them.

The engine runs the toy model, whose attention refuses a wrong entry. What a request must give is
what it gives alone (`alone`, `drawn`); when it must end, and why, is noted when it is sent. Whom
the engine computes, lets in and sends back is judged by `Watch`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from engine_faults import FAULTS, FaultyExecutor, Interrupt
from engine_oracle import Sampled, Sent, alone, drawn, prompt_scores, sampled
from engine_watch import Key, Watch
from harness import VOCAB, Run
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from pagedkv.errors import RequestError
from pagedkv.scheduling.config import ADMISSIONS
from pagedkv.scheduling.messages import Add, Delta, Drain
from pagedkv.scheduling.params import BeamSearchParams, SamplingParams
from pagedkv.scheduling.policies import POLICIES
from pagedkv.scheduling.tenants import Tenant

STEMS = tuple(tuple(first % VOCAB for first in range(i, i + 50)) for i in (1, 1, 20))
STOPS = tuple(range(40, 48))
ENDS = tuple(range(30, 36))


class EngineMachine(RuleBasedStateMachine):
    """See the module."""

    sanitize = False

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[str, Sent] = {}
        self.names = 0
        self.draining = False
        self.due: dict[Key, str] = {}  # ends that the next step has to report
        self.stalled = 0  # steps since anything new came out

    # ---- set-up

    @initialize(
        num_blocks=st.sampled_from(range(1, 17)),
        block_size=st.sampled_from((1, 2, 3, 4, 16)),
        budget=st.sampled_from(range(1, 49)),
        seats=st.sampled_from((1, 3, 5, 8)),
        caching=st.sampled_from((True, True, False)),
        eos=st.sampled_from(((), ENDS)),
        max_model_len=st.sampled_from((9, 90, 90)),
        public=st.sampled_from((0, 0, 4, 7)),
        admission=st.sampled_from(("prompt", *ADMISSIONS)),
        quantile=st.sampled_from((0.0, 0.5, 1.0)),
        watermark=st.sampled_from((0.0, 0.0, 0.2, 1.0)),
        policy=st.sampled_from(("fcfs", *POLICIES)),
        tenant=st.sampled_from((None, None, Tenant(weight=3), Tenant(max_running=1))),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        budget: int,
        seats: int,
        caching: bool,
        eos: tuple[int, ...],
        max_model_len: int,
        public: int,
        admission: str,
        quantile: float,
        watermark: float,
        policy: str,
        tenant: Tenant | None,
    ) -> None:
        self.size, self.eos, self.max_model_len = block_size, eos, max_model_len
        self.budget = 1 + (budget - 1) % (3 * block_size)
        self.executor = FaultyExecutor(num_blocks, block_size)
        self.run = Run(
            num_blocks,
            block_size,
            self.budget,
            seats,
            max_model_len,
            eos,
            caching,
            self.executor,
            errors_ok=True,
            public_prefixes=(STEMS[0][:public],) if public else (),
            sanitize=self.sanitize,
            admission=admission,
            admission_quantile=quantile,
            watermark=watermark,
            policy=policy,
            tenants=(("a", tenant),) if tenant is not None else (),
        )
        self.most_running = tenant.max_running if tenant is not None else None
        self.caching, self.num_blocks = caching, num_blocks
        self.seats = min(seats, self.budget)
        stem = STEMS[0][:public]
        self.watch = Watch(self.run, self.executor, caching, stem, self.sent, self.due)

    # ---- the rules

    def send(self, add: Add) -> None:
        self.run.core.send(add)
        self.run.sent += 1
        self.sent[add.request_id] = Sent(add)
        if self.refuses(add):
            self.due |= {(add.request_id, i): "error" for i in range(add.params.n)}

    def refuses(self, add: Add) -> bool:
        """Whether the request can never run, or comes too late."""
        length, n = len(add.prompt), add.params.n
        candidates = max(2, 1 + (0 if add.params.ignore_eos else len(self.eos))) * n
        return (
            self.draining
            or length == 0
            or length >= self.max_model_len
            or -(-length // self.size) > self.num_blocks
            or n > self.seats
            or (add.beam is not None and candidates > VOCAB)
        )

    def new_name(self, again: bool) -> str:
        """A new id, or one whose request has ended."""
        ended = [name for name, sent in self.sent.items() if sent.ended]
        if again and ended:
            for i in range(self.sent[ended[0]].n):
                self.run.ends.pop((ended[0], i))
                self.run.tokens.pop((ended[0], i))
            del self.sent[ended[0]]
            return ended[0]
        self.names += 1
        return f"r{self.names}"

    def prompt(self, stem: int, length: int, tail: int, fits: bool) -> tuple[int, ...]:
        """A common stem and a tail of its own."""
        length %= 3 * self.size + 2
        if fits:
            most = min(3 * self.size + 1, self.max_model_len - 1, self.num_blocks * self.size)
            length = 1 + length % most
        return (STEMS[stem][: max(0, length - tail)] + (7,) * tail)[:length]

    prompts: ClassVar[dict[str, Any]] = {
        "stem": st.integers(0, 2),
        "length": st.sampled_from(range(50)),
        "tail": st.sampled_from((0, 0, 0, 1, 2, 5)),
        "fits": st.sampled_from((True,) * 7 + (False,)),  # otherwise it may be refused
        "tenant": st.sampled_from((None, None, "a")),
        "salt": st.sampled_from((None, None, None, "s")),
        "again": st.booleans(),
    }

    @rule(
        **prompts,
        n=st.sampled_from((1, 1, 1, 2, 3)),
        temperature=st.sampled_from((0.0, 1.0)),
        seed=st.integers(0, 3),
        tokens=st.sampled_from(range(1, 13)),
        at_least=st.integers(0, 8),
        stops=st.sampled_from(((), (), STOPS)),
        ignore_eos=st.booleans(),
        logprobs=st.sampled_from((None, None, 1)),
        scores=st.sampled_from((None, None, 0)),
    )
    def submit(
        self,
        stem: int,
        length: int,
        tail: int,
        fits: bool,
        tenant: str | None,
        salt: str | None,
        again: bool,
        n: int,
        temperature: float,
        seed: int,
        tokens: int,
        at_least: int,
        stops: tuple[int, ...],
        ignore_eos: bool,
        logprobs: int | None,
        scores: int | None,
    ) -> None:
        params = SamplingParams(
            n=min(n, self.seats) if fits else n,
            temperature=temperature,
            max_tokens=tokens,
            min_tokens=min(at_least, tokens),
            stop_token_ids=stops,
            ignore_eos=ignore_eos,
            logprobs=logprobs,
            prompt_logprobs=scores,
        )
        prompt = self.prompt(stem, length, tail, fits)
        name = self.new_name(again)
        sent = float(self.run.sent)
        self.send(Add(name, prompt, params, sent, seed, tenant=tenant, cache_salt=salt))

    @rule(
        **prompts,
        width=st.integers(1, 3),
        tokens=st.sampled_from(range(1, 13)),
        penalty=st.sampled_from((0.0, 1.0)),
        early=st.booleans(),
    )
    def submit_beams(
        self,
        stem: int,
        length: int,
        tail: int,
        fits: bool,
        tenant: str | None,
        salt: str | None,
        again: bool,
        width: int,
        tokens: int,
        penalty: float,
        early: bool,
    ) -> None:
        width = min(width, self.seats) if fits else width
        beam = BeamSearchParams(width, tokens, penalty, early)
        prompt = self.prompt(stem, length, tail, fits)
        name = self.new_name(again)
        who = {"tenant": tenant, "cache_salt": salt}
        self.send(Add(name, prompt, beam.sampling, float(self.run.sent), 0, beam=beam, **who))

    @precondition(lambda self: any(not sent.ended for sent in self.sent.values()))
    @rule(data=st.data())
    def submit_an_id_in_use(self, data: st.DataObject) -> None:
        live = [name for name, sent in self.sent.items() if not sent.ended]
        add = self.sent[data.draw(st.sampled_from(live))].add
        with pytest.raises(RequestError, match="in use"):
            self.run.core.send(add)

    @rule(count=st.integers(1, 5))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.one_step()

    @precondition(lambda self: self.sent)
    @rule(
        data=st.data(),
        sample=st.sampled_from((None, None, 0, 1, 7)),
        reason=st.sampled_from(("abort", "stop")),
        times=st.integers(1, 2),
    )
    def abort(self, data: st.DataObject, sample: int | None, reason: str, times: int) -> None:
        """At any time: before the first step, while it runs, after its end; also twice."""
        name = data.draw(st.sampled_from(sorted(self.sent)))
        sent = self.sent[name]
        whole = sample is None or sent.add.beam is not None
        decided = {(d.request_id, d.sample) for d in self.run.core._deltas if d.finish_reason}
        for _ in range(times):
            self.run.abort(name, sample, reason)
        for i in sent.open_samples:
            if (whole or i == sample) and (name, i) not in decided:
                self.due.setdefault((name, i), reason)
                sent.disturbed = True

    @precondition(lambda self: self.run.scheduler._roster.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.run.preempt(
            data.draw(st.sampled_from([r.id for r in self.run.scheduler._roster.running]))
        )
        self.stalled = 0

    @rule(count=st.sampled_from((1, 1, 2, 5, 17, None)))
    def forget(self, count: int | None) -> None:
        """Cached blocks go, or all names; and someone aborts what was never sent."""
        if count is None:
            self.run.manager.reset_cache()
        else:
            self.run.manager.evict(count)
        self.run.abort("never sent")

    @rule(fault=st.sampled_from(FAULTS), row=st.integers(0, 5))
    def fail(self, fault: str, row: int) -> None:
        self.executor.fault, self.executor.row = fault, row
        try:
            self.one_step()
        except Interrupt:
            self.check_counters()
        finally:
            self.executor.fault = None

    @precondition(lambda self: len(self.sent) >= 9 and not self.draining)
    @rule()
    def drain(self) -> None:
        self.run.core.send(Drain())
        self.draining = True

    def teardown(self) -> None:
        if not hasattr(self, "run"):
            return
        while self.run.core.has_unfinished():
            self.one_step()
        assert all(sent.ended for sent in self.sent.values())
        self.check_idle()

    # ---- what must hold

    def one_step(self) -> None:
        core, scheduler = self.run.core, self.run.scheduler
        preempted = self.watch.preempted
        before = len(self.run.steps)
        output = self.output()
        self.watch.planning = True
        try:
            deltas, stats = core.step(1.5)
        finally:
            self.watch.planning = False
        self.run.record(deltas)
        self.take(deltas)
        if stats is None:
            assert len(self.run.steps) == before
        else:
            step, manager = self.run.steps[-1], self.run.manager
            assert (stats.step, stats.now) == (step.index, 1.5)
            assert stats.num_tokens == step.num_tokens
            assert stats.num_running == len(scheduler._roster.running)
            assert stats.num_waiting == len(self.live()) - stats.num_running
            assert stats.num_preempted == self.watch.preempted - preempted
            assert stats.blocks_free == manager.num_free_blocks
            assert stats.blocks_cached == manager.num_cached_blocks
            assert stats.blocks_held == manager.num_held_blocks
            use = stats.blocks_peak, stats.blocks_unshared, stats.slots_filled
            assert use == self.run.recorder.in_use[-1]
        moved = self.output() > output or not self.live()
        self.stalled = 0 if moved else self.stalled + 1
        known = sum(
            len(r.prompt) + sum(len(o.tokens) + 1 for o in r.outputs)
            for r in scheduler._roster.requests.values()
        )
        assert self.stalled <= known + 2, f"nothing new for {self.stalled} steps"
        self.check_counters()
        if not self.live():
            self.check_idle()

    def live(self) -> list[str]:
        return [name for name, sent in self.sent.items() if not sent.ended]

    def output(self) -> int:
        """Grows with all that is gained: new tokens, and requests that end."""
        live = self.run.scheduler._roster.requests.values()
        going = sum(len(o.tokens) + 1 for r in live for o in r.outputs)
        gone = sum(10**6 for sent in self.sent.values() if sent.ended)
        return going + gone

    def take(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            sent = self.sent[delta.request_id]
            sent.deltas.append(delta)
            key = delta.request_id, delta.sample
            if delta.finish_reason is not None:
                sent.ends[delta.sample] = delta
                if key in self.due:
                    assert delta.finish_reason == self.due.pop(key)
                    assert not delta.token_ids and delta.stop_reason is None
                else:
                    assert delta.finish_reason in ("stop", "length"), delta
        assert not self.due, f"not ended: {self.due}"
        for name in {delta.request_id for delta in deltas}:
            self.check_output(self.sent[name])

    def check_output(self, sent: Sent) -> None:
        """What has come is what comes when the request is alone, as far as it has come."""
        add = sent.add
        if self.refused(sent):
            assert all(not delta.token_ids for delta in sent.deltas)
            return
        (cached,) = {d.num_cached_tokens for d in sent.deltas if d.admitted_at is not None} or {0}
        assert 0 <= cached <= (len(add.prompt) - 1 if self.caching else 0)
        scores = prompt_scores(sent.deltas)
        wanted = prompt_scores(alone(add, 0, self.eos, self.max_model_len))
        assert scores == wanted[: len(scores)]
        if sent.ended and not sent.disturbed and not sent.cut:
            assert scores == wanted
        for i in range(sent.n):
            got = sampled(sent.deltas, i)
            deltas = alone(add, i, self.eos, self.max_model_len)
            expected = sampled(deltas, i if add.beam else 0)
            end = sent.ends.get(i)
            if add.beam is not None:
                if end is None:
                    assert got == Sampled((), (), None, None, None)
                elif not sent.disturbed and not sent.cut:
                    assert got == expected
                continue
            count = len(got.tokens)
            assert got.tokens == expected.tokens[:count]
            assert got.logprobs == expected.logprobs[:count]
            plain = drawn(add, i, self.eos, self.max_model_len)
            assert got.tokens == plain.tokens[:count]
            if end is None or sent.disturbed:
                continue
            if end.error is None:
                assert got == expected
                assert (got.tokens, got.finish_reason, got.stop_reason) == plain
            else:
                assert end.finish_reason == "length"
                assert sent.cut or len(add.prompt) + count > self.num_blocks * self.size
        lone = sent.n == 1 and add.beam is None and len(sent.seqs) == 1  # never preempted
        if lone and sent.ended and not sent.disturbed and not sent.cut:
            known = len(add.prompt) + len(sampled(sent.deltas, 0).tokens)
            assert sent.computed == known - 1 - cached

    def refused(self, sent: Sent) -> bool:
        return any(d.finish_reason == "error" for d in sent.deltas) and not sent.computed

    def check_counters(self) -> None:
        """Pool, tables, samples and what the engine knows of its requests."""
        self.run.check()
        core, scheduler = self.run.core, self.run.scheduler
        assert scheduler.stats.num_preemptions == self.watch.preempted
        assert core._ids >= set(scheduler._roster.requests)
        undelivered = {delta.request_id for delta in core._deltas}
        assert set(scheduler._roster.requests) | undelivered >= set(self.live())
        roster = scheduler._roster
        started = sum(r.tenant == "a" and r.admitted for r in roster.requests.values())
        assert started <= (self.most_running or started)
        running = {request.order for request in roster.running}
        waiting = [request.order for request in roster.waiting.requests()]
        assert len(waiting) == len(roster.waiting)
        assert not running & set(waiting)
        assert running | set(waiting) == {request.order for request in roster.requests.values()}

    def check_idle(self) -> None:
        """Nothing is held when nothing runs."""
        self.run.check_idle()
        core, scheduler = self.run.core, self.run.scheduler
        roster = scheduler._roster
        assert not roster.requests and not roster.running and not roster.waiting
        assert not roster.waiting._lines
        assert scheduler._flight is None and not scheduler._deltas and not core._deltas
