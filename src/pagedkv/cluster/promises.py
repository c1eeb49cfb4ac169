"""Blocks that a worker has promised: what is there will take them, and does not hold them yet."""

from __future__ import annotations

import math

from pagedkv.cluster.router_messages import HEADROOM
from pagedkv.engine.core import EngineCore
from pagedkv.engine.moves import Moves
from pagedkv.scheduling.backlog import load_of
from pagedkv.scheduling.forecast import Forecast


def promised_blocks(core: EngineCore, moves: Moves) -> int:
    """See `transfer.routing.WorkerReport`; to be subtracted from what is free and cached.

    Prompts that wait or are half computed take the rest of their tokens. A sample that runs takes
    what its output is expected to have still, but no more than is left of the head-room with which
    it was placed: what comes beyond that was promised by nobody. Outputs of samples that wait, and
    of requests whose move here was granted (of each as of one sample), count as they are here on
    average; the K/V that a move brings are held already. What is on its way to another worker takes
    nothing more.
    O(running + moves).
    """
    scheduler, leaving = core.scheduler, moves.leaving
    roster, size = scheduler.roster, scheduler.manager.block_size
    load = load_of(roster, scheduler.config)
    forecast = Forecast(scheduler.manager, scheduler.config, roster.lengths)
    growth = sum(
        min(forecast.remaining(request, output), max(0, HEADROOM - len(output.tokens)))
        for request in roster.running
        if request.id not in leaving
        for output in request.live
    )
    waiting = roster.waiting.num_samples
    for request_id in leaving:
        request = roster.requests.get(request_id)
        if request is not None and not request.branches:
            waiting -= request.params.n
    output = min(load.output or HEADROOM, HEADROOM)
    later = (max(0, waiting) + len(moves.coming)) * output
    return math.ceil((load.prefill_tokens + growth + later) / size)
