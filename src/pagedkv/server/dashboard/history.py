"""Figures of the last minutes, by the second, from what goes into the core and comes out of it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pagedkv.engine.facts import Facts
from pagedkv.engine.wire import Batch
from pagedkv.scheduling.messages import Add, Delta, StepStats
from pagedkv.scheduling.policies.fair import OUTPUT_WEIGHT, PROMPT_WEIGHT
from pagedkv.scheduling.tenants import TenantTable

KEPT = 600  # seconds
RECENT = 60  # seconds that "recent" figures are of
SPEED = 5  # whole seconds over which tokens a second are averaged
MOST_TIMES = 4096  # of each kind in a second: further ones are not looked at


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
    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
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
    request's first token comes, and 2 an output token.
    clock: seconds, that of the requests' arrivals.
    """

    def __init__(self, facts: Facts, clock: Callable[[], float]) -> None:
        self._facts, self._clock, self._start = facts, clock, clock()
        self._tenants = TenantTable(facts.config.tenants, facts.config.default_tenant)
        start = _Second(0, _Gauges(free=facts.num_blocks))
        self._seconds: deque[_Second] = deque([start], maxlen=KEPT)
        self._live: dict[str, _Live] = {}
        self._prompt_tokens: Counter[str | None] = Counter()
        self._output_tokens: Counter[str | None] = Counter()
        self._queried = self._cached = 0

    def sent(self, message: object) -> None:
        """A message goes to the core."""
        if isinstance(message, Add):
            self._live[message.request_id] = _Live(message)

    def took(self, batch: Batch) -> None:
        """The core has brought something."""
        second, now = self._now(), self._clock()
        for delta in batch.deltas:
            live = self._live.get(delta.request_id)
            if live is not None:
                self._take(second, live, delta, now)
        if batch.stats is not None:
            second.tokens += batch.stats.num_tokens
            second.preemptions += batch.stats.num_preempted
            second.gauges = self._gauges(batch.stats)

    def correct(self, picture: dict[str, Any]) -> None:
        """What is there now: ends that no step followed have changed it."""
        numbers, gauges = picture["pool"]["numbers"], self._now().gauges
        held = numbers["held"] + numbers["shared"]
        share = gauges.filled / (gauges.filled + gauges.empty) if gauges.filled else 1.0
        self._now().gauges = _Gauges(
            held * share,
            held * (1 - share),
            numbers["draining"],
            numbers["cached"],
            numbers["free"],
            sum(tenant["running"] for tenant in picture["tenants"]),
            picture["waiting"]["count"],
        )

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
            for percent in (50, 99):
                found[f"{name}_p{percent}"] = [
                    quantile(getattr(second, name), percent / 100) for second in seconds
                ]
        return {"now": self._clock() - self._start, "last": last - 1, "columns": found}

    def recent(self) -> dict[str, Any]:
        """Figures of the last minute, and what is empty now."""
        now = self._now()
        seconds = [second for second in self._seconds if second.second > now.second - RECENT]
        whole = [s for s in seconds if now.second - SPEED <= s.second < now.second]
        ttft = [time for second in seconds for time in second.ttft]
        itl = [time for second in seconds for time in second.itl]
        held = now.gauges.filled + now.gauges.empty
        return {
            "tokens_per_second": sum(s.tokens for s in whole) / len(whole) if whole else now.tokens,
            "ttft_p50": quantile(ttft, 0.5),
            "ttft_p99": quantile(ttft, 0.99),
            "itl_p50": quantile(itl, 0.5),
            "itl_p99": quantile(itl, 0.99),
            "preemptions": sum(second.preemptions for second in seconds),
            "waste": now.gauges.empty / held if held else 0.0,
        }

    def hits(self) -> dict[str, int]:
        """Prompt tokens of requests that have started, and how many of them were found cached."""
        return {"queried": self._queried, "cached": self._cached}

    def tenants(self, picture: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """What each tenant runs (`tenants` of a picture) and was given, the busiest first."""
        now = self._now().second
        recent: Counter[str | None] = Counter()
        for second in self._seconds:
            if second.second > now - RECENT:
                recent += second.service
        seen = {entry["tenant"]: entry for entry in picture}
        names = dict.fromkeys([*seen, *self._prompt_tokens])
        found = [
            {
                "running": 0,
                "waiting": 0,
                "blocks": 0,
                **seen.get(name, {}),
                "tenant": name,
                "weight": self._tenants[name].weight,
                "prompt_tokens": self._prompt_tokens[name],
                "output_tokens": self._output_tokens[name],
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
        add, tenant = live.add, live.add.tenant
        if delta.token_ids:
            drawn = len(delta.token_ids)
            if not live.last:
                self._note_start(second, add, delta)
                if add.beam is None and len(second.ttft) < MOST_TIMES:
                    second.ttft.append(now - add.arrival)
            elif delta.sample in live.last and len(second.itl) < MOST_TIMES:
                second.itl.append((now - live.last[delta.sample]) / drawn)
            live.last[delta.sample] = now
            second.output_tokens += drawn
            second.service[tenant] += int(OUTPUT_WEIGHT) * drawn
            self._output_tokens[tenant] += drawn
        live.ended += delta.finish_reason is not None
        # What could not be read at all has one end, whatever number of samples was wanted.
        if live.ended == add.params.n or delta.finish_reason == "error":
            del self._live[delta.request_id]

    def _note_start(self, second: _Second, add: Add, delta: Delta) -> None:
        prompt = len(add.prompt)
        second.service[add.tenant] += int(PROMPT_WEIGHT) * prompt
        self._prompt_tokens[add.tenant] += prompt
        self._queried += prompt
        self._cached += delta.num_cached_tokens

    def _gauges(self, stats: StepStats) -> _Gauges:
        slots = stats.blocks_peak * self._facts.block_size
        share = stats.slots_filled / slots if slots else 1.0  # while the step ran
        free, cached, held = stats.blocks_free, stats.blocks_cached, stats.blocks_held
        return _Gauges(
            held * share,
            held * (1 - share),
            self._facts.num_blocks - free - cached - held,
            cached,
            free,
            stats.num_running,
            stats.num_waiting,
        )


def quantile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least `share` of all do not exceed; None of none."""
    if not values:
        return None
    return sorted(values)[max(0, -int(-len(values) * share // 1) - 1)]
