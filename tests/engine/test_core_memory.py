"""A long life of random admissions and aborts leaves nothing behind."""

from __future__ import annotations

import gc
import random
import sys

from pagedkv.cache import BlockManager
from pagedkv.engine.core import EngineCore
from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.messages import Abort, Add
from pagedkv.scheduling.params import SamplingParams
from pagedkv.scheduling.scheduler import Scheduler
from pagedkv.simulation.clock import VirtualClock
from pagedkv.simulation.executor import LinearCost, TimedExecutor

STEPS = 10_000
WARM_UP = 2_000


class Life:
    """Requests come and go; a third of them are aborted at a random time."""

    def __init__(self) -> None:
        self.rng = random.Random(0)
        self.clock = VirtualClock()
        self.manager = BlockManager(48, 4, max_seqs=16)
        # A log that is full before the warm-up ends.
        config = SchedulerConfig(16, 24, 100, vocab_size=40, decision_log=500)
        scheduler = Scheduler(self.manager, config)
        self.core = EngineCore(scheduler, TimedExecutor(self.clock, LinearCost(1e-3, 1e-4), 40))
        self.added = self.ended = self.steps = 0

    def step(self) -> None:
        rng = self.rng
        if rng.random() < 0.35 and self.added - self.ended < 24:
            n = rng.choice([1, 1, 1, 3])
            prompt = tuple(rng.randrange(3) for _ in range(rng.randrange(1, 40)))
            params = SamplingParams(n=n, max_tokens=rng.randrange(1, 30))
            self.core.send(Add(f"r{self.added}", prompt, params, self.clock.now, rng.randrange(99)))
            self.added += 1
        if rng.random() < 0.12:
            self.core.send(Abort(f"r{rng.randrange(max(self.added, 1))}"))
        self._run()

    def finish(self) -> None:
        while self.core.has_unfinished():
            self._run()

    def _run(self) -> None:
        _, stats = self.core.step(self.clock.now)
        self.ended = self.added - len(self.core.scheduler)
        self.steps += stats is not None

    def allocated(self) -> int:
        """Python allocations alive at idle."""
        self.finish()
        gc.collect()
        return sys.getallocatedblocks()


def test_memory_does_not_grow_over_ten_thousand_steps() -> None:
    life = Life()
    while life.steps < WARM_UP:
        life.step()
    before, added = life.allocated(), life.added
    while life.steps < STEPS:
        life.step()
    after = life.allocated()
    assert life.added > 1000 and life.ended == life.added
    # One object left behind by a request, or by its prompt in the cache, would be far more.
    assert after - before < (life.added - added) / 4
    assert life.manager.num_held_blocks == 0
    life.manager.check()
