"""What a waiting request would take, whether it fits, and what is left to those who run."""

from __future__ import annotations

from collections.abc import Sequence

from pagedkv.cache import BlockManager
from pagedkv.scheduling.batch import Row
from pagedkv.scheduling.request import Request
from pagedkv.scheduling.siblings import Leaders, may_wait


def admission_demand(manager: BlockManager, request: Request, leaders: Leaders) -> tuple[bool, int]:
    """Whether the request waits for what this step computes, and the blocks it takes then."""
    common = request.common_tokens()
    lookup = request.lookup_tokens(common)
    size = manager.block_size
    found = manager.match(lookup, request.namespace, request.public)
    own = -(-len(common) // size) + request.own_blocks(request.live, size)
    own -= -(-len(lookup) // size)
    if may_wait(request):
        hit = leaders.hit_after(request, lookup, found.cached_tokens)
        if hit:
            return True, own + -(-len(lookup) // size) - hit // size
    return False, own + found.demand


def fits_beside(manager: BlockManager, running: Sequence[Request], demand: int) -> bool:
    """Whether `demand` blocks can be had beside what the running requests still need."""
    branches = [branch for request in running for branch in request.branches]
    needed = manager.demand([b.seq for b in branches], [b.known - b.computed for b in branches])
    needed += sum(b.request.own_blocks(b.members, manager.block_size) for b in branches)
    return demand + needed <= manager.num_free_blocks + manager.num_cached_blocks


def widen(manager: BlockManager, rows: Sequence[Row], spare: int) -> None:
    """Gives `spare` tokens of the budget back to prefills that left them to requests that wait.

    These could not use them: they wait for what a prefill computes, or do not fit. In order, and
    only if all of the longer rows fit in the pool.
    """
    counts = []
    for row in rows:
        more = min(spare, row.branch.pending - row.count)
        counts.append(row.count + more)
        spare -= more
    if counts != [row.count for row in rows] and manager.can_reserve(
        [row.branch.seq for row in rows], counts
    ):
        for row, count in zip(rows, counts, strict=True):
            row.count = count
