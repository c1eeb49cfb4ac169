"""Who yields blocks when they run out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pagedkv.scheduling.cost import CostModel
from pagedkv.scheduling.recovery import Holding, Recovery, recover
from pagedkv.scheduling.request import Request
from pagedkv.scheduling.roster import Roster


class Victim(NamedTuple):
    """A running request that is to yield, and how it is best brought back."""

    request: Request
    recovery: Recovery


def choose_victim(
    roster: Roster,
    shortage: int,
    cost: CostModel,
    now: float,
    block_bytes: int | None = None,
    mode: str = "auto",
) -> Victim:
    """Who yields its blocks. At least two requests run that are not parked.

    Never the first in order, so that it always makes progress. Of those whom the policy lets yield
    first, the one that loses least for each block that it gives up, weighed by how often it has
    lost before (policies differ in the class, not in the loss); of equals the last in order.
    Everyone here had a row when it was last let in, so nobody is sent back without a step between.

    shortage: blocks that are missing; a closed request has to reckon with the loss of as many, or
    with what the last ones have lost, if that is more. block_bytes, mode: see `recover`.
    """
    policy = roster.policy
    others = [request for request in roster.running if not request.parked][1:]
    classes = [policy.yield_class(request, now) for request in others]
    highest = max(classes)
    others = [r for r, its in zip(others, classes, strict=True) if its == highest]
    return least_loss(roster, others, shortage, cost, block_bytes, mode)


def least_loss(
    roster: Roster,
    others: Sequence[Request],
    shortage: int,
    cost: CostModel,
    block_bytes: int | None = None,
    mode: str = "auto",
) -> Victim:
    """Of running requests (at least one, in order of service) the one to yield: as above."""
    manager = roster.manager
    exclusive = manager.exclusive_blocks([[b.seq for b in r.branches] for r in others])
    needed = max(shortage, round(roster.reuse.mean))
    victims = []
    for request, blocks in zip(others, exclusive.tolist(), strict=True):
        if any(branch.loading for branch in request.branches):
            blocks = 0  # they are written until the load has ended
        # Own tokens of the samples of a group are replayed, never looked up.
        lone = len(request.live) == 1
        keeps = manager.prefix_caching and lone
        # What can be found by name has been stored behind, all but the partial tail and what was
        # not worth it.
        unstored = sum(len(branch.unstored) for branch in request.branches)
        stored = max(0, blocks - 1 - unstored) if keeps else 0
        held = Holding(request.num_computed, blocks, stored, keeps)
        recovery = recover(
            held, needed, manager.block_size, cost, block_bytes if lone else None, mode
        )
        victims.append(Victim(request, recovery))
    return min(
        reversed(victims),
        key=lambda victim: victim.recovery.loss_per_block * (1 + victim.request.num_preemptions),
    )
