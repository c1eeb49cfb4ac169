"""Many workers' figures as those of one engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

from pagedkv.engine.facts import Facts
from pagedkv.engine.status import ClusterStatus, CoreStatus, TenantLoad
from pagedkv.errors import ConfigError
from pagedkv.scheduling.counters import Attainment, EngineCounters, TenantCounters

# Facts in which workers may differ, or that are looked at one by one.
_OWN = frozenset({"num_blocks", "sequence_blocks", "report", "folder", "config"})


def total_facts(workers: dict[str, Facts]) -> Facts:
    """What a front end has to know of all. ConfigError: they do not serve the same.

    A request must fit any of them; as many may wait as in all together.
    """
    first, *others = workers
    for name in others:
        check_alike(name, workers[name], first, workers[first])
    facts = list(workers.values())
    config, count = facts[0].config, len(facts)
    waiting, tokens = config.max_num_waiting, config.max_waiting_tokens
    config = replace(
        config,
        max_num_waiting=None if waiting is None else waiting * count,
        max_waiting_tokens=None if tokens is None else tokens * count,
    )
    return Facts(
        config,
        min(one.num_blocks for one in facts),
        facts[0].block_size,
        min(one.sequence_blocks for one in facts),
        facts[0].folder,
        tuple(f"{name}: {line}" for name, one in workers.items() for line in one.report),
    )


def check_alike(name: str, facts: Facts, other: str, its: Facts) -> None:
    """ConfigError: worker `name` does not serve what worker `other` does, or did."""
    for ours, theirs in ((facts, its), (facts.config, its.config)):
        for field in fields(ours):
            have, want = getattr(ours, field.name), getattr(theirs, field.name)
            if field.name not in _OWN and have != want:
                raise ConfigError(
                    f"worker {name!r} differs from worker {other!r}: {field.name} is {have!r:.80}, "
                    f"not {want!r:.80}: give all the same model and settings"
                )


def total_status(
    present: Sequence[CoreStatus],
    past: Iterable[EngineCounters],
    draining: bool,
    cluster: ClusterStatus,
) -> CoreStatus:
    """Of at least one worker. past: counters of those that are gone: no counter ever falls."""

    def total(name: str) -> int:
        return sum(getattr(status, name) for status in present)

    loads: dict[str | None, Counter[str]] = {}
    for status in present:
        for load in status.tenants:
            counted = loads.setdefault(load.tenant, Counter())
            counted.update(running=load.running, waiting=load.waiting, tokens=load.waiting_tokens)
    return CoreStatus(
        num_blocks=total("num_blocks"),
        block_size=present[0].block_size,
        blocks_free=total("blocks_free"),
        blocks_cached=total("blocks_cached"),
        blocks_held=total("blocks_held"),
        blocks_draining=total("blocks_draining"),
        blocks_shared=total("blocks_shared"),
        unfilled_slots=total("unfilled_slots"),
        num_running=total("num_running"),
        num_waiting=total("num_waiting"),
        num_swapped_out=total("num_swapped_out"),
        running_samples=total("running_samples"),
        waiting_samples=total("waiting_samples"),
        waiting_tokens=total("waiting_tokens"),
        draining=draining,
        backlog_seconds=min(status.backlog_seconds for status in present),
        tenants=tuple(
            TenantLoad(tenant, counted["running"], counted["waiting"], counted["tokens"])
            for tenant, counted in loads.items()
        ),
        counters=total_counters([*past, *(status.counters for status in present)]),
        cluster=cluster,
    )


def total_counters(parts: Sequence[EngineCounters]) -> EngineCounters:
    """Of at least one engine, added up."""
    sums: dict[str, Any] = {}
    for field in fields(EngineCounters):
        values = [getattr(part, field.name) for part in parts]
        if field.name == "tenants":
            sums[field.name] = _total_tenants(values)
        elif isinstance(values[0], int):
            sums[field.name] = sum(values)
        else:
            sums[field.name] = _total_named(values)
    return EngineCounters(**sums)


def _total_named(parts: Iterable[tuple[tuple[str | int, ...], ...]]) -> tuple[object, ...]:
    """Entries (name ..., number) added up by their names, in the order in which they first come."""
    sums: dict[tuple[str | int, ...], int] = {}
    for part in parts:
        for *names, number in part:
            sums[tuple(names)] = sums.get(tuple(names), 0) + int(number)
    return tuple((*names, number) for names, number in sums.items())


def _total_tenants(parts: Iterable[Sequence[TenantCounters]]) -> tuple[TenantCounters, ...]:
    sums: dict[str | None, TenantCounters] = {}
    for part in parts:
        for one in part:
            have = sums.get(one.tenant)
            sums[one.tenant] = replace(one) if have is None else _both(have, one)
    return tuple(sums.values())


def _both(one: TenantCounters, other: TenantCounters) -> TenantCounters:
    def seen(a: Attainment, b: Attainment) -> Attainment:
        return Attainment(a.met + b.met, a.missed + b.missed)

    return TenantCounters(
        one.tenant,
        one.requests + other.requests,
        one.prompt_tokens + other.prompt_tokens,
        one.generation_tokens + other.generation_tokens,
        seen(one.ttft, other.ttft),
        seen(one.tpot, other.tpot),
        seen(one.deadlines, other.deadlines),
    )
