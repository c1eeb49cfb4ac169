"""Prompts as token ids: drawn at random, or pieces of a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pagedkv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt, and how many tokens are wanted in answer."""

    prompt: list[int]
    output_len: int


@dataclass(frozen=True, slots=True)
class Workload:
    """How many jobs, and how long: lengths are uniform in [len * (1 - r), len * (1 + r)].

    r is `range_ratio`. prefix_len: tokens before each prompt that all have in common. ConfigError
    names the number that cannot be.
    """

    num_prompts: int
    input_len: int
    output_len: int
    range_ratio: float = 0.0
    prefix_len: int = 0

    def __post_init__(self) -> None:
        for name, value, least in (
            ("num_prompts", self.num_prompts, 1),
            ("input_len", self.input_len, 1),
            ("output_len", self.output_len, 1),
            ("random_prefix_len", self.prefix_len, 0),
        ):
            if value < least:
                raise ConfigError(f"{name}={value}: give at least {least}")
        if not 0 <= self.range_ratio < 1:
            raise ConfigError(f"range_ratio={self.range_ratio}: give 0 or more, less than 1")

    def jobs(
        self,
        vocabulary: Sequence[int],
        rng: np.random.Generator,
        text: Sequence[int] | None = None,
    ) -> list[Job]:
        """vocabulary: ids that may be drawn. text: prompts are pieces of it instead.

        A piece begins anywhere and goes on around the end.
        """
        source = np.asarray(vocabulary if text is None else text, np.int64)

        def tokens(length: int) -> list[int]:
            if text is None:
                places = rng.integers(len(source), size=length)
            else:
                places = (rng.integers(len(source)) + np.arange(length)) % len(source)
            ids: list[int] = source[places].tolist()
            return ids

        prefix = tokens(self.prefix_len)
        return [
            Job(prefix + tokens(length), wanted)
            for length, wanted in zip(
                self._lengths(self.input_len, rng), self._lengths(self.output_len, rng), strict=True
            )
        ]

    def _lengths(self, middle: int, rng: np.random.Generator) -> list[int]:
        spread = int(middle * self.range_ratio)
        drawn = rng.integers(middle - spread, middle + spread + 1, self.num_prompts)
        lengths: list[int] = np.maximum(drawn, 1).tolist()
        return lengths
