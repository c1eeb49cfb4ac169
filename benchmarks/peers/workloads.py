"""The five workloads: token ids of prompts and lengths of outputs, drawn by a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

TEXT = (
    "The harbour was quiet in the early morning, and the fishing boats lay side by side along the "
    "stone quay. Anna walked past the market, where the first traders were setting out baskets of "
    "apples, onions and bread. She had promised her brother that she would post the letters before "
    "noon, yet she could not resist stopping to watch the tide come in. Far out, a white sail "
    "turned slowly towards the lighthouse. Her grandfather used to say that every boat has a "
    "story, and that the sea keeps most of them to itself. When the church bell rang she "
    "remembered the letters, laughed, and hurried up the hill to the post office. "
)
SEED = 20261129
FIRST_MARK = 2000  # the smallest id that marks a run; ordinary words of any vocabulary of this kind
NUM_MARKS = 40_000

Request = tuple[list[int], int]  # token ids of the prompt, number of output tokens


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that are submitted at once. shared: leading tokens that all prompts have alike."""

    name: str
    title: str
    requests: tuple[Request, ...]
    shared: int = 0

    @property
    def output_tokens(self) -> int:
        return sum(output for _, output in self.requests)

    @property
    def in_seconds(self) -> bool:
        """Whether it is the time that counts, for there is one output token only."""
        return self.output_tokens == 1


def make_workloads(ids: Sequence[int], seed: int = SEED) -> dict[str, Workload]:
    """ids: the tokens of `TEXT`, which prompts repeat from a place of their own each."""
    rng = random.Random(seed)

    def text(length: int) -> list[int]:
        start = rng.randrange(len(ids))
        return [ids[(start + i) % len(ids)] for i in range(length)]

    def log_uniform(low: int, high: int) -> int:
        return round(low * math.exp(rng.random() * math.log(high / low)))

    one = [(text(128), 128)]
    prompts = [16, 512, *(log_uniform(16, 512) for _ in range(30))]
    # A heavy tail: Pareto from 8 on, cut at 256.
    outputs = [8, 256, *(min(256, max(8, round(8 * rng.paretovariate(0.7)))) for _ in range(30))]
    rng.shuffle(prompts)
    rng.shuffle(outputs)
    mixed = [(text(prompt), output) for prompt, output in zip(prompts, outputs, strict=True)]
    prefix = text(512)
    common = [([*prefix, ids[(7 * k + 1) % len(ids)], *text(31)], 64) for k in range(16)]
    long = [(text(1900), 64) for _ in range(4)]
    prefill = [(text(1900), 1)]
    made = (
        Workload("W1", "one sequence, 128 in, 128 out", tuple(one)),
        Workload("W2", "32 mixed requests", tuple(mixed)),
        Workload("W3", "16 requests over a common prefix of 512", tuple(common), shared=512),
        Workload("W4", "4 requests of 1,900 tokens, 64 out", tuple(long)),
        Workload("W5", "prefill of 1,900 tokens", tuple(prefill)),
    )
    return {workload.name: workload for workload in made}


def marked(workload: Workload, run: int) -> list[Request]:
    """The requests with first tokens that belong to this run alone.

    So no run finds what an earlier one left in a prefix cache. Within a run, prompts begin alike
    only where the workload says so. run: differs for every run of every workload.
    """
    most = 64  # requests of a run
    marks = [
        FIRST_MARK + (run * most + (0 if workload.shared else i)) % NUM_MARKS
        for i in range(len(workload.requests))
    ]
    return [
        ([mark, *prompt[1:]], output)
        for mark, (prompt, output) in zip(marks, workload.requests, strict=True)
    ]
