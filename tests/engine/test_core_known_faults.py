"""Faults of engine loops that were reported elsewhere, each with its smallest input."""

from __future__ import annotations

import pytest

from pagedkv.cache import BlockManager, InvariantError
from pagedkv.engine.core import EngineCore
from pagedkv.engine.toy import ToyExecutor
from pagedkv.errors import RequestError
from pagedkv.scheduling import siblings
from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.messages import Abort, Add, Delta
from pagedkv.scheduling.params import SamplingParams
from pagedkv.scheduling.scheduler import Scheduler
from pagedkv.scheduling.step import Result, Step, Ticket


class Breaking(ToyExecutor):
    """Raises at one step, before or after the work is done."""

    def __init__(self, at: int, where: str, error: BaseException) -> None:
        super().__init__(32, 4)
        self.at, self.where, self.error = at, where, error
        self.lens: list[int] = []

    def submit(self, step: Step) -> Ticket:
        self.lens = step.query_lens.tolist()
        if step.index == self.at and self.where == "submit":
            raise self.error
        return super().submit(step)

    def collect(self, ticket: Ticket) -> Result:
        result = super().collect(ticket)
        if ticket == self.at and self.where == "collect":
            raise self.error
        return result


def make_core(executor: ToyExecutor, budget: int = 16, block_size: int = 4) -> EngineCore:
    executor.block_size = block_size
    manager = BlockManager(32, block_size, max_seqs=8)
    return EngineCore(Scheduler(manager, SchedulerConfig(8, budget, 64)), executor)


def send(core: EngineCore, name: str, prompt: tuple[int, ...], **params) -> None:
    params.setdefault("max_tokens", 6)
    core.send(Add(name, prompt, SamplingParams(temperature=0.0, **params), 0.0, 0))


def run(core: EngineCore) -> list[Delta]:
    deltas: list[Delta] = []
    for _ in range(200):
        if core.has_unfinished():
            deltas += core.step(0.0)[0]
            core.scheduler.manager.check()
    assert not core.has_unfinished()
    assert core.scheduler.manager.num_held_blocks == 0
    return deltas


def output(deltas: list[Delta], name: str) -> list[int]:
    return [token for d in deltas if d.request_id == name for token in d.token_ids]


@pytest.mark.parametrize("where", ["submit", "collect"])
def test_dead_engine_one_bad_step_ends_its_batch_only(where):
    """mlx-lm PR#1129: an exception in one batch killed the thread, later requests hung."""
    core = make_core(Breaking(2, where, RuntimeError("out of luck")))
    send(core, "a", (1, 2, 3))
    send(core, "b", (4, 5), n=2)
    deltas: list[Delta] = []
    for _ in range(3):
        deltas += core.step(0.0)[0]
    failed = [d for d in deltas if d.finish_reason]
    assert [(d.request_id, d.sample) for d in failed] == [("a", 0), ("b", 0), ("b", 1)]
    assert all(d.finish_reason == "error" for d in failed)
    assert all("step 2 failed: RuntimeError: out of luck" in d.error for d in failed)
    assert core.scheduler.manager.num_held_blocks == 0
    send(core, "a", (1, 2, 3))
    clean = make_core(ToyExecutor(32, 4))
    send(clean, "a", (1, 2, 3))
    assert output(run(core), "a") == output(run(clean), "a")


@pytest.mark.parametrize("where", ["submit", "collect"])
def test_dead_engine_who_was_not_in_the_bad_step_goes_on(where, monkeypatch):
    """mlx-lm PR#1129. The tables sent with the lost step are sent again with the next one."""
    monkeypatch.setattr(
        siblings, "MAX_PASSINGS", 0
    )  # "second" does not wait for what "first" computes
    core = make_core(Breaking(1, where, RuntimeError("x")), budget=4, block_size=1)
    prompt = tuple(range(1, 9))
    send(core, "pair", (9,), n=2)
    send(core, "first", prompt)
    send(core, "second", prompt)
    for lens in ([1, 2, 1], [1, 1, 2]):  # the budget is used up before "second" in step 1
        deltas = core.step(0.0)[0]
        assert core.executor.lens == lens
    # Its block had become the one that "first" published, which only the lost step had told.
    assert {d.request_id for d in deltas} == {"pair", "first"}
    clean = make_core(ToyExecutor(32, 1), block_size=1)
    send(clean, "second", prompt)
    assert output(run(core), "second") == output(run(clean), "second")


def test_dead_engine_the_pool_is_checked_after_a_bad_step(monkeypatch):
    """mlx-lm PR#1129. A damaged pool is not used any longer."""
    monkeypatch.delenv("PAGEDKV_SANITIZE", raising=False)  # it would say so earlier
    core = make_core(Breaking(1, "collect", RuntimeError("x")))
    send(core, "a", (1, 2, 3))
    core.step(0.0)
    core.scheduler.manager.pool.num_free -= 1
    with pytest.raises(InvariantError):
        core.step(0.0)
    core.scheduler.manager.pool.num_free += 1


def test_dead_engine_an_interrupt_leaves_a_usable_engine():
    """An interrupt is passed on; blocks of the step are released and the next request runs."""
    core = make_core(Breaking(1, "collect", KeyboardInterrupt()))
    send(core, "a", (1, 2, 3))
    core.step(0.0)
    with pytest.raises(KeyboardInterrupt):
        core.step(0.0)
    assert core.scheduler.manager.num_held_blocks == 0
    send(core, "b", (1, 2, 3))
    assert len(output(run(core), "b")) == 6


def test_mixed_up_ids_an_id_is_in_use_until_its_end_was_handed_out():
    """The end of the first request came out as the end of the second one."""
    core = make_core(Breaking(0, "collect", KeyboardInterrupt()))
    send(core, "a", (1, 2, 3))
    with pytest.raises(KeyboardInterrupt):
        core.step(0.0)
    with pytest.raises(RequestError, match="'a' is in use"):
        send(core, "a", (1, 2, 3))
    deltas, _ = core.step(0.0)
    assert [(d.request_id, d.finish_reason) for d in deltas] == [("a", "error")]
    send(core, "a", (1, 2, 3))
    assert len(output(run(core), "a")) == 6


def test_dead_engine_abort_of_ids_it_does_not_know():
    """tenstorrent/vllm#145, vllm#2475: KeyError; also twice, after the end, and when idle."""
    core = make_core(ToyExecutor(32, 4))
    core.send(Abort("never-existed"))
    assert core.step(0.0) == ([], None)
    send(core, "a", (1, 2, 3))
    deltas = run(core)
    core.send(Abort("a"))
    core.send(Abort("a"))
    assert core.step(0.0) == ([], None)
    assert len(output(deltas, "a")) == 6


def test_idle_gauges_after_everything_is_aborted_at_once():
    """vllm#22545, #29928: gauges stayed at their last values."""
    core = make_core(ToyExecutor(32, 4))
    for name in "abc":
        send(core, name, (1, 2, 3))
    core.step(0.0)
    for name in "abc":
        core.send(Abort(name))
    core.step(0.0)
    stats = core.scheduler.stats
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert core.scheduler.manager.num_held_blocks == 0
    assert not core.has_unfinished()
