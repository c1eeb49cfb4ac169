"""What an engine is doing, as plain values: for metrics, overload answers and displays."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from pagedkv.engine.core import EngineCore
from pagedkv.scheduling.backlog import expected_backlog
from pagedkv.scheduling.counters import EngineCounters
from pagedkv.transfer.routing import RouterStats


@dataclass(frozen=True, slots=True)
class TenantLoad:
    """Requests of one tenant now, and the prompt tokens of those that wait."""

    tenant: str | None
    running: int
    waiting: int
    waiting_tokens: int


# "turning": its role has changed, and it gives away what it had; "draining": so the operator wants.
WORKER_STATES = ("ready", "turning", "draining", "loading", "gone")


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A worker of a cluster. state: one of `WORKER_STATES`.

    restarts: of its process, since the start. flips: of its role. requests: those that are its own
    now, whether they run, wait, or are on their way to it; running, waiting, blocks: as of its last
    step. stuck: why requests that should move away from it cannot at the moment; None: nothing
    keeps them.
    """

    name: str
    role: str
    state: str
    restarts: int
    flips: int
    requests: int
    running: int
    waiting: int
    blocks: int
    blocks_held: int
    stuck: str | None = None


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """Workers behind one front end, and what has become of requests since the start.

    moves_done, moves_failed: to another worker. moves_ended: the request ended before its move
    did. resumed: whose worker had died. missing: what has to come back before a new request can
    start; None: nothing. unplaced: requests that no worker has now, for none has room, or none is
    there. router: its counts since the start.
    """

    workers: tuple[WorkerLoad, ...]
    moves_done: int = 0
    moves_failed: int = 0
    moves_ended: int = 0
    resumed: int = 0
    missing: str | None = None
    unplaced: int = 0
    router: RouterStats = field(default_factory=RouterStats)


@dataclass(frozen=True, slots=True)
class CoreStatus:
    """An engine between two steps.

    blocks_free + blocks_cached + blocks_held + blocks_draining == num_blocks. Requests that were
    preempted wait. tenants: those that have any requests. cluster: where this adds up several.
    """

    num_blocks: int
    block_size: int
    blocks_free: int
    blocks_cached: int
    blocks_held: int
    blocks_draining: int
    blocks_shared: int  # of those held: by more than one holder
    unfilled_slots: int  # of blocks held, behind the last token of their sequences
    num_running: int
    num_waiting: int
    num_swapped_out: int  # of those that wait: their K/V are below the device
    running_samples: int  # seats taken
    waiting_samples: int  # what `max_num_waiting` bounds
    waiting_tokens: int  # of prompts; what `max_waiting_tokens` bounds
    draining: bool
    backlog_seconds: float  # see `scheduling.backlog`
    tenants: tuple[TenantLoad, ...]
    counters: EngineCounters
    cluster: ClusterStatus | None = None

    @property
    def kv_cache_usage(self) -> float:
        """Share of the blocks that are in use, 0..1: cached ones can be had and are not."""
        return (self.blocks_held + self.blocks_draining) / self.num_blocks


def core_status(core: EngineCore) -> CoreStatus:
    """The status now; between two steps, from the thread that steps.

    O(tenants + running), and some passes over arrays of the size of the pool.
    """
    scheduler = core.scheduler
    roster, manager, config = scheduler.roster, scheduler.manager, scheduler.config
    waiting = roster.waiting
    running = Counter(request.tenant for request in roster.running)
    names = [*running, *(tenant for tenant in waiting.tenants if tenant not in running)]
    lines = [(tenant, waiting.line(tenant)) for tenant in names]
    return CoreStatus(
        num_blocks=manager.num_blocks,
        block_size=manager.block_size,
        blocks_free=manager.num_free_blocks,
        blocks_cached=manager.num_cached_blocks,
        blocks_held=manager.num_held_blocks,
        blocks_draining=manager.num_draining_blocks,
        blocks_shared=manager.num_shared_blocks,
        unfilled_slots=manager.num_unfilled_slots,
        num_running=len(roster.running),
        num_waiting=len(waiting),
        num_swapped_out=len(roster.swapped_out),
        running_samples=roster.num_samples,
        waiting_samples=waiting.num_samples,
        waiting_tokens=waiting.num_tokens,
        draining=scheduler.draining,
        backlog_seconds=expected_backlog(roster, config, scheduler.cost),
        tenants=tuple(
            TenantLoad(tenant, running[tenant], len(line), line.num_tokens)
            for tenant, line in lines
        ),
        counters=scheduler.counters,
    )
