"""What does a picture of the engine cost, beside a step, in a large pool?

Three quarters of the pool are cached; some requests decode on the toy model. Steps and pictures
take turns; the medians and their ratio are printed, with the size of a picture as it travels.
Nothing is asserted.
"""

from __future__ import annotations

import argparse
import statistics
import time

import msgspec
import numpy as np

from calibration import print_calibration
from pagedkv.cache import BlockManager
from pagedkv.engine.core import EngineCore
from pagedkv.engine.picture import take_picture
from pagedkv.engine.toy import ToyExecutor
from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.messages import Add
from pagedkv.scheduling.params import SamplingParams
from pagedkv.scheduling.scheduler import Scheduler

BLOCK, VOCABULARY, PROMPT = 16, 50, 200


def engine(num_blocks: int, running: int) -> EngineCore:
    """An engine whose pool is three quarters cached, with `running` requests that decode."""
    manager = BlockManager(num_blocks, BLOCK, max_seqs=running, max_blocks_per_seq=2048)
    rng = np.random.default_rng(1)
    while manager.num_cached_blocks < num_blocks * 3 // 4:
        n = min(1000, num_blocks // 4) * BLOCK
        tokens = rng.integers(0, VOCABULARY, n, dtype=np.int32)
        seq = manager.open()
        manager.reserve([seq], [n])
        manager.commit([seq], [tokens])
        manager.close(seq)
    config = SchedulerConfig(running, 4096, 4096, (), VOCABULARY)
    core = EngineCore(Scheduler(manager, config), ToyExecutor(num_blocks, BLOCK, VOCABULARY))
    params = SamplingParams(max_tokens=4096, ignore_eos=True, temperature=0.0)
    for i in range(running):
        prompt = tuple(rng.integers(0, VOCABULARY, PROMPT).tolist())
        core.send(Add(f"request-{i}", prompt, params, 0.0, i, tenant=f"tenant-{i % 8}"))
    return core


def measure(num_blocks: int, running: int, rounds: int) -> None:
    core = engine(num_blocks, running)
    steps: list[float] = []
    pictures: list[float] = []
    while len(core.scheduler.roster.running) < running:
        core.step(0.0)
    for _ in range(rounds):
        begin = time.perf_counter()
        core.step(0.0)
        middle = time.perf_counter()
        data = msgspec.msgpack.encode(take_picture(core))
        steps.append(middle - begin)
        pictures.append(time.perf_counter() - middle)
    step, seen = statistics.median(steps), statistics.median(pictures)
    print(
        f"{num_blocks:>9,} blocks {running:>4} running   step {step * 1e3:7.2f} ms   "
        f"picture {seen * 1e3:6.2f} ms ({seen / step:5.2f} of a step)   {len(data):>9,} bytes"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=31)
    rounds = parser.parse_args().rounds
    print_calibration()
    for num_blocks in (1_000, 10_000, 100_000):
        for running in (8, 64):
            measure(num_blocks, running, rounds)


if __name__ == "__main__":
    main()
