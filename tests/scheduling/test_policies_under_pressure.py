"""Under every policy every request ends, and gives what it gives alone."""

from __future__ import annotations

import numpy as np
import pytest
from harness import Run, solo

from pagedkv.cache import BlockManager
from pagedkv.engine.core import EngineCore
from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.messages import Abort, Add
from pagedkv.scheduling.params import SamplingParams
from pagedkv.scheduling.policies import POLICIES
from pagedkv.scheduling.scheduler import Scheduler
from pagedkv.scheduling.tenants import Tenant
from pagedkv.simulation.clock import VirtualClock
from pagedkv.simulation.executor import LinearCost, TimedExecutor

TENANTS = (None, "a", "b", "c")


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_nobody_starves_in_random_overload(policy: str) -> None:
    """Pools of 1 to 64 blocks, groups, priorities, quotas and aborts; far more than they can do."""
    for seed in range(12):
        rng = np.random.default_rng(seed)
        manager = BlockManager(int(rng.integers(1, 65)), 4, max_seqs=8)
        tenants = (("a", Tenant(weight=3.0)), ("b", Tenant(max_running=1)))
        config = SchedulerConfig(8, int(rng.integers(8, 40)), 60, policy=policy, tenants=tenants)
        clock = VirtualClock()
        core = EngineCore(Scheduler(manager, config), TimedExecutor(clock, LinearCost(1e-2, 1e-3)))
        ends: dict[tuple[str, int], str] = {}
        sent: dict[str, int] = {}
        for step in range(5000):
            if step < 60:
                for _ in range(int(rng.integers(0, 3))):
                    samples = int(rng.choice([1, 1, 1, 3]))
                    params = SamplingParams(max_tokens=int(rng.integers(1, 20)), n=samples)
                    prompt = tuple(rng.integers(0, 3, int(rng.integers(1, 30))).tolist())
                    tenant = TENANTS[int(rng.integers(len(TENANTS)))]
                    name, priority = f"r{len(sent)}", int(rng.integers(-3, 4))
                    core.send(
                        Add(name, prompt, params, clock.now, len(sent), priority, tenant=tenant)
                    )
                    sent[name] = samples
                if sent and rng.random() < 0.1:
                    core.send(Abort(str(rng.choice(list(sent)))))
            elif not core.has_unfinished():
                break
            for delta in core.step(clock.now)[0]:
                if delta.finish_reason is not None:
                    key = delta.request_id, delta.sample
                    assert key not in ends
                    ends[key] = delta.finish_reason
        assert ends.keys() == {(name, i) for name, n in sent.items() for i in range(n)}
        manager.check()
        assert manager.num_held_blocks == manager.num_open_sequences == 0


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_tokens_are_those_of_a_run_without_pressure(policy: str) -> None:
    """A quarter of the blocks that the requests would take."""
    run = Run(num_blocks=14, block_size=4, budget=12, policy=policy)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 40, 12 + i % 5).tolist() for i in range(12)]
    for i, prompt in enumerate(prompts):
        run.add(f"r{i}", prompt, tenant=TENANTS[i % 4], max_tokens=12, ignore_eos=True)
    run.finish()
    assert run.scheduler.stats.num_preemptions > 0
    for i, prompt in enumerate(prompts):
        assert run.tokens[f"r{i}", 0] == solo(prompt, max_tokens=12, ignore_eos=True, temperature=0)
