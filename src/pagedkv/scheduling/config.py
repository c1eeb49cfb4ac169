"""Limits of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from pagedkv.errors import ConfigError

# The block table and the rows of a step are laid out for so many sequences.
MAX_NUM_SEQS = 65_536


def check_integer(name: str, value: object, low: int, high: int = 2**63 - 1) -> None:
    """ConfigError, naming the setting, unless `value` is an int from low to high."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name}={value!r:.200} must be an integer from {low} to {high}")


def check_flag(name: str, value: object) -> None:
    """ConfigError, naming the setting, unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r:.200} must be True or False")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """max_num_seqs: sequences running at once (a request of n samples counts n), see `seats`.

    max_num_batched_tokens: token budget of a step. max_model_len: most tokens of prompt and
    output together. eos_token_ids end a sample unless its request ignores them. vocab_size None:
    token ids are only checked to be non-negative int32. public_prefixes: token ids of beginnings
    of prompts that all tenants share; the longest one with which a prompt begins, whole, counts.
    policy: who is served first and who yields, see `policies`.
    Raises ConfigError naming the setting.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    vocab_size: int | None = None
    public_prefixes: tuple[tuple[int, ...], ...] = ()
    policy: str = "fcfs"

    def __post_init__(self) -> None:
        check_integer("max_num_seqs", self.max_num_seqs, 1, MAX_NUM_SEQS)
        check_integer("max_num_batched_tokens", self.max_num_batched_tokens, 1, 2**31 - 1)
        check_integer("max_model_len", self.max_model_len, 2, 2**31 - 1)
        if self.vocab_size is not None:
            check_integer("vocab_size", self.vocab_size, 1, 2**31)
        if not isinstance(self.public_prefixes, tuple):
            raise ConfigError(
                f"public_prefixes={self.public_prefixes!r:.200} must be a tuple of tuples of ids"
            )
        for i, prefix in enumerate(self.public_prefixes):
            if not isinstance(prefix, tuple) or not prefix:
                raise ConfigError(
                    f"public_prefixes[{i}]={prefix!r:.200} must be a tuple of at least one token id"
                )
            for token in prefix:
                check_integer(
                    f"a token id of public_prefixes[{i}]", token, 0, (self.vocab_size or 2**31) - 1
                )

    @property
    def seats(self) -> int:
        """Sequences that run at once: never more than a step has tokens.

        So each running decode gets its token in every step.
        """
        return min(self.max_num_seqs, self.max_num_batched_tokens)
