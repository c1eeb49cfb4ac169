"""What steps and transfers take, fitted while they run."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from pagedkv.scheduling.fit import FORGETTING, HICCUP, MIN_OBSERVATIONS, Float64, NonNegativeFit
from pagedkv.scheduling.step import Step

# No step and no transfer takes less, or longer; a duration that does is a clock gone wrong.
MIN_SECONDS = 1e-9
MAX_SECONDS = 3600.0
# A chunk is cut to whole tiles of rows: one row more than a tile costs as much as a tile.
TILE = 16
# Steps whose durations are taken in at once, unless somebody asks before: the fit's code and data,
# which the model pushes out of the caches, are fetched once for all of them.
_TOGETHER = 32
# Tokens that a prefill gets in a step whatever it costs: it has to end some day.
PREFILL_FLOOR = 32


class StepFeatures(NamedTuple):
    """What the duration of a step depends on.

    A row of one token is a decode; chunk rows are all others.
    """

    num_tokens: int
    sum_context: int  # tokens that decodes read
    sum_pairs: float  # query-key pairs of chunks: chunk * (tokens before it + chunk / 2)

    @classmethod
    def of(cls, step: Step) -> StepFeatures:
        if step.num_tokens == len(step.query_lens):  # decodes alone, as most steps are
            return cls(step.num_tokens, int(step.context_lens.sum(dtype=np.int64)), 0.0)
        counts = step.query_lens.astype(np.int64)
        contexts = step.context_lens.astype(np.int64)
        decodes = counts == 1
        pairs = np.where(decodes, 0.0, counts * (contexts - counts / 2))
        return cls(int(counts.sum()), int(contexts[decodes].sum()), float(pairs.sum()))


class LinkModel:
    """Seconds of a transfer in one direction: pieces * per_piece + bytes * per_byte.

    A piece is contiguous memory: small pieces are what makes swapping slow. Where all pieces are of
    one size the two cannot be told apart; what is predicted for pieces of that size is right.
    """

    def __init__(self) -> None:
        self._fit = NonNegativeFit(2)
        self.num_ignored = 0

    @property
    def fitted(self) -> bool:
        return self._fit.num_observed > 0

    def observe(self, num_bytes: int, pieces: int, seconds: float) -> None:
        """Durations that cannot be (below 1 ns, NaN, over an hour) are counted and ignored."""
        if not is_duration(seconds) or num_bytes < 1 or pieces < 1:
            self.num_ignored += 1
            return
        self._fit.observe(np.array([float(pieces), float(num_bytes)]), seconds)

    def seconds(self, num_bytes: int, pieces: int) -> float:
        """0.0 before the first transfer."""
        return self._fit.predict(np.array([float(pieces), float(num_bytes)]))

    def describe(self) -> dict[str, float]:
        per_piece, per_byte = self._fit.coefficients.tolist()
        return {
            "observations": self._fit.num_observed,
            "ignored": self.num_ignored,
            "seconds_per_piece": per_piece,
            "seconds_per_byte": per_byte,
        }

    def __str__(self) -> str:
        if not self.fitted:
            return "not measured"
        per_piece, per_byte = self._fit.coefficients.tolist()
        return (
            f"{_show(per_piece)} a piece + {_show(per_byte * 2**20)} a MiB "
            f"({self._fit.num_observed} transfers)"
        )


class CostModel:
    """t(step) ~ c0 + c1 * tokens + c2 * context of decodes + c3 * query-key pairs of chunks.

    The linear form of the roofline c0 + max(memory, arithmetic), to which DistServe's fits of real
    engines belong as well (its prefill: a + b * sum of lengths + c * sum of squared lengths).
    Coefficients are never negative, so predictions are not, and more work never takes less time.
    Times in seconds. It reads no clock: the same observations give the same predictions.
    """

    def __init__(self) -> None:
        self._model = NonNegativeFit(4)
        self._news: list[tuple[StepFeatures, float]] = []  # observations it has not seen yet
        self.link_out, self.link_in = LinkModel(), LinkModel()
        self.num_ignored = 0
        self._fewest, self._most = math.inf, 0.0  # tokens of a step
        self._misses, self._weights = 0.0, 0.0  # of predictions; relative, exponentially weighted

    @property
    def _fit(self) -> NonNegativeFit:
        """The fit of all observations so far."""
        self._learn()
        return self._model

    @property
    def num_observed(self) -> int:
        return self._fit.num_observed

    @property
    def fitted(self) -> bool:
        """Whether to act on predictions: enough steps, some at least twice as large as others."""
        self._learn()
        return self._enough

    @property
    def _enough(self) -> bool:
        """The same as of the observations that were taken in."""
        enough = self._model.num_observed >= MIN_OBSERVATIONS
        return enough and self._most >= 2 * self._fewest

    @property
    def error(self) -> float:
        """Mean relative error of recent predictions, each made before its step was seen."""
        self._learn()
        return self._misses / self._weights if self._weights else 0.0

    def observe(self, features: StepFeatures, seconds: float) -> None:
        """Durations that cannot be (below 1 ns, NaN, over an hour) are counted and ignored."""
        if not is_duration(seconds) or features.num_tokens < 1:
            self.num_ignored += 1
            return
        self._news.append((features, seconds))
        if len(self._news) == _TOGETHER:
            self._learn()

    def _learn(self) -> None:
        """Takes in what was observed. One after the other: nothing depends on when that is done."""
        news, self._news = self._news, []
        for features, seconds in news:
            x = _vector(*features)
            if self._enough:
                # As with the fit: one hiccup of the clock is not the measure of hundreds of steps.
                miss = min(abs(self._model.predict(x) - seconds) / seconds, HICCUP)
                self._misses = FORGETTING * self._misses + miss
                self._weights = FORGETTING * self._weights + 1.0
            self._model.observe(x, seconds)
            self._fewest = min(self._fewest, features.num_tokens)
            self._most = max(self._most, features.num_tokens)

    def predict(self, num_tokens: int, sum_context: float = 0, sum_pairs: float = 0) -> float:
        """Seconds of a step; 0.0 before the first observation."""
        return self._fit.predict(_vector(num_tokens, sum_context, sum_pairs))

    def prefill_seconds(self, num_tokens: int, prior: int = 0, alone: bool = False) -> float:
        """A chunk after `prior` tokens: what it adds to a step, or (`alone`) a step of its own."""
        seconds = self.predict(num_tokens, 0, num_tokens * (prior + num_tokens / 2))
        return seconds if alone else seconds - float(self._fit.coefficients[0])

    def prefill_seconds_each(self, num_tokens: Float64, prior: Float64) -> Float64:
        """What each of [n] chunks adds to a step of its own: `prefill_seconds` for arrays."""
        _, per_token, _, per_pair = self._fit.coefficients.tolist()
        each: Float64 = per_token * num_tokens + per_pair * num_tokens * (prior + num_tokens / 2)
        return each

    def decode_seconds_each(self, num_tokens: Float64, prior: Float64) -> Float64:
        """What [n] outputs of so many tokens add to the steps that draw them, one each."""
        _, per_token, per_context, _ = self._fit.coefficients.tolist()
        each: Float64 = num_tokens * (per_token + per_context * (prior + num_tokens / 2))
        return each

    def recompute_seconds(self, num_tokens: int, prior: int = 0) -> float:
        """What computing the tokens after `prior` again adds to steps that run anyway."""
        return self.prefill_seconds(num_tokens, prior)

    def swap_seconds(self, bytes_out: int, pieces_out: int, bytes_in: int, pieces_in: int) -> float:
        """What copying out, as far as it is not done yet, and back in takes on the path.

        A way that was never used is taken to be like the other one; 0.0 if neither was.
        """
        back = self.link_in if self.link_in.fitted else self.link_out
        out = self.link_out if self.link_out.fitted else self.link_in
        return out.seconds(bytes_out, pieces_out) + back.seconds(bytes_in, pieces_in)

    @property
    def knows_links(self) -> bool:
        """Whether a transfer has been measured, either way."""
        return self.link_in.fitted or self.link_out.fitted

    def max_prefill(
        self,
        target: float,
        limit: int,
        decodes: int = 0,
        sum_context: int = 0,
        prior: int = 0,
        floor: int = PREFILL_FLOOR,
    ) -> int:
        """Largest chunk after `prior` tokens with which the step takes at most `target` seconds.

        decodes: rows of one token beside it, which read `sum_context` tokens. At most `limit`;
        whole tiles unless all of `limit` fits; never less than `floor`, even past the target.
        All of `limit` as long as the model is not fitted.
        """
        if not self.fitted:
            return limit
        _, per_token, _, per_pair = self._fit.coefficients.tolist()
        room = max(0.0, target - self.predict(decodes, sum_context))
        # The positive root of per_pair / 2 * n**2 + linear * n = room, without cancellation.
        linear = per_token + per_pair * prior
        slope = (linear + math.sqrt(linear * linear + 2 * per_pair * room)) / 2
        if slope * limit <= room:
            return limit
        fits = int(room / slope)
        return min(limit, max(floor, fits - fits % TILE))

    def describe(self) -> dict[str, float]:
        """The numbers, for logs and metrics; times in seconds."""
        base, per_token, per_context, per_pair = self._fit.coefficients.tolist()
        links = {"out": self.link_out, "in": self.link_in}
        return {
            "fitted": float(self.fitted),
            "observations": self.num_observed,
            "ignored": self.num_ignored,
            "error": self.error,
            "seconds_per_step": base,
            "seconds_per_token": per_token,
            "seconds_per_context_token": per_context,
            "seconds_per_pair": per_pair,
            **{
                f"link_{way}_{name}": value
                for way, link in links.items()
                for name, value in link.describe().items()
            },
        }

    def __str__(self) -> str:
        base, per_token, per_context, per_pair = self._fit.coefficients.tolist()
        if not self.fitted:
            return f"not fitted: {self.num_observed} steps measured, {self.num_ignored} ignored"
        text = (
            f"{_show(base)} a step + {_show(per_token)} a token "
            f"+ {_show(per_context)} a context token + {_show(per_pair)} a pair "
            f"(error {self.error:.0%}, {self.num_observed} steps"
        )
        text += f", {self.num_ignored} ignored)" if self.num_ignored else ")"
        for way, link in (("out", self.link_out), ("in", self.link_in)):
            if link.fitted:
                text += f"; copy {way} {link}"
        return text


def _show(seconds: float) -> str:
    for scale, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * scale >= 1:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def is_duration(seconds: object) -> bool:
    """Whether it can be what a step or a transfer took."""
    # What an executor reports is not ours: it may be of any type. False for NaN.
    return isinstance(seconds, (int, float)) and MIN_SECONDS <= seconds <= MAX_SECONDS


def _vector(num_tokens: float, sum_context: float, sum_pairs: float) -> Float64:
    return np.array([1.0, num_tokens, sum_context, sum_pairs])
