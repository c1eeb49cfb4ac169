"""Limits of the scheduler."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pagedkv.errors import ConfigError
from pagedkv.scheduling.tenants import ORDINARY, Tenant, check_tenants

# The block table and the rows of a step are laid out for so many sequences.
MAX_NUM_SEQS = 65_536
RECOVERIES = ("auto", "swap", "recompute")
OVERLOADS = ("best_effort", "reject")
ADMISSIONS = ("first_chunk", "prompt", "max_tokens", "expected_peak")


def check_integer(name: str, value: object, low: int, high: int = 2**63 - 1) -> None:
    """ConfigError, naming the setting, unless `value` is an int from low to high."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name}={value!r:.200} must be an integer from {low} to {high}")


def check_seconds(name: str, value: object) -> None:
    """ConfigError, naming the setting, unless `value` is a time above 0, at most 10**9 seconds."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1e9:
        raise ConfigError(f"{name}={value!r:.200} must be seconds above 0, at most 1e9")


def check_amount(name: str, value: object) -> None:
    """ConfigError, naming the setting, unless `value` is a number from 0 to 10**9."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1e9:
        raise ConfigError(f"{name}={value!r:.200} must be a number from 0 to 1e9")


def check_flag(name: str, value: object) -> None:
    """ConfigError, naming the setting, unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r:.200} must be True or False")


def check_share(name: str, value: object) -> None:
    """ConfigError, naming the setting, unless `value` is a number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ConfigError(f"{name}={value!r:.200} must be a number from 0 to 1")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """max_num_seqs: sequences running at once (a request of n samples counts n), see `seats`.

    max_num_batched_tokens: token budget of a step. max_model_len: most tokens of prompt and
    output together. eos_token_ids end a sample unless its request ignores them. vocab_size None:
    token ids are only checked to be non-negative int32. public_prefixes: token ids of beginnings
    of prompts that all tenants share; the longest one with which a prompt begins, whole, counts.
    policy: who is served first and who yields, see `policies`. ageing: seconds of waiting that
    outweigh a step in priority, and after which those who have no `ttft_slo` are due. tenants:
    pairs of a name and what it is granted; default_tenant: what each tenant gets that is not named,
    and requests without a tenant, which are one together.

    admission: what has to fit in the pool before a waiting request starts: its first chunk, or all
    its known tokens ("prompt"), both beside what runs now; or the prompt and max_tokens of all
    that would run (nothing is ever preempted); or the most that these are expected to take at
    once, an output being as long as the `admission_quantile` of those of its tenant that were
    longer than it is now. watermark: share of the pool that a start leaves free, unless nothing
    runs. A request is refused (OverloadError) when others wait and there would be more than
    `max_num_waiting` with it, one of n samples counting n, or when it and those that wait have more
    than `max_waiting_tokens` prompt tokens; None: no bound.
    decision_log: decisions that are kept to be looked at; 0: none.
    recovery: what becomes of the K/V of requests that are preempted, and of blocks that leave the
    pool, where there is a tier below it: "swap" moves all there, "recompute" none, "auto" those
    for which it takes less time, by the cost model.

    overload: what becomes of requests whose first token cannot come in time, under policies with
    deadlines: they are served when nobody else is, or end with finish reason "deadline".
    urgent_slack, urgent_service: under "fair+deadline" a request that has to start within so many
    seconds goes first if its tenant has been given at most so much more than the one that is
    next; service is 1 a prompt token and 2 an output token, over the tenant's weight.
    Raises ConfigError naming the setting.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    vocab_size: int | None = None
    public_prefixes: tuple[tuple[int, ...], ...] = ()
    policy: str = "fcfs"
    admission: str = "prompt"
    admission_quantile: float = 0.9
    watermark: float = 0.0
    max_num_waiting: int | None = None
    max_waiting_tokens: int | None = None
    decision_log: int = 4096
    ageing: float = 60.0
    tenants: tuple[tuple[str, Tenant], ...] = ()
    default_tenant: Tenant = ORDINARY
    overload: str = "best_effort"
    urgent_slack: float = 1.0
    urgent_service: float = 4096.0
    recovery: str = "auto"

    def __post_init__(self) -> None:
        check_integer("max_num_seqs", self.max_num_seqs, 1, MAX_NUM_SEQS)
        check_integer("max_num_batched_tokens", self.max_num_batched_tokens, 1, 2**31 - 1)
        check_integer("max_model_len", self.max_model_len, 2, 2**31 - 1)
        check_integer("decision_log", self.decision_log, 0, 10**8)
        if self.vocab_size is not None:
            check_integer("vocab_size", self.vocab_size, 1, 2**31)
        if self.admission not in ADMISSIONS:
            raise ConfigError(
                f"admission={self.admission!r:.200}: use one of {', '.join(map(repr, ADMISSIONS))}"
            )
        if self.overload not in OVERLOADS:
            raise ConfigError(f"overload={self.overload!r:.200}: use one of {', '.join(OVERLOADS)}")
        if self.recovery not in RECOVERIES:
            raise ConfigError(
                f"recovery={self.recovery!r:.200}: use one of {', '.join(RECOVERIES)}"
            )
        check_share("admission_quantile", self.admission_quantile)
        check_share("watermark", self.watermark)
        for name in ("max_num_waiting", "max_waiting_tokens"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 1)
        check_seconds("ageing", self.ageing)
        check_amount("urgent_slack", self.urgent_slack)
        check_amount("urgent_service", self.urgent_service)
        check_tenants(self.tenants, self.default_tenant)
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

    def watermark_blocks(self, num_blocks: int) -> int:
        """Of a pool of so many, those that a start leaves free: see `watermark`."""
        return math.ceil(self.watermark * num_blocks)

    def turn_of(self, tenant: str | None) -> tuple[str | None, float]:
        """For whom a request of a tenant counts where room is given in turn, and the weight.

        Under a policy that is not fair all are one: who came first is first.
        """
        if "fair" not in self.policy:
            return None, 1.0
        return tenant, dict(self.tenants).get(tenant or "", self.default_tenant).weight
