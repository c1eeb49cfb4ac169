"""What does a step cost outside of the model's forward pass?

The whole loop runs, from the scheduler to the text that users get, over the executor of real
models; decoder and attention are stood in for by logits that lie ready, so that what is left is the
host's own work. One sequence a request, greedy and drawn. CPU time of the thread, median step; no
other program can lengthen it, but for what it takes out of the caches. Then the same with the
embedded model in bfloat16, whose weights push the host's data out of the caches between two steps:
the host's share of a step.

    plan     messages, scheduler, block manager, the Step's arrays
    tables   the table's mirror, the checks of the batch, the attention backend's plan
    sample   a token a row, and the Result
    commit   tokens to the block manager and to the requests
    output   text, stop strings, what users get
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch

from calibration import print_calibration
from pagedkv import LLM, SamplingParams
from pagedkv.engine.executor import ModelExecutor
from pagedkv.engine.llm_engine import LLMEngine
from pagedkv.scheduling.step import Result, Step, Ticket

MODEL = "smollm2-135m-instruct"
PROMPT = 64
WARM_UP, STEPS = 4, 24
PARTS = ("plan", "tables", "sample", "commit", "output")
SEQUENCES = (1, 8, 32, 64, 256)
PARAMS = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.8},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
}


class Ready:
    """A decoder whose logits are there already."""

    def __init__(self, vocabulary: int) -> None:
        scale = torch.Generator().manual_seed(0)
        self._logits = 3 * torch.randn(max(SEQUENCES), vocabulary, generator=scale)
        self._best = self._logits.argmax(dim=1)

    def forward(self, *args: Any) -> Any:
        wanted, best = args[4], args[6]
        best[: len(wanted)] = self._best[: len(wanted)]
        return self._logits[: len(wanted)]


class Watched:
    """A decoder that notes when its work begins and ends."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder
        self.begun = self.ended = self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def forward(self, *args: Any) -> Any:
        self.begun, start = time.thread_time(), time.perf_counter()
        logits = self._decoder.forward(*args)
        self.seconds = time.perf_counter() - start
        self.ended = time.thread_time()
        return logits


class Timed:
    """The executor of real models, and the CPU seconds of its parts."""

    def __init__(self, llm: LLM, decoder: Watched) -> None:
        inner = llm.engine.core.executor
        assert isinstance(inner, ModelExecutor)
        self._inner, self._decoder = inner, decoder
        inner._decoder = decoder
        self.started = self.ended = 0.0

    def submit(self, step: Step) -> Ticket:
        self.started = time.thread_time()
        return self._inner.submit(step)

    def collect(self, ticket: Ticket) -> Result:
        result = self._inner.collect(ticket)
        self.ended = time.thread_time()
        return result


def decode_steps(llm: LLM, decoder: Any, sequences: int, **params: Any) -> list[dict[str, float]]:
    """Seconds of each part of each decode step; of "forward" by the wall, of others by the CPU."""
    engine: LLMEngine = llm.engine
    watched = Watched(decoder)
    timed = engine.core.executor = Timed(llm, watched)
    engine.reset_prefix_cache()
    rng = np.random.default_rng(sequences)
    sampling = SamplingParams(max_tokens=WARM_UP + STEPS + 2, ignore_eos=True, **params)
    for i in range(sequences):
        prompt = rng.integers(100, 40_000, PROMPT).tolist()
        engine.add_request(str(i), {"prompt_token_ids": prompt}, sampling)
    while engine.core.scheduler.stats.num_waiting or not engine.core.scheduler.stats.num_running:
        engine.step()
    engine.step()
    committed = 0.0
    commit = engine.core.step

    def core_step(now: float) -> Any:
        nonlocal committed
        result = commit(now)
        committed = time.thread_time()
        return result

    engine.core.step = core_step
    steps = []
    for _ in range(WARM_UP + STEPS):
        start = time.thread_time()
        engine.step()
        end = time.thread_time()
        moments = start, timed.started, watched.begun, watched.ended, timed.ended, committed, end
        plan, tables, _, sample, commit_, output = np.diff(moments).tolist()
        parts = dict(zip(PARTS, (plan, tables, sample, commit_, output), strict=True))
        steps.append({**parts, "forward": watched.seconds})
    engine.core.step = commit
    while engine.has_unfinished_requests():
        engine.step()
    engine.core.executor = timed._inner
    timed._inner._decoder = decoder
    return steps[WARM_UP:]


def show(name: str, sequences: int, steps: list[dict[str, float]], *, share: bool) -> None:
    medians = {part: statistics.median(step[part] for step in steps) for part in steps[0]}
    host = sum(medians[part] for part in PARTS)
    text = "  ".join(f"{part} {medians[part] * 1e6:6.0f}" for part in PARTS)
    print(f"{name:8} {sequences:4} sequences: {text}  all {host * 1e6:6.0f} us", end="")
    if share:
        step = host + medians["forward"]
        print(f" of a step of {step * 1e3:.1f} ms: {host / step:.1%}   [bar: 3% at 64]", end="")
    print()


def main() -> None:
    print_calibration()
    llm = LLM(MODEL, dtype="bfloat16", num_blocks=4096, max_num_batched_tokens=2048)
    executor = llm.engine.core.executor
    assert isinstance(executor, ModelExecutor)
    model = executor._decoder
    ready = Ready(model.config.vocab_size)
    for name, params in PARAMS.items():
        for sequences in SEQUENCES:
            show(name, sequences, decode_steps(llm, ready, sequences, **params), share=False)
    print("with the model:")
    for sequences in SEQUENCES[:-1]:
        show("greedy", sequences, decode_steps(llm, model, sequences, temperature=0.0), share=True)


if __name__ == "__main__":
    main()
