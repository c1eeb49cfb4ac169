"""The engine's loop over the toy executor."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
import threading
import tracemalloc

import numpy as np
import pytest

from pagedkv.cache import BlockManager, Misuse, SanitizerError
from pagedkv.engine.core import EngineCore
from pagedkv.engine.toy import ToyExecutor
from pagedkv.errors import RequestError
from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.messages import Abort, Add, Delta, Drain, StepStats
from pagedkv.scheduling.params import SamplingParams
from pagedkv.scheduling.scheduler import Scheduler
from pagedkv.scheduling.step import Result, Step, Ticket
from pagedkv.simulation.clock import VirtualClock
from pagedkv.simulation.executor import LinearCost, TimedExecutor


def make_core(executor: ToyExecutor | None = None, num_blocks: int = 32) -> EngineCore:
    manager = BlockManager(num_blocks, 4, max_seqs=8)
    scheduler = Scheduler(manager, SchedulerConfig(8, 16, 64))
    return EngineCore(scheduler, executor or ToyExecutor(num_blocks, 4))


def add(name: str, prompt: tuple[int, ...] = (1, 2, 3), seed: int = 0, **params) -> Add:
    params.setdefault("temperature", 0.0)
    params.setdefault("max_tokens", 4)
    return Add(name, prompt, SamplingParams(**params), 0.0, seed)


def run(core: EngineCore, limit: int = 500) -> list[Delta]:
    deltas: list[Delta] = []
    for _ in range(limit):
        if not core.has_unfinished():
            break
        deltas += core.step(0.0)[0]
        core.scheduler.manager.check()
    assert not core.has_unfinished()
    assert core.scheduler.manager.num_held_blocks == 0
    return deltas


def ends(deltas: list[Delta]) -> dict[tuple[str, int], str]:
    return {(d.request_id, d.sample): d.finish_reason for d in deltas if d.finish_reason}


def test_the_core_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None; import pagedkv.engine.core, pagedkv.engine.toy"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_messages_take_effect_in_order_at_the_next_step():
    core = make_core()
    core.send(add("a"))
    core.send(Abort("a"))
    core.send(Drain())
    core.send(add("b"))
    assert len(core.scheduler) == 0
    deltas, stats = core.step(0.0)
    assert stats is None
    assert ends(deltas) == {("a", 0): "abort", ("b", 0): "error"}


def test_an_id_in_use_is_refused_at_once_and_free_after_the_end():
    core = make_core()
    core.send(add("a"))
    with pytest.raises(RequestError, match="'a' is in use"):
        core.send(add("a"))
    run(core)
    core.send(add("a"))
    assert ends(run(core)) == {("a", 0): "length"}
    core.send(add("long", prompt=tuple(range(64))))
    assert ends(run(core)) == {("long", 0): "error"}
    core.send(add("long"))
    assert ends(run(core)) == {("long", 0): "length"}


def test_abort_of_one_sample_leaves_the_others():
    core = make_core()
    core.send(add("a", n=3, temperature=1.0, max_tokens=6))
    deltas = core.step(0.0)[0]
    core.send(Abort("a", 1, "stop"))
    deltas += run(core)
    assert ends(deltas) == {("a", 0): "length", ("a", 1): "stop", ("a", 2): "length"}


@pytest.mark.parametrize("sample", [None, 0, 2])
@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_abort_in_every_state(steps, sample):
    core = make_core()
    core.send(add("a", prompt=tuple(range(20)), n=3, max_tokens=6))
    deltas: list[Delta] = []
    for _ in range(steps):
        deltas += core.step(0.0)[0]
    core.send(Abort("a", sample))
    deltas += run(core)
    expected = {i: "abort" if sample in (None, i) else "length" for i in range(3)}
    assert ends(deltas) == {("a", i): reason for i, reason in expected.items()}


@pytest.mark.parametrize("sample", [None, 0, 1])
def test_abort_while_a_step_is_in_flight(sample):
    core = make_core()
    scheduler = core.scheduler
    scheduler.add(add("a", n=2, temperature=1.0), 0.0)
    scheduler.add(add("b", prompt=(1, 2, 3, 4, 5)), 0.0)
    step = scheduler.plan(0.0)
    deltas = scheduler.abort(Abort("a", sample))
    deltas += scheduler.commit(core.executor.collect(core.executor.submit(step)), 0.0)
    scheduler.manager.check()
    assert not any(
        d.token_ids for d in deltas if d.request_id == "a" and sample in (None, d.sample)
    )
    deltas += run(core)
    assert ends(deltas) == {
        ("a", 0): "abort" if sample in (None, 0) else "length",
        ("a", 1): "abort" if sample in (None, 1) else "length",
        ("b", 0): "length",
    }


def test_stats_count_shared_slots_once():
    core = make_core()
    core.send(add("a", prompt=tuple(range(1, 11)), n=3, temperature=1.0))
    _, stats = core.step(5.0)
    assert (stats.step, stats.now, stats.num_tokens) == (0, 5.0, 10)
    assert (stats.blocks_held, stats.blocks_free, stats.blocks_cached) == (3, 29, 0)
    assert (stats.blocks_peak, stats.slots_filled, stats.slots_reserved) == (3, 10, 3 * 64)
    assert stats.blocks_unshared == 3 * 3
    _, stats = core.step(6.0)
    assert (stats.num_tokens, stats.blocks_held, stats.slots_filled) == (3, 5, 8 + 3 * 3)
    # Reserved contiguously nothing would be shared: what is filled then is counted for each sample.
    assert stats.slots_unshared == 3 * 11
    # Two full blocks of the prompt are in common, the tail is each sample's own.
    assert (stats.blocks_peak, stats.blocks_unshared) == (2 + 3, 3 * 3)
    core.step(7.0)
    _, stats = core.step(8.0)
    assert (stats.blocks_peak, stats.blocks_unshared) == (2 + 3 * 2, 3 * 4)
    run(core)


def test_waste_counts_while_the_only_step_runs():
    """Taken after the step, when all have ended, it would be 0 %."""
    core = make_core()
    for i in range(3):
        core.send(add(str(i), prompt=(i + 1,) * 5, max_tokens=1))
    _, stats = core.step(0.0)
    assert not core.has_unfinished()
    assert (stats.blocks_held, stats.blocks_peak, stats.slots_filled) == (0, 6, 15)
    assert stats.slots_reserved == 3 * 64


def test_slow_statistics_a_step_touches_nothing_as_large_as_the_pool():
    """They once took an array with an entry for each block of the pool, in every step."""
    num_blocks = 200_000
    scheduler = Scheduler(BlockManager(num_blocks, 4, max_seqs=8), SchedulerConfig(8, 16, 64))
    core = EngineCore(scheduler, TimedExecutor(VirtualClock(), LinearCost(0.001, 0.0)))
    for i in range(4):
        core.send(add(str(i), prompt=(i + 1, 2, 3)))
    core.step(0.0)
    tracemalloc.start()
    _, stats = core.step(0.0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert stats.slots_filled == 16
    assert peak < num_blocks  # bytes
    run(core)


@pytest.mark.parametrize("cls", [Add, Abort, Drain, Step, Result, Delta, StepStats])
def test_lost_field_every_value_of_the_loop_survives_another_process(cls):
    """All that crosses the loop's border is plain values: pickled and read back they are equal."""
    seen: list[object] = []

    class Watched(ToyExecutor):
        def submit(self, step: Step) -> Ticket:
            seen.append(step)
            return super().submit(pickle.loads(pickle.dumps(step)))

        def collect(self, ticket: Ticket) -> Result:
            result = super().collect(ticket)
            seen.append(result)
            return pickle.loads(pickle.dumps(result))

    core = make_core(Watched(32, 4))
    messages = [
        add("a", n=2, temperature=1.0, logprobs=2, prompt_logprobs=1, presence_penalty=0.5),
        add("b", logit_bias={3: 1.5}, stop=["x"], stop_token_ids=[7], min_tokens=2),
        Abort("b", 0, "stop"),
        Drain(),
    ]
    for message in messages:
        seen.append(message)
        core.send(pickle.loads(pickle.dumps(message)))
    while core.has_unfinished():
        deltas, stats = core.step(0.0)
        seen += [*deltas, stats]
    values = [value for value in seen if isinstance(value, cls)]
    assert values
    for value in values:
        assert_equal(value, pickle.loads(pickle.dumps(value)))


