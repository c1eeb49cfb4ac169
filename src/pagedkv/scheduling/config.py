"""Limits of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from pagedkv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """max_num_seqs: sequences running at once (a request of n samples counts n), see `seats`.

    max_num_batched_tokens: token budget of a step. max_model_len: most tokens of prompt and
    output together. eos_token_ids end a sample unless its request ignores them. vocab_size None:
    token ids are only checked to be non-negative int32.
    Raises ConfigError naming the setting.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        lowest = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "max_model_len": 2}
        for name, low in lowest.items():
            value = getattr(self, name)
            if value < low:
                raise ConfigError(f"{name}={value} is too small: give at least {low}")
        if self.vocab_size is not None and self.vocab_size < 1:
            raise ConfigError(f"vocab_size={self.vocab_size} is too small: give at least 1")

    @property
    def seats(self) -> int:
        """Sequences that run at once: never more than a step has tokens.

        So each running decode gets its token in every step.
        """
        return min(self.max_num_seqs, self.max_num_batched_tokens)
