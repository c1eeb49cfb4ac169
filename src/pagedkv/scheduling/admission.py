"""What a waiting request would take, whether it fits, and what is left to those who run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pagedkv.cache import BlockManager
from pagedkv.scheduling.batch import Row
from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.forecast import Forecast
from pagedkv.scheduling.lengths import OutputLengths
from pagedkv.scheduling.peak import peak_blocks
from pagedkv.scheduling.reopening import Reopening, reopening
from pagedkv.scheduling.request import Request
from pagedkv.scheduling.siblings import Leaders, may_wait


class Demand(NamedTuple):
    """What a waiting request takes if it is let in.

    waits: whether it waits for what this step computes. cached: tokens that it need not compute
    then. shared: full blocks at its beginning that are in use. blocks: all others that its known
    tokens take. reopening: how its samples start, if each is found by its own tokens.
    """

    request: Request
    waits: bool
    cached: int
    shared: int
    blocks: int
    reopening: Reopening | None = None


def admission_demand(
    manager: BlockManager, request: Request, leaders: Leaders, spare: float
) -> Demand:
    """What the cache has for the request now, or after this step if it can spare the time."""
    common = request.common_tokens()
    lookup = request.lookup_tokens(common)
    size = manager.block_size
    found = manager.match(lookup, request.namespace, request.public)
    again = reopening(manager, request, found.cached_tokens)
    if again is not None:
        return Demand(request, False, min(again.cached), 0, again.blocks, again)
    blocks = -(-len(lookup) // size)
    own = -(-len(common) // size) + request.own_blocks(request.live, size) - blocks
    if may_wait(request, spare):
        hit = leaders.hit_after(request, lookup, found.cached_tokens)
        if hit:
            return Demand(request, True, hit, hit // size, own + blocks - hit // size)
    shared = blocks - found.demand
    return Demand(request, False, found.cached_tokens, shared, own + found.demand)


class Shortage(NamedTuple):
    """Why a waiting request may not start.

    rule: `SchedulerConfig.admission`, or "prompt" where that comes first. blocks: what would be
    taken by the rule if it started. room: what there is for that, without the `watermark` and what
    is set `aside` for others that wait for this step.
    """

    rule: str
    blocks: int
    room: int
    watermark: int
    aside: int

    @property
    def reason(self) -> str:
        return "watermark" if self.blocks <= self.room + self.watermark else "blocks"


class Admission:
    """Whether a waiting request may start, by `SchedulerConfig.admission` and `.watermark`."""

    def __init__(
        self, manager: BlockManager, config: SchedulerConfig, lengths: OutputLengths
    ) -> None:
        self._manager, self._config = manager, config
        self._forecast = Forecast(manager, config, lengths)
        self._watermark = config.watermark_blocks(manager.num_blocks)

    def shortage(
        self,
        demand: Demand,
        ahead: Sequence[Demand],
        running: Sequence[Request],
        rows: Sequence[Row],
        limit: int,
        most_promised: int,
    ) -> Shortage | None:
        """None: it may start.

        ahead: of those that wait for this step, whose blocks are set aside. rows: of this step.
        limit: most tokens that the request computes in this step. most_promised: of `running`.
        """
        manager, mode = self._manager, self._config.admission
        watermark = self._watermark if running else 0
        aside = sum(other.blocks for other in ahead)
        room = manager.num_free_blocks + manager.num_cached_blocks - watermark - aside

        def compare(rule: str, blocks: int, room: int) -> Shortage | None:
            return Shortage(rule, blocks, room, watermark, aside) if blocks > room else None

        if mode == "first_chunk":
            taken = manager.demand([row.branch.seq for row in rows], [row.count for row in rows])
            return compare(mode, taken + self._first_blocks(demand, limit), room)
        short = None
        if most_promised + demand.blocks > room:
            short = compare("prompt", self._promised(running) + demand.blocks, room)
        if short is not None or mode == "prompt" or not running:
            return short
        whole = manager.num_blocks - manager.num_draining_blocks - watermark
        if mode == "max_tokens":
            requests = [*running, *(other.request for other in ahead), demand.request]
            return compare(mode, sum(map(self._forecast.most_blocks, requests)), whole)
        growths = self._forecast.of_running(running)
        for new in (*ahead, demand):
            growths += self._forecast.of_waiting(new.request, new.shared)
        return compare(mode, peak_blocks(growths, manager.block_size), whole)

    def _first_blocks(self, demand: Demand, limit: int) -> int:
        """Blocks of the request's first chunk."""
        if demand.reopening is not None:
            return demand.blocks
        end = min(len(demand.request.common_tokens()), demand.cached + limit)
        return max(0, -(-end // self._manager.block_size) - demand.shared)

    def most_promised(self, running: Sequence[Request]) -> int:
        """A bound of `_promised`: a sum over the requests, so it can be kept up."""
        size = self._manager.block_size
        # A branch takes no more than its full blocks, the ends of the first and last, and a copy.
        return sum(
            (branch.known - branch.computed) // size + 3 + request.own_blocks(branch.members, size)
            for request in running
            for branch in request.branches
        )

    def _promised(self, running: Sequence[Request]) -> int:
        """Blocks that the known tokens of the running requests still need."""
        branches = [branch for request in running for branch in request.branches]
        ready = [b for b in branches if not b.loading]
        size = self._manager.block_size
        needed = self._manager.demand([b.seq for b in ready], [b.known - b.computed for b in ready])
        # What a load brings is reserved already.
        loading = [b for b in branches if b.loading]
        needed += sum(-(-b.known // size) - -(-(b.computed + b.loading) // size) for b in loading)
        return needed + sum(b.request.own_blocks(b.members, size) for b in branches)


def widen(manager: BlockManager, rows: Sequence[Row], loads: Sequence[Row], spare: int) -> None:
    """Gives `spare` tokens of the budget back to prefills that left them to requests that wait.

    These could not use them: they wait for what a prefill computes, or do not fit. In order, and
    only if all of the longer rows fit in the pool, beside what is loaded.
    """
    if not any(row.limit for row in rows):
        return
    counts = []
    for row in rows:
        more = min(spare, row.branch.pending - row.count)
        counts.append(row.count + more)
        spare -= more
    if counts != [row.count for row in rows] and manager.can_reserve(
        [row.branch.seq for row in (*rows, *loads)], counts + [row.count for row in loads]
    ):
        for row, count in zip(rows, counts, strict=True):
            row.count = count
            if count == row.branch.pending:
                row.limit = ""
