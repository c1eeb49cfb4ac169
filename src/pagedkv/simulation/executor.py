"""An executor that computes nothing and takes the time a model would."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pagedkv.errors import ConfigError
from pagedkv.scheduling.cost import StepFeatures
from pagedkv.scheduling.step import Result, Step, Ticket, TokenLogprobs
from pagedkv.simulation.clock import VirtualClock
from pagedkv.simulation.link import LinkedTier

_KEY, _POSITION = 7919, 104_729  # primes


class StepCost(Protocol):
    """What a step takes."""

    def seconds(self, step: Step) -> float:
        """At least 0. Called once for each step."""
        ...


@dataclass(frozen=True, slots=True)
class LinearCost:
    """Seconds of a step: base + per_token * its tokens + per_context * the context it reads.

    per_pair: for each query-key pair of a chunk, which makes long prompts cost more a token. The
    linear form to which DistServe and vLLM step times fit; coefficients come from a measured
    machine. ConfigError for one below 0 or not finite, and if a step would take no time.
    """

    base: float
    per_token: float
    per_context: float = 0.0
    per_pair: float = 0.0

    def __post_init__(self) -> None:
        for name in ("base", "per_token", "per_context", "per_pair"):
            value = getattr(self, name)
            if not 0 <= value < np.inf:
                raise ConfigError(f"{name}={value}: give at least 0 seconds")
        if not self.base + self.per_token > 0:
            raise ConfigError("base=0 and per_token=0: a step takes time: give one of them")

    def seconds(self, step: Step) -> float:
        context = int(step.context_lens.sum())
        seconds = self.base + self.per_token * step.num_tokens + self.per_context * context
        if self.per_pair:
            seconds += self.per_pair * StepFeatures.of(step).sum_pairs
        return seconds


def step_of(decodes: int, context: int, chunk: int) -> Step:
    """A Step as far as its cost goes: decodes that read so much context, and one new prompt."""
    counts = np.array([1] * decodes + [chunk] * (chunk > 0), np.int32)
    none32, none64 = np.zeros(0, np.int32), np.zeros(0, np.int64)
    return Step(
        index=0,
        seqs=np.arange(len(counts)),
        table_rows=np.arange(len(counts), dtype=np.int32),
        query_lens=counts,
        context_lens=np.array([context] * decodes + [chunk] * (chunk > 0), np.int32),
        tokens=np.zeros(int(counts.sum()), np.int32),
        positions=none32,
        slots=none64,
        copies=np.zeros((0, 3), np.int32),
        changed_rows=none32,
        changed_tables=np.zeros((0, 0), np.int32),
    )


class TimedExecutor:
    """An Executor that advances a clock by the cost of each step.

    Tokens are a function of (key, position), so requests differ and runs repeat. Log-probabilities
    are those of a uniform distribution. tier: where the transfers of steps go; the step takes as
    much longer as they do.
    """

    def __init__(
        self,
        clock: VirtualClock,
        cost: StepCost,
        vocab_size: int = 32_000,
        tier: LinkedTier | None = None,
    ) -> None:
        self.clock, self.cost, self.vocab_size, self.tier = clock, cost, vocab_size, tier
        self._steps: dict[Ticket, Step] = {}

    def submit(self, step: Step) -> Ticket:
        ticket = Ticket(step.index)
        self._steps[ticket] = step
        return ticket

    def collect(self, ticket: Ticket) -> Result:
        """Advances the clock to the end of the step."""
        step = self._steps.pop(ticket)
        transfers = () if self.tier is None else self.tier.move(step)
        seconds = self.cost.seconds(step) if step.num_tokens else 0.0
        self.clock.advance(seconds + sum(done.duration for done in transfers))
        size = self.vocab_size  # as `token`, written out
        tokens = [(s.key * _KEY + s.position * _POSITION) % size for s in step.samples]
        return Result(
            tokens=np.array(tokens, np.int32),
            indptr=np.arange(len(tokens) + 1, dtype=np.int32),
            parents=np.array([sample.row for sample in step.samples], np.int32),
            logprobs=tuple(
                [
                    None if s.params.logprobs is None else self._score(token, s.params.logprobs)
                    for s, token in zip(step.samples, tokens, strict=True)
                ]
            ),
            prompt_logprobs=tuple(
                tuple(self._score(int(target), asked.top) for target in asked.targets)
                for asked in step.prompt_scores
            ),
            duration=seconds,
            transfers=transfers,
        )

    def token(self, key: int, position: int) -> int:
        """The token drawn there. With `vocab_size` 32,000 no two of 32,000 positions in a row have
        the same one for a key.
        """
        return (key * _KEY + position * _POSITION) % self.vocab_size

    def _score(self, token: int, top: int) -> TokenLogprobs:
        ids = np.array([token, *range(min(top, self.vocab_size))], np.int32)
        return TokenLogprobs(ids, np.full(len(ids), -np.log(self.vocab_size), np.float32), rank=1)
