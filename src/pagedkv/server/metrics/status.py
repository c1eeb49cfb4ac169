"""The engine's own numbers as Prometheus families, made of the newest status at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pagedkv.engine.status import WORKER_STATES, ClusterStatus, CoreStatus
from pagedkv.scheduling.counters import EngineCounters, TenantCounters
from pagedkv.scheduling.policies.fair import OUTPUT_WEIGHT, PROMPT_WEIGHT
from pagedkv.scheduling.tally import OTHER_TENANTS
from pagedkv.transfer.routing import RouterStats

# Requests without a tenant; no key has this name.
NO_TENANT = "none"
# Values of the labels, and the number.
_Number = tuple[tuple[str, ...], float]


class StatusCollector(Collector):
    """Families of the status that `newest` gives, the core's last; none before there is one.

    max_tenants: tenants with series of their own: the first that came. All others share one, so
    that there is a bound to the series and no counter ever falls.
    """

    def __init__(self, newest: Callable[[], CoreStatus | None], max_tenants: int) -> None:
        self._newest, self._max_tenants = newest, max_tenants

    def collect(self) -> Iterator[Metric]:
        status = self._newest()
        if status is None:
            return
        yield from _gauges(status)
        yield from _counters(status.counters)
        named = {t.tenant for t in status.counters.tenants[: self._max_tenants]}
        yield from _tenants(status, named)
        if status.cluster is not None:
            yield from _workers(status.cluster)


def _workers(cluster: ClusterStatus) -> Iterator[Metric]:
    workers = cluster.workers
    yield _gauge(
        "worker_state",
        "1 for the state that the worker is in, 0 for the others.",
        ("worker", "role", "state"),
        [((w.name, w.role, state), w.state == state) for w in workers for state in WORKER_STATES],
    )
    for name, text, numbers in (
        ("worker_requests", "Requests that are the worker's.", [w.requests for w in workers]),
        ("worker_requests_running", "Requests that run there.", [w.running for w in workers]),
        ("worker_requests_waiting", "Requests that wait there.", [w.waiting for w in workers]),
        ("worker_kv_blocks", "Blocks of its pool.", [w.blocks for w in workers]),
        ("worker_kv_blocks_held", "Blocks that are held there.", [w.blocks_held for w in workers]),
    ):
        labelled = [((w.name,), number) for w, number in zip(workers, numbers, strict=True)]
        yield _gauge(name, text, ("worker",), labelled)
    yield _gauge(
        "requests_unplaced",
        "Requests that no worker has, for none has room, or none is there.",
        (),
        [((), cluster.unplaced)],
    )
    yield _counter(
        "worker_restarts",
        "Starts of the worker's process after the first.",
        ("worker",),
        [((w.name,), w.restarts) for w in workers],
    )
    yield _counter(
        "worker_role_flips",
        "Changes of the worker's role, because a side starved.",
        ("worker",),
        [((w.name,), w.flips) for w in workers],
    )
    yield _counter(
        "requests_moved",
        "Moves of requests to another worker, by outcome; ended: the request ended before.",
        ("outcome",),
        [
            (("done",), cluster.moves_done),
            (("failed",), cluster.moves_failed),
            (("ended",), cluster.moves_ended),
        ],
    )
    yield _counter(
        "requests_resumed",
        "Requests that went on at another worker when theirs had died.",
        (),
        [((), cluster.resumed)],
    )
    yield from _router(cluster.router)


def _router(router: RouterStats) -> Iterator[Metric]:
    outcomes = [(("assigned",), router.assigned), (("shed",), router.shed)]
    text = "Decisions of the router about requests, by outcome."
    yield _counter("router_decisions", text, ("outcome",), outcomes)
    for name, text, number in (
        (
            "router_prompt_tokens",
            "Tokens of the prompts that it has assigned.",
            router.prompt_tokens,
        ),
        (
            "router_cached_tokens",
            "Those of them that the worker had cached, by what was known.",
            router.cached_tokens,
        ),
        ("router_event_gaps", "Times that events of a worker's cache were missing.", router.gaps),
        (
            "router_blocks_dropped",
            "Blocks of workers that are not remembered, for they are too many.",
            router.dropped,
        ),
    ):
        yield _counter(name, text, (), [((), number)])
    text = "Different blocks that it knows workers to have."
    yield _gauge("router_blocks_known", text, (), [((), router.names)])


def _tenants(status: CoreStatus, named: set[str | None]) -> Iterator[Metric]:
    def of(tenant: str | None) -> str:
        if tenant not in named:
            return OTHER_TENANTS
        return NO_TENANT if tenant is None else tenant

    accounts = status.counters.tenants
    absent: list[_Number] = [((of(t.tenant),), 0) for t in accounts]
    for name, text, loads in (
        (
            "tenant_requests_running",
            "Requests of the tenant that run.",
            [(t.tenant, t.running) for t in status.tenants],
        ),
        (
            "tenant_requests_waiting",
            "Requests of the tenant that wait.",
            [(t.tenant, t.waiting) for t in status.tenants],
        ),
    ):
        numbers = [*absent, *(((of(tenant),), number) for tenant, number in loads)]
        yield _gauge(name, text, ("tenant",), _total(numbers))
    for name, text, totals in (
        (
            "tenant_requests",
            "Requests of the tenant that were taken in.",
            [(t.tenant, t.requests) for t in accounts],
        ),
        (
            "tenant_prompt_tokens",
            "Prompt tokens of the tenant, computed or found in the cache.",
            [(t.tenant, t.prompt_tokens) for t in accounts],
        ),
        (
            "tenant_generation_tokens",
            "Tokens drawn for the tenant.",
            [(t.tenant, t.generation_tokens) for t in accounts],
        ),
        (
            "tenant_service",
            "Weighted tokens: 1 a prompt token, 2 one that is drawn.",
            [(t.tenant, _service(t)) for t in accounts],
        ),
    ):
        yield _counter(name, text, ("tenant",), _total([((of(t),), n) for t, n in totals]))
    yield _counter(
        "slo_requests",
        "Requests that wanted a TTFT, a TPOT or a deadline, by whether they got it.",
        ("tenant", "slo", "outcome"),
        _total(
            [
                ((of(t.tenant), slo, outcome), number)
                for t in accounts
                for slo, seen in (("ttft", t.ttft), ("tpot", t.tpot), ("deadline", t.deadlines))
                for outcome, number in zip(seen._fields, seen, strict=True)
            ]
        ),
    )


def _total(numbers: Iterable[_Number]) -> Iterable[_Number]:
    """Those of equal labels added up."""
    sums: dict[tuple[str, ...], float] = {}
    for labels, number in numbers:
        sums[labels] = sums.get(labels, 0) + number
    return sums.items()


def _service(tenant: TenantCounters) -> float:
    return PROMPT_WEIGHT * tenant.prompt_tokens + OUTPUT_WEIGHT * tenant.generation_tokens


def _gauges(status: CoreStatus) -> Iterator[Metric]:
    for name, text, number in (
        ("num_requests_running", "Requests that run.", status.num_running),
        (
            "num_requests_waiting",
            "Requests that wait, those that were preempted among them.",
            status.num_waiting,
        ),
        (
            "num_requests_swapped",
            "Requests that wait and have K/V below the device.",
            status.num_swapped_out,
        ),
        (
            "num_samples_running",
            "Seats taken: samples of running requests.",
            status.running_samples,
        ),
        ("num_samples_waiting", "Samples of requests that wait.", status.waiting_samples),
        ("num_tokens_waiting", "Prompt tokens of requests that wait.", status.waiting_tokens),
        (
            "backlog_seconds",
            "Time until a request that came now would get its first token, as estimated.",
            status.backlog_seconds,
        ),
        ("draining", "1 while nothing more is taken in, else 0.", status.draining),
        (
            "kv_cache_usage",
            "Share of the blocks that are held or draining, 0 to 1.",
            status.kv_cache_usage,
        ),
        ("kv_blocks_shared", "Blocks with more than one holder.", status.blocks_shared),
        (
            "kv_unfilled_slots",
            "Token slots of held blocks behind the last token of their sequences: waste.",
            status.unfilled_slots,
        ),
        ("kv_block_size", "Token slots of a block.", status.block_size),
    ):
        yield _gauge(name, text, (), [((), number)])
    states = {
        "free": status.blocks_free,
        "cached": status.blocks_cached,
        "held": status.blocks_held,
        "draining": status.blocks_draining,
    }
    yield _gauge(
        "kv_blocks",
        "Blocks of the pool by state; their sum is the size of the pool.",
        ("state",),
        [((state,), number) for state, number in states.items()],
    )


def _counters(counters: EngineCounters) -> Iterator[Metric]:
    for name, text, number in (
        ("engine_steps", "Steps that were planned.", counters.steps),
        ("prompt_tokens", "Prompt tokens computed or found in the cache.", counters.prompt_tokens),
        ("generation_tokens", "Tokens drawn.", counters.generation_tokens),
        (
            "recomputed_tokens",
            "Tokens computed after a preemption although their K/V had been there.",
            counters.recomputed_tokens,
        ),
        (
            "prefix_cache_queries",
            "Tokens looked up in the prefix cache when requests first start.",
            counters.prefix_cache_queries,
        ),
        (
            "readmission_cache_queries",
            "Tokens looked up when requests come back after a preemption.",
            counters.readmission_queries,
        ),
        ("kv_blocks_evicted", "Cached blocks given up for others.", counters.blocks_evicted),
        ("kv_blocks_stored", "Blocks stored below the device.", counters.blocks_stored),
        ("kv_blocks_loaded", "Blocks loaded from below the device.", counters.blocks_loaded),
        ("kv_store_failures", "Blocks that could not be stored.", counters.failed_stores),
        (
            "kv_load_failures",
            "Blocks found below the device that could not be loaded, and were computed.",
            counters.failed_loads,
        ),
    ):
        yield _counter(name, text, (), [((), number)])
    for name, text, label, numbers in (
        (
            "prefix_cache_hits",
            "Tokens of prefix_cache_queries that need not be computed, by the tier that had them.",
            "tier",
            counters.prefix_cache_hits,
        ),
        (
            "readmission_cache_hits",
            "Tokens of readmission_cache_queries that need not be computed, by tier.",
            "tier",
            counters.readmission_hits,
        ),
        (
            "moved_tokens",
            "Tokens of requests that came from other workers, by where their K/V was: "
            "sent with them, or cached here already; what samples have in common counts once.",
            "source",
            counters.moved_tokens,
        ),
        (
            "swap_bytes",
            "Bytes of K/V moved out of the device and into it.",
            "direction",
            (("out", counters.swap_bytes_out), ("in", counters.swap_bytes_in)),
        ),
        (
            "request_success",
            "Requests that were taken in and have ended, by finish reason.",
            "finished_reason",
            counters.requests_finished,
        ),
        (
            "requests_refused",
            "Requests that the engine did not take in.",
            "reason",
            counters.requests_refused,
        ),
    ):
        yield _counter(name, text, (label,), [((value,), number) for value, number in numbers])
    yield _counter(
        "num_preemptions",
        "Preemptions, by how the request comes back and why it had to go.",
        ("kind", "reason"),
        [((kind, reason), number) for kind, reason, number in counters.preemptions],
    )


def _gauge(name: str, text: str, labels: tuple[str, ...], numbers: Iterable[_Number]) -> Metric:
    family = GaugeMetricFamily(f"pagedkv:{name}", text, labels=labels)
    for values, number in numbers:
        family.add_metric(values, float(number))
    return family


def _counter(name: str, text: str, labels: tuple[str, ...], numbers: Iterable[_Number]) -> Metric:
    family = CounterMetricFamily(f"pagedkv:{name}", text, labels=labels)
    for values, number in numbers:
        family.add_metric(values, float(number))
    return family
