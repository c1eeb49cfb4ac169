"""Random overload through the real loop on a virtual clock: every request ends, nothing leaks."""

from __future__ import annotations

import numpy as np
import pytest

from pagedkv.cache import BlockManager
from pagedkv.engine.core import EngineCore
from pagedkv.scheduling.config import ADMISSIONS, OVERLOADS, RECOVERIES, SchedulerConfig
from pagedkv.scheduling.messages import FINISH_REASONS, Abort, Add
from pagedkv.scheduling.params import BeamSearchParams, SamplingParams
from pagedkv.scheduling.policies import POLICIES
from pagedkv.scheduling.scheduler import Scheduler
from pagedkv.scheduling.tenants import Tenant
from pagedkv.scheduling.tiering import LowerTiers
from pagedkv.simulation.clock import VirtualClock
from pagedkv.simulation.executor import LinearCost, TimedExecutor
from pagedkv.simulation.link import Link, LinkedTier
from pagedkv.tiers.names import Namer

RUNS, AT_ONCE = 1000, 100
BLOCK_BYTES = 4096


class Flaky(LinkedTier):
    """Loses some of what it says it has, and cannot store all that it is given."""

    def __init__(self, link: Link, rng: np.random.Generator) -> None:
        super().__init__(link)
        get, put = self.below.get, self.below.put
        self.below.get = lambda *block: rng.random() < 0.8 and get(*block)
        self.below.put = lambda *block: rng.random() < 0.8 and put(*block)


class Failing(TimedExecutor):
    """Fails some steps as a whole."""

    def __init__(self, rng: np.random.Generator, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._rng = rng

    def collect(self, ticket):
        result = super().collect(ticket)
        if self._rng.random() < 0.01:
            raise RuntimeError("the step went wrong")
        return result


def draw_request(rng: np.random.Generator, i: int, now: float, most: int) -> Add:
    shared = int(rng.integers(0, 3)) * 8
    prompt = (*range(1, 1 + shared), *rng.integers(1, 9, rng.integers(1, most)).tolist())
    output, samples = int(rng.integers(1, 20)), int(rng.choice([1, 1, 1, 2, 3]))
    beam = None
    params = SamplingParams(max_tokens=output, temperature=1.0, n=samples, ignore_eos=True)
    if rng.random() < 0.1:
        beam = BeamSearchParams(beam_width=2, max_tokens=output, ignore_eos=True)
        params = beam.sampling
    slo = {}
    if rng.random() < 0.5:
        slo = {"ttft_slo": float(rng.uniform(0.01, 1)), "tpot_slo": float(rng.uniform(0.01, 0.1))}
    if rng.random() < 0.2:
        slo["deadline"] = now + float(rng.uniform(0.01, 1))
    return Add(
        str(i),
        prompt,
        params,
        now,
        seed=i,
        beam=beam,
        priority=int(rng.integers(-2, 3)),
        tenant=[None, "a", "b"][rng.integers(0, 3)],
        **slo,
    )


def overload(seed: int) -> tuple[int, int]:
    """Runs to the end; returns how many requests were preempted and how many blocks loaded."""
    rng = np.random.default_rng(seed)
    blocks, size = int(rng.integers(1, 65)), int(rng.choice([1, 2, 4, 8]))
    config = SchedulerConfig(
        int(rng.integers(3, 9)),
        int(rng.choice([3, 8, 32])),
        200,
        policy=str(rng.choice(sorted(POLICIES))),
        admission=str(rng.choice(ADMISSIONS)),
        watermark=float(rng.choice([0.0, 0.1])),
        recovery=str(rng.choice(RECOVERIES)),
        overload=str(rng.choice(OVERLOADS)),
        max_num_waiting=int(rng.choice([5, 1000])),
        ageing=float(rng.choice([0.1, 60.0])),
        tenants=(("a", Tenant(weight=2.0, max_running=2)),),
        decision_log=50,
    )
    caching = bool(rng.random() < 0.7)
    manager = BlockManager(blocks, size, prefix_caching=caching, max_seqs=config.seats)
    clock, tier, lower = VirtualClock(), None, None
    if rng.random() < 0.8:
        bandwidth = float(rng.choice([1e5, 1e7, 1e9]))
        tier = Flaky(Link(int(rng.integers(1, 40)), BLOCK_BYTES, bandwidth), rng)
        lower = LowerTiers(tier.below, Namer(b"x"), BLOCK_BYTES)
    cost = LinearCost(1e-3, 1e-4, 1e-6)
    core = EngineCore(Scheduler(manager, config, lower), Failing(rng, clock, cost, tier=tier))
    coming, sent, ended = int(rng.integers(3, 25)), {}, {}
    for _ in range(20_000):
        if coming and (rng.random() < 0.5 or not core.has_unfinished()):
            coming -= 1
            add = draw_request(rng, coming, clock.now, max(2, blocks * size // 2))
            sent[add.request_id] = add
            core.send(add)
        if sent and rng.random() < 0.05:
            core.send(Abort(str(rng.choice(sorted(sent)))))
        if not coming and not core.has_unfinished():
            break
        deltas, _ = core.step(clock.now)
        for delta in deltas:
            if delta.finish_reason is not None:
                assert delta.finish_reason in FINISH_REASONS
                key = delta.request_id, delta.sample
                assert key not in ended, "ended twice"
                ended[key] = delta.finish_reason
    else:
        raise AssertionError(f"not finished: {core.scheduler.stats}")
    assert set(ended) == {(i, s) for i, add in sent.items() for s in range(add.params.n)}
    manager.check()
    assert manager.num_open_sequences == 0
    assert manager.num_free_blocks + manager.num_cached_blocks == blocks
    tiering = core.scheduler.tiering
    return core.scheduler.stats.num_preemptions, 0 if tiering is None else tiering.stats.loaded


@pytest.mark.parametrize("first", range(0, RUNS, AT_ONCE))
def test_every_request_ends_and_nothing_leaks(first: int) -> None:
    results = [overload(seed) for seed in range(first, first + AT_ONCE)]
    preempted, loaded = np.sum(results, axis=0).tolist()
    assert preempted > AT_ONCE / 10 and loaded > AT_ONCE / 10  # else it was no overload
