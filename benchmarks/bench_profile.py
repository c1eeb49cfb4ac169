"""Where does a step of the model go, part by part, beside what each part costs at least?

Run: python benchmarks/bench_profile.py [--dtype bfloat16|float32] [--seconds 10]
         [--cpu-time]

Decode steps of 1 and 32 rows with 512 tokens each, and a prefill chunk of 512 tokens: all of the
embedded model. The whole step and each of its parts alone take turns in one run; the fastest tenth
of each counts. A part runs for all layers in turn, so that its weights come from memory as in the
step. The floor is the larger of its bytes over the bandwidth and its operations over the matrix
rate, both of this run; the share is that of the whole step. "rest" is what the parts do not
explain: norms, rotations, activations, sums, and what one part leaves in the caches for the next.
"inside ms" is what the native decoder's own clock says of the part within the step, norms and
rotations included: time by the wall, also with --cpu-time. "host" is what scheduler, block manager
and output take beside a decode step, by CPU time, as bench_step.py prints it.
docs/reference/where_a_step_goes.md says how to read it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from bench_step import decode_steps
from calibration import print_calibration
from pagedkv import LLM
from pagedkv.bench.attention import attention_step
from pagedkv.bench.limits import Limits, Yardstick
from pagedkv.bench.rounds import fast, in_turns
from pagedkv.bench.steps import ModelSteps
from pagedkv.bench.work import Work, step_work, total
from pagedkv.engine.build import set_threads
from pagedkv.engine.executor import ModelExecutor
from pagedkv.engine.machine import THREADS_VARIABLE
from pagedkv.engine.sampler import draw_all
from pagedkv.models.linear import embed, make_linear
from pagedkv.scheduling.params import SamplingParams
from pagedkv.scheduling.step import Sample

MODEL, BLOCK = "smollm2-135m-instruct", 16
SHAPES = {  # rows, context, new tokens a row
    "decode, 1 row of 512 tokens": (1, 512, 1),
    "decode, 32 rows of 512 tokens": (32, 512, 1),
    "prefill chunk of 512 tokens": (1, 512, 512),
}
MATRICES = {  # of a layer's weights, and their part
    "qkv": "QKV",
    "output": "output",
    "gate": "gate and up",
    "up": "gate and up",
    "down": "down",
}
# The phases that the native decoder times, and their part.
PHASES = {
    "embedding": "embedding",
    "norm, QKV": "QKV",
    "rotation, write": "write, attention",
    "attention": "write, attention",
    "output projection": "output",
    "norm, gate, up, SiLU": "gate and up",
    "down projection": "down",
    "norm, head": "head",
}
# Parts of `step_work` under the names that they have here, where each is measured alone.
WORK = {
    "embedding": ("embedding",),
    "QKV": ("norm, QKV",),
    "write, attention": ("rotary, write", "attention"),
    "output": ("output",),
    "gate and up": ("norm, gate and up, SiLU",),
    "down": ("down",),
    "head": ("norm, head",),
    "sampling": (),
}
HOST = ("plan", "commit", "output")
Part = Callable[[], object]
Clock = Callable[[], float]


def parts_of(steps: ModelSteps, rows: int, context: int, query: int) -> dict[str, Part]:
    """Each part of a step alone, all layers of it."""
    decoder, spec = steps.model.decoder, steps.backend.spec
    weights, dtype = decoder.weights, decoder.dtype
    tokens = rows * query
    rng = np.random.default_rng(0)
    ids = torch.from_numpy(rng.integers(steps.model.config.vocab_size, size=tokens))
    tables = rng.permutation(spec.num_blocks)[: rows * -(-context // BLOCK)].astype(np.int32) + 1
    logits = torch.randn(rows, steps.model.config.vocab_size)
    greedy = SamplingParams(temperature=0)
    samples = [Sample(row, greedy, row, context, best=True) for row in range(rows)]
    layers: dict[str, list[Part]] = {}
    for layer in weights.layers:
        for name, part in MATRICES.items():
            matrix = getattr(layer, name)
            x = torch.randn(tokens, matrix.shape[1]).to(dtype)
            layers.setdefault(part, []).append(partial(make_linear(matrix, None), x))
    head = make_linear(weights.head, None)
    last = torch.randn(rows, weights.head.shape[1]).to(dtype)
    return {
        "embedding": partial(embed, weights.embedding, ids),
        **{part: partial(call_all, calls) for part, calls in layers.items()},
        "write, attention": attention_step(steps.backend, tables.reshape(rows, -1), context, query),
        "head": partial(head, last),
        "sampling": partial(
            draw_all, logits, range(rows), samples, best=logits.argmax(dim=1), plain=True
        ),
    }


def with_phases(steps: ModelSteps, step: Part) -> tuple[Part, dict[str, list[float]]]:
    """The step, and the seconds that each part took inside of it, a call each."""
    decoder = steps.model.decoder._native
    inside: dict[str, list[float]] = {}

    def run() -> None:
        before = {} if decoder is None else decoder.profile()
        step()
        after = {} if decoder is None else decoder.profile()
        taken: dict[str, float] = {}
        for phase, part in PHASES.items():
            if phase in after:
                taken[part] = taken.get(part, 0.0) + after[phase] - before[phase]
        for part, seconds in taken.items():
            inside.setdefault(part, []).append(seconds)

    return run, inside


def call_all(calls: Sequence[Part]) -> None:
    for call in calls:
        call()


def host_seconds(dtype: str, rows: int) -> float:
    """CPU time beside a decode step, as bench_step.py takes it."""
    llm = LLM(MODEL, dtype=dtype, num_blocks=1024)
    executor = llm.engine.core.executor
    assert isinstance(executor, ModelExecutor)
    steps = decode_steps(llm, executor._decoder, rows, temperature=0.0)
    return statistics.median(sum(step[part] for part in HOST) for step in steps)


def profile(dtype: torch.dtype, seconds: float, clock: Clock) -> None:
    name = str(dtype).removeprefix("torch.")
    steps = ModelSteps(MODEL, dtype, num_blocks=32 * 512 // BLOCK, block_size=BLOCK)
    for title, shape in SHAPES.items():
        parts = parts_of(steps, *shape)
        yardstick = Yardstick(dtype)
        step, inside = with_phases(steps, steps.step(*shape))
        calls = {"step": step, **parts, **yardstick.calls()}
        taken = in_turns(calls, seconds=seconds, clock=clock)
        limits = yardstick.limits(taken)
        rows, context, query = shape
        work = step_work(steps.model.config, dtype, rows, context, query)
        print(f"\n{name}, {title}, {len(taken['step'])} rounds; {limits}")
        times = {part: fast(taken[part]) for part in ("step", *WORK)}
        show(times, work, limits, {part: fast(found) for part, found in inside.items()})
        if query == 1:
            print(f"{'host':18}{host_seconds(name, rows) * 1e3:10.2f}")


def show(
    times: dict[str, float], work: dict[str, Work], limits: Limits, inside: dict[str, float]
) -> None:
    print(
        f"{'':18}{'ms':>10}{'share':>8}{'floor ms':>10}{'of it':>8}{'GB/s':>8}{'GFLOP/s':>9}"
        f"{'inside ms':>11}"
    )
    whole = times.pop("step")
    for part, seconds in times.items():
        own = total(work[name] for name in WORK[part])
        show_row(part, seconds, whole, own, limits, inside.get(part))
    rest = whole - sum(times.values())
    print(f"{'rest':18}{rest * 1e3:10.2f}{rest / whole:8.1%}")
    show_row("step", whole, whole, total(work.values()), limits)


def show_row(
    name: str,
    seconds: float,
    whole: float,
    work: Work,
    limits: Limits,
    inside: float | None = None,
) -> None:
    floor = limits.floor(work.num_bytes, work.operations)
    print(
        f"{name:18}{seconds * 1e3:10.2f}{seconds / whole:8.1%}{floor * 1e3:10.2f}"
        f"{floor / seconds:8.0%}{work.num_bytes / seconds / 1e9:8.1f}"
        f"{work.operations / seconds / 1e9:9.1f}{'' if inside is None else f'{inside * 1e3:11.2f}'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("bfloat16", "float32"))
    parser.add_argument("--seconds", type=float, default=10.0, help="for each shape")
    parser.add_argument(
        "--cpu-time", action="store_true", help="of one thread: neighbours do not lengthen it"
    )
    options = parser.parse_args()
    if options.cpu_time:
        os.environ[THREADS_VARIABLE] = "1"
    clock = time.thread_time if options.cpu_time else time.perf_counter
    print_calibration()
    print(f"{set_threads()} threads{', CPU time' if options.cpu_time else ''}")
    for name in [options.dtype] if options.dtype else ["bfloat16", "float32"]:
        profile(getattr(torch, name), options.seconds, clock)


if __name__ == "__main__":
    main()