def assert_equal(a: object, b: object) -> None:
    """Field by field; arrays by dtype and content."""
    assert type(a) is type(b)
    if dataclasses.is_dataclass(a):
        for field in dataclasses.fields(a):
            assert_equal(getattr(a, field.name), getattr(b, field.name))
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype and np.array_equal(a, b)
    elif isinstance(a, tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_equal(x, y)
    else:
        assert a == b


def test_messages_from_many_threads():
    core = make_core()
    threads = [
        threading.Thread(
            target=lambda i=i: [core.send(add(f"{i}.{j}", (i + 1, j + 1))) for j in range(20)]
        )
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    deltas: list[Delta] = []
    while any(thread.is_alive() for thread in threads):
        deltas += core.step(0.0)[0]
    deltas += run(core)
    assert ends(deltas) == {(f"{i}.{j}", 0): "length" for i in range(4) for j in range(20)}


@pytest.mark.parametrize("ends_by", ["abort", "length"])
def test_a_leak_is_found_as_soon_as_nothing_is_to_do(ends_by: str) -> None:
    manager = BlockManager(32, 4, max_seqs=8, sanitize=True)
    core = EngineCore(Scheduler(manager, SchedulerConfig(8, 16, 64)), ToyExecutor(32, 4))
    core.send(add("a", max_tokens=1 if ends_by == "length" else 9))
    lost = manager.open([7, 8, 9])
    if ends_by == "abort":
        core.step(0.0)
        core.send(Abort("a"))
    with pytest.raises(SanitizerError, match=f"sequence {lost} is open") as caught:
        core.step(1.0)
    assert (caught.value.kind, caught.value.seq) == (Misuse.LEAK, lost)
    assert core.has_unfinished()  # the end of "a" is still to be handed out
    manager.close(lost)
    deltas, _ = core.step(2.0)
    assert [delta.finish_reason for delta in deltas][-1] == ends_by
