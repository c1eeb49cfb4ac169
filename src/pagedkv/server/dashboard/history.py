"""Figures of the last minutes, by the second, from what goes into the core and comes out of it."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pagedkv.engine.facts import Facts
from pagedkv.engine.status import CoreStatus
from pagedkv.engine.wire import Batch
from pagedkv.scheduling.counters import EngineCounters, TenantCounters
from pagedkv.scheduling.messages import Add, Delta
from pagedkv.scheduling.policies.fair import OUTPUT_WEIGHT, PROMPT_WEIGHT
from pagedkv.scheduling.tenants import TenantTable

KEPT = 600  # seconds
RECENT = 60  # seconds that "recent" figures are of
SPEED = 5  # whole seconds over which tokens a second are averaged
MOST_TIMES = 1024  # of each kind in a second: further ones are not looked at


@dataclass(slots=True)
class _Gauges:
    """Blocks by what is in them, as if tokens lay together; requests."""

    filled: float = 0.0
    empty: float = 0.0  # in held blocks
    draining: float = 0.0
    cached: float = 0.0
    free: float = 0.0
    running: int = 0
    waiting: int = 0


_GAUGES = tuple(_Gauges.__slots__)


@dataclass(slots=True)
class _Second:
    second: int
    gauges: _Gauges
    tokens: int = 0  # computed
    output_tokens: int = 0
    preemptions: int = 0
    ttft: array[float] = field(default_factory=lambda: array("d"))
    itl: array[float] = field(default_factory=lambda: array("d"))
    service: Counter[str | None] = field(default_factory=Counter)


@dataclass(slots=True)
class _Live:
    """A request whose end has not come."""

    add: Add
    last: dict[int, float] = field(default_factory=dict)  # by sample: when its last tokens came
    ended: int = 0  # samples


class History:
    """What happens to requests, kept for KEPT seconds and no longer. In one thread.

    Service is counted as by the fair policies, whatever the policy is: 1 a prompt token, when the
    request's first token is drawn, and 2 an output token.
    clock: seconds, that of the requests' arrivals.
    """

    def __init__(self, facts: Facts, clock: Callable[[], float]) -> None:
        self._facts, self._clock, self._start = facts, clock, clock()
        self._tenants = TenantTable(facts.config.tenants, facts.config.default_tenant)
        start = _Second(0, _Gauges(free=facts.num_blocks))
        self._seconds: deque[_Second] = deque([start], maxlen=KEPT)
        self._live: dict[str, _Live] = {}
        self._counters: EngineCounters | None = None
        self._served: Counter[str | None] = Counter()  # by tenant, as of `_counters`

    def sent(self, message: object) -> None:
        """A message goes to the core."""
        if isinstance(message, Add):
            self._live[message.request_id] = _Live(message)

    def take(self, batch: Batch) -> None:
        """The core has brought something."""
        second, now = self._now(), self._clock()
        for delta in batch.deltas:
            live = self._live.get(delta.request_id)
            if live is not None:
                self._take(second, live, delta, now)
        if batch.stats is not None:
            second.tokens += batch.stats.num_tokens
            second.preemptions += batch.stats.num_preempted
        if batch.status is not None:
            second.gauges = _gauges(batch.status)
            self._take_counters(second, batch.status.counters)

    def columns(self, since: int) -> dict[str, Any]:
        """Figures of the seconds after `since`, ascending, by name: lists as long as `second`.

        None where a second has no such figure, or not yet. last: of those that change no more.
        """
        self._now()
        seconds = [second for second in self._seconds if second.second > since]
        found: dict[str, list[Any]] = {"second": [second.second for second in seconds]}
        for name in _GAUGES:
            found[name] = [round(getattr(second.gauges, name), 3) for second in seconds]
        last = self._seconds[-1].second
        for name in ("tokens", "output_tokens", "preemptions"):
            found[name] = [
                getattr(second, name) if second.second < last else None for second in seconds
            ]
        for name in ("ttft", "itl"):
            pairs = [quantiles([getattr(second, name)]) for second in seconds]
            found[f"{name}_p50"] = [median for median, _ in pairs]
            found[f"{name}_p99"] = [p99 for _, p99 in pairs]
        return {"now": self._clock() - self._start, "last": last - 1, "columns": found}

    def recent(self) -> dict[str, Any]:
        """Figures of the last minute, and what is empty now."""
        now = self._now()
        seconds = [second for second in self._seconds if second.second > now.second - RECENT]
        whole = [s for s in seconds if now.second - SPEED <= s.second < now.second]
        ttft = quantiles([second.ttft for second in seconds])
        itl = quantiles([second.itl for second in seconds])
        held = now.gauges.filled + now.gauges.empty
        return {
            "tokens_per_second": sum(s.tokens for s in whole) / len(whole) if whole else now.tokens,
            "ttft_p50": ttft[0],
            "ttft_p99": ttft[1],
            "itl_p50": itl[0],
            "itl_p99": itl[1],
            "preemptions": sum(second.preemptions for second in seconds),
            "waste": now.gauges.empty / held if held else 0.0,
        }

    def hits(self) -> dict[str, Any]:
        """Tokens looked up when requests first started, and how many were found in each tier."""
        counters = self._counters
        if counters is None:
            return {"queried": 0, "found": {}}
        return {"queried": counters.prefix_cache_queries, "found": dict(counters.prefix_cache_hits)}

    def tenants(self, picture: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """What each tenant runs (`tenants` of a picture) and was given, the busiest first."""
        now = self._now().second
        recent: Counter[str | None] = Counter()
        for second in self._seconds:
            if second.second > now - RECENT:
                recent += second.service
        seen = {entry["tenant"]: entry for entry in picture}
        counters = () if self._counters is None else self._counters.tenants
        counted = {tenant.tenant: tenant for tenant in counters}
        names = dict.fromkeys([*seen, *counted])
        nothing = TenantCounters(None)
        found = [
            {
                "running": 0,
                "waiting": 0,
                "blocks": 0,
                **seen.get(name, {}),
                "tenant": name,
                "weight": self._tenants[name].weight,
                "prompt_tokens": counted.get(name, nothing).prompt_tokens,
                "output_tokens": counted.get(name, nothing).generation_tokens,
                "recent": recent[name],
            }
            for name in names
        ]
        return sorted(found, key=lambda e: (-e["recent"], -e["running"], e["tenant"] or ""))

    def _now(self) -> _Second:
        """The present second; those since the last one are as that was left."""
        second = int(self._clock() - self._start)
        for missing in range(max(self._seconds[-1].second + 1, second - KEPT + 1), second + 1):
            self._seconds.append(_Second(missing, self._seconds[-1].gauges))
        return self._seconds[-1]

    def _take(self, second: _Second, live: _Live, delta: Delta, now: float) -> None:
        add = live.add
        if delta.token_ids:
            drawn = len(delta.token_ids)
            if not live.last:
                if add.beam is None and len(second.ttft) < MOST_TIMES:
                    second.ttft.append(now - add.arrival)
            elif delta.sample in live.last and len(second.itl) < MOST_TIMES:
                second.itl.append((now - live.last[delta.sample]) / drawn)
            live.last[delta.sample] = now
            second.output_tokens += drawn
        live.ended += delta.finish_reason is not None
        if live.ended == add.params.n or delta.usage is not None:
            del self._live[delta.request_id]

    def _take_counters(self, second: _Second, counters: EngineCounters) -> None:
        """What tenants were given since the last time."""
        self._counters = counters
        for tenant in counters.tenants:
            served = int(PROMPT_WEIGHT) * tenant.prompt_tokens
            served += int(OUTPUT_WEIGHT) * tenant.generation_tokens
            second.service[tenant.tenant] += served - self._served[tenant.tenant]
            self._served[tenant.tenant] = served


def _gauges(status: CoreStatus) -> _Gauges:
    empty = status.unfilled_slots / status.block_size
    return _Gauges(
        status.blocks_held - empty,
        empty,
        status.blocks_draining,
        status.blocks_cached,
        status.blocks_free,
        status.num_running,
        status.num_waiting,
    )


def quantiles(parts: Sequence[array[float]]) -> tuple[float | None, float | None]:
    """Median and P99 of all: values that were there. None of none."""
    values = np.concatenate([np.frombuffer(part, np.float64) for part in parts])
    if not len(values):
        return None, None
    median, p99 = np.quantile(values, (0.5, 0.99), method="inverted_cdf").tolist()
    return median, p99
