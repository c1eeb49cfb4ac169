"""What is asked: invented prompts, those of a file, and those of a trace with its shared prefixes.

Invented prompts are made of words that are one token each in the usual vocabularies, so that no
tokenizer is needed; how many tokens they are is what the server says. From the same generator come
the same prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pagedkv.errors import ConfigError
from pagedkv.simulation.rows import Rows
from pagedkv.simulation.trace import MAX_COUNT, Int64, Trace

_WORDS = """
time people year way day man thing woman life child world school state family student group
country problem hand part place case week company system program question work government number
night point home water room mother area money story fact month lot right study book eye job word
business issue side kind head house service friend father power hour game line end member law car
city community name president team minute idea body information back parent face others level
office door health person art war history party result change morning reason research girl guy
moment air teacher force education foot boy age policy music market sense nation plan college
interest death experience effect use class control field development role effort rate heart drug
show leader light voice wife police mind price report decision son view relationship town road arm
difference value building action model season society tax director position player record paper
space ground form event official matter center couple site project activity star table need court
oil situation cost industry figure street image phone data picture practice piece land product
doctor wall patient worker news test movie north love step
"""
WORDS = tuple(_WORDS.split())


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, how many tokens are wanted in answer, and the tenant where the data names one."""

    prompt: str
    output_tokens: int
    tenant: str | None = None


def random_questions(
    n: int,
    input_len: int,
    output_len: int,
    rng: np.random.Generator,
    range_ratio: float = 0.0,
) -> list[Question]:
    """Prompts with nothing in common. Lengths are uniform in [len * (1 - r), len * (1 + r)].

    ConfigError for a length below 1 and for a range_ratio r outside [0, 1).
    """
    if not 0 <= range_ratio < 1:
        raise ConfigError(f"range_ratio={range_ratio}: give 0 or more, less than 1")
    inputs = _around("input_len", input_len, range_ratio, n, rng)
    outputs = _around("output_len", output_len, range_ratio, n, rng)
    return [
        Question(_text(rng, length), wanted)
        for length, wanted in zip(inputs.tolist(), outputs.tolist(), strict=True)
    ]


def prefix_questions(
    n: int,
    num_prefixes: int,
    prefix_len: int,
    suffix_len: int,
    output_len: int,
    rng: np.random.Generator,
) -> list[Question]:
    """Each prompt is one of `num_prefixes` prefixes, in turns, and a suffix of its own.

    In random order. ConfigError for a number below 1.
    """
    for name, value in (
        ("num_prefixes", num_prefixes),
        ("prefix_len", prefix_len),
        ("suffix_len", suffix_len),
        ("output_len", output_len),
    ):
        _check(name, value)
    prefixes = [_text(rng, prefix_len) for _ in range(num_prefixes)]
    return [
        Question(f"{prefixes[place]} {_text(rng, suffix_len)}", output_len)
        for place in rng.permutation(np.arange(n) % num_prefixes).tolist()
    ]


def read_questions(path: Path, n: int | None, output_len: int) -> list[Question]:
    """Prompts of a file of JSON lines (`.jsonl`) or CSV with the column `prompt`, n of them.

    `output_tokens`, where it is there, says how many are wanted; else `output_len`. A file with
    fewer than n is read again from its start; n None: once. ConfigError names file and line.
    """
    rows = Rows(path, "dataset")
    prompts = []
    for line, value in rows.column("prompt"):
        if not isinstance(value, str) or not value.strip():
            rows.refuse(line, f"prompt={str(value)[:60]!r} is no text")
        prompts.append(value)
    wanted = [output_len] * len(prompts)
    if "output_tokens" in rows.names:
        column = rows.column("output_tokens")
        wanted = [rows.whole(line, "output_tokens", v, 1, MAX_COUNT) for line, v in column]
    count = len(prompts) if n is None else n
    return [Question(prompts[i % len(prompts)], wanted[i % len(wanted)]) for i in range(count)]


def trace_questions(trace: Trace, seed: int) -> list[Question]:
    """A prompt for each request of a trace; they share the blocks that its block ids say.

    One that wants no token is asked for one, the least that a server gives.
    """
    blocks: dict[int, str] = {}
    size = trace.block_size or 0
    own = np.random.default_rng((seed, 0))

    def block(number: int) -> str:
        if number not in blocks:
            blocks[number] = _text(np.random.default_rng((seed, 1, number)), size)
        return blocks[number]

    questions = []
    for i, (length, wanted) in enumerate(
        zip(trace.prompt_tokens.tolist(), trace.output_tokens.tolist(), strict=True)
    ):
        words: list[str] = []
        if trace.block_ids is not None:
            for number in trace.block_ids[i].tolist():
                words += block(number).split(" ")
            del words[length:]
        if len(words) < length:
            words.append(_text(own, length - len(words)))
        tenant = None if trace.tenants is None else trace.tenants[i]
        questions.append(Question(" ".join(words), max(1, wanted), tenant))
    return questions


def _text(rng: np.random.Generator, length: int) -> str:
    return " ".join([WORDS[i] for i in rng.integers(len(WORDS), size=length).tolist()])


def _around(name: str, mean: int, ratio: float, n: int, rng: np.random.Generator) -> Int64:
    _check(name, mean)
    low, high = max(1, round(mean * (1 - ratio))), max(1, round(mean * (1 + ratio)))
    return rng.integers(low, high + 1, n)


def _check(name: str, value: int) -> None:
    if not 1 <= value < MAX_COUNT:
        raise ConfigError(f"{name}={value}: give more than 0 and less than 2**31")
