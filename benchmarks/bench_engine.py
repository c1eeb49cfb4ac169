"""What do the indirection and the deterministic mode cost end to end?

The embedded model runs the same requests through three engines in turn: native kernels on the
block table, gather (K/V copied to contiguous scratch, then torch), and native with
`deterministic=True`. Ratios of medians from one interleaved run; nothing is asserted. The
deterministic mode runs the same kernels as native without it, so what differs is noise; what those
kernels cost against torch's is printed by bench_linear.py.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

from calibration import print_calibration
from pagedkv import LLM, SamplingParams

MODEL = "smollm2-135m-instruct"
ENGINES = {
    "native": {"attention_backend": "native"},
    "gather": {"attention_backend": "gather"},
    "native, deterministic": {"attention_backend": "native", "deterministic": True},
}


def requests(count: int, prompt: int, output: int) -> Callable[[LLM, int], float]:
    """Runs `count` random prompts of `prompt` tokens to `output` tokens each; gives seconds."""

    def run(llm: LLM, round_: int) -> float:
        rng = np.random.default_rng(round_)  # new prompts each round: no prefix hits
        prompts = [
            {"prompt_token_ids": rng.integers(100, 40_000, prompt).tolist()} for _ in range(count)
        ]
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
        start = time.perf_counter()
        llm.generate(prompts, params)
        return time.perf_counter() - start

    return run


WORKLOADS = {
    "1 request, 128 in, 64 out": (requests(1, 128, 64), 64),
    "16 requests, 128 in, 32 out": (requests(16, 128, 32), 512),
    "1 request, 1900 in, 1 out": (requests(1, 1900, 1), 1),
    "4 requests, 1900 in, 16 out": (requests(4, 1900, 16), 64),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    print_calibration()
    for dtype in ("float32", "bfloat16"):
        engines = {
            name: LLM(MODEL, dtype=dtype, num_blocks=1024, max_num_batched_tokens=512, **settings)
            for name, settings in ENGINES.items()
        }
        for llm in engines.values():
            requests(1, 64, 4)(llm, 10**6)
        for workload, (run, tokens) in WORKLOADS.items():
            seconds: dict[str, list[float]] = {name: [] for name in engines}
            for round_ in range(rounds):
                for name, llm in engines.items():
                    seconds[name].append(run(llm, round_))
            medians = {name: statistics.median(times) for name, times in seconds.items()}
            print(f"{dtype}, {workload}: native {medians['native']:.2f} s", end="")
            print(f" ({tokens / medians['native']:.0f} output tokens/s)", end="")
            for name in list(engines)[1:]:
                print(f"; {name} {medians[name] / medians['native']:.2f}x its time", end="")
            print()


if __name__ == "__main__":
    main()
