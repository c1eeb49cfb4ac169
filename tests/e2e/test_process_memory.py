"""A real model through a long life of random admissions and aborts: the process does not grow."""

from __future__ import annotations

import gc
import random
from pathlib import Path

import pytest
from tiny_models import save_tiny

from pagedkv import LLM, SamplingParams

WARM_UP, STEPS = 600, 2000
MOST_GROWTH = 8 * 2**20


def resident_bytes() -> int:
    gc.collect()
    status = Path("/proc/self/status").read_text()
    return next(
        int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS")
    )


class Life:
    """Requests come and go; a third of them are aborted at a random time."""

    def __init__(self, llm: LLM) -> None:
        self.engine, self.rng = llm.engine, random.Random(0)
        self.added = 0
        self.live: list[str] = []

    def step(self) -> None:
        rng = self.rng
        if len(self.live) < 12 and rng.random() < 0.5:
            name = f"r{self.added}"
            # Few different tokens: hits, partial tails and copies as well as evictions.
            prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 60))]
            params = SamplingParams(
                n=rng.choice([1, 1, 3]), max_tokens=rng.randrange(1, 16), seed=rng.randrange(99)
            )
            self.engine.add_request(name, {"prompt_token_ids": prompt}, params)
            self.live.append(name)
            self.added += 1
        if self.live and rng.random() < 0.12:
            self.engine.abort_request(rng.choice(self.live))
        ended = {output.request_id for output in self.engine.step() if output.finished}
        self.live = [name for name in self.live if name not in ended]

    def run(self, steps: int) -> int:
        """That many steps, then to the end; resident bytes when idle."""
        for _ in range(steps):
            self.step()
        while self.engine.has_unfinished_requests():
            self.engine.step()
        self.live.clear()
        return resident_bytes()


@pytest.mark.deep
@pytest.mark.parametrize("backend", ["gather", "native"])
def test_a_long_life_does_not_grow_the_process(backend: str, tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    llm = LLM(
        tmp_path,
        block_size=4,
        num_blocks=90,
        max_num_seqs=16,
        max_num_batched_tokens=48,
        attention_backend=backend,
    )
    life = Life(llm)
    before = life.run(WARM_UP)
    added = life.added
    growth = life.run(STEPS) - before
    assert life.added - added > 400
    assert growth < MOST_GROWTH, f"{growth / 2**20:.1f} MiB more after {STEPS} steps"
