"""Numbers of a scheduler that only ever grow, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

# (name, number) for each name.
Named = tuple[tuple[str, int], ...]


class Attainment(NamedTuple):
    """Requests that wanted something by some time, and got it or did not."""

    met: int = 0
    missed: int = 0

    def judged(self, met: bool) -> Attainment:
        """With one more."""
        return Attainment(self.met + met, self.missed + (not met))


_NOBODY = Attainment()


@dataclass(slots=True)
class TenantCounters:
    """Of one tenant since the start. None: requests without a tenant.

    prompt_tokens: prompts that were computed or found in the cache; counted when the first token is
    drawn, or as far as they got. generation_tokens: drawn, those of all samples and beams.
    Requests are judged by their TTFT when the first token is drawn, or will not be any more; by
    TPOT, the mean time between the tokens of the longest sample, and by deadline when they end.
    Those that are aborted are not.
    """

    tenant: str | None
    requests: int = 0  # taken in; one that is moved counts at each of its places
    prompt_tokens: int = 0
    generation_tokens: int = 0
    ttft: Attainment = _NOBODY
    tpot: Attainment = _NOBODY
    deadlines: Attainment = _NOBODY


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """Since the start. Tiers are "device" and those below it.

    prefix_cache_queries, prefix_cache_hits: tokens looked up and found when requests start for the
    first time; readmission_*: when they come back after a preemption, and find what they had
    themselves computed. preemptions: (kind, reason, number); kind as in `recovery`, reason as in
    `tally.PREEMPTION_REASONS`. requests_refused: by error type; they were never taken in.
    requests_finished: by finish reason; of samples that ended differently the worst counts.
    requests_released: went elsewhere before their end. moved_tokens: of requests that were moved
    here, or were about to be; those whose K/V was "sent", and those that were "cached" here.
    """

    steps: int
    prefix_cache_queries: int
    prefix_cache_hits: Named  # by tier
    readmission_queries: int
    readmission_hits: Named  # by tier
    preemptions: tuple[tuple[str, str, int], ...]
    recomputed_tokens: int
    blocks_evicted: int  # cached on the device, and given up for others
    blocks_stored: int  # below the device
    blocks_loaded: int
    failed_stores: int
    failed_loads: int
    swap_bytes_out: int
    swap_bytes_in: int
    requests_refused: Named
    requests_finished: Named
    requests_released: int
    moved_tokens: Named
    tenants: tuple[TenantCounters, ...]

    @property
    def requests_added(self) -> int:
        """Requests that were taken in."""
        return sum(tenant.requests for tenant in self.tenants)

    @property
    def prompt_tokens(self) -> int:
        return sum(tenant.prompt_tokens for tenant in self.tenants)

    @property
    def generation_tokens(self) -> int:
        return sum(tenant.generation_tokens for tenant in self.tenants)
