"""Counting what happens, for operators; no decision looks at it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from pagedkv.scheduling.counters import EngineCounters, Named, TenantCounters
from pagedkv.scheduling.messages import ERROR_TYPES, FINISH_REASONS
from pagedkv.scheduling.recovery import PARTIAL_DROP, RECOMPUTE, SWAP
from pagedkv.scheduling.request import Request

DEVICE = "device"
# Why a request is preempted. "growth": those who run need its blocks for their next tokens.
# "blocks", "seats": the policy lets it yield them to one that waits.
PREEMPTION_REASONS = ("growth", "blocks", "seats")
# So many tenants have counters of their own; all that come later share those of OTHER_TENANTS.
MAX_TENANTS = 256
OTHER_TENANTS = "other"
_WORST_FIRST = ("error", "deadline", "abort", "length", "stop")


class Tally:
    """What a scheduler has done since it was made. tiers: names of those below the device."""

    def __init__(self, tiers: tuple[str, ...] = ()) -> None:
        self.recomputed_tokens = 0
        self._tiers = (DEVICE, *tiers)
        self._queries = [0, 0]  # tokens; first admissions, later ones
        self._hits: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
        self._preemptions: Counter[tuple[str, str]] = Counter()
        self._refused: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        self._released = 0
        self._moved: Counter[str] = Counter()
        self._tenants: dict[str | None, TenantCounters] = {}

    def account(self, tenant: str | None) -> TenantCounters:
        """The counters in which what is done for a tenant is entered."""
        found = self._tenants.get(tenant)
        if found is None:
            name = tenant if len(self._tenants) < MAX_TENANTS else OTHER_TENANTS
            found = self._tenants.setdefault(name, TenantCounters(name))
        return found

    def refused(self, error_type: str) -> None:
        self._refused[error_type] += 1

    def looked_up(self, tokens: int, cached: int, again: bool) -> None:
        """A request starts (`again`: after a preemption): of `tokens`, `cached` are there."""
        self._queries[again] += tokens
        self._hits[again][DEVICE] += cached

    def loaded(self, tokens: int, lower: int, again: bool) -> None:
        """Tokens that a load has brought; `lower` of them from below the uppermost tier."""
        self._hits[again][self._tiers[1]] += tokens - lower
        self._hits[again][self._tiers[-1]] += lower

    def preempted(self, kind: str, reason: str) -> None:
        self._preemptions[kind, reason] += 1

    def first_token(self, request: Request) -> None:
        """A request has drawn its first token."""
        account, drawn = request.account, request.first_token_end
        account.prompt_tokens += request.prompt_length
        if request.ttft_slo is not None and drawn is not None:
            account.ttft = account.ttft.judged(drawn - request.arrival <= request.ttft_slo)

    def released(self, request: Request) -> None:
        """A request has gone elsewhere before its end."""
        self._released += 1
        if not request.started:
            request.account.prompt_tokens += request.num_prefilled

    def moved(self, sent: int = 0, cached: int = 0) -> None:
        """Tokens of a request that is moved here: their K/V has been sent, or is here already."""
        self._moved.update(sent=sent, cached=cached)

    def left(self, request: Request) -> None:
        """A request has ended."""
        reasons = {output.finish_reason for output in request.outputs}
        reason = next(reason for reason in _WORST_FIRST if reason in reasons)
        self._finished[reason] += 1
        account, first, last = request.account, request.first_token_end, request.last_token_end
        if first is None:
            account.prompt_tokens += request.num_prefilled
        if reason == "abort":
            return
        if request.ttft_slo is not None and first is None:
            account.ttft = account.ttft.judged(False)
        steps = max(len(output.tokens) for output in request.outputs) - 1
        if request.tpot_slo is not None and first is not None and steps > 0:
            account.tpot = account.tpot.judged(last - first <= request.tpot_slo * steps)
        if request.deadline is not None:
            in_time = reason in ("stop", "length") and last <= request.deadline
            account.deadlines = account.deadlines.judged(in_time)

    def counters(
        self,
        *,
        steps: int,
        blocks_evicted: int,
        blocks_stored: int,
        blocks_loaded: int,
        failed_stores: int,
        failed_loads: int,
        block_bytes: int,
    ) -> EngineCounters:
        """A copy of all that was counted, with what the pool and the tiers count themselves."""
        first, again = self._hits
        return EngineCounters(
            steps=steps,
            prefix_cache_queries=self._queries[0],
            prefix_cache_hits=_named(self._tiers, first),
            readmission_queries=self._queries[1],
            readmission_hits=_named(self._tiers, again),
            preemptions=tuple(
                (kind, reason, self._preemptions[kind, reason])
                for kind in (RECOMPUTE, PARTIAL_DROP, SWAP)
                for reason in PREEMPTION_REASONS
            ),
            recomputed_tokens=self.recomputed_tokens,
            blocks_evicted=blocks_evicted,
            blocks_stored=blocks_stored,
            blocks_loaded=blocks_loaded,
            failed_stores=failed_stores,
            failed_loads=failed_loads,
            swap_bytes_out=blocks_stored * block_bytes,
            swap_bytes_in=blocks_loaded * block_bytes,
            requests_refused=_named(ERROR_TYPES, self._refused),
            requests_finished=_named(FINISH_REASONS, self._finished),
            requests_released=self._released,
            moved_tokens=_named(("sent", "cached"), self._moved),
            tenants=tuple(replace(tenant) for tenant in self._tenants.values()),
        )


def _named(names: tuple[str, ...], counts: Counter[str]) -> Named:
    return tuple((name, counts[name]) for name in names)
