"""How long a request that came now would wait for its first token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.cost import CostModel
from pagedkv.scheduling.request import Request
from pagedkv.scheduling.roster import Roster

# Blocks of a sequence of which nothing is known yet.
_FEWEST = 1.0


class Load(NamedTuple):
    """What a new request finds.

    prefills, prefill_tokens: prompts that are to be computed before it, and their tokens. decodes,
    context: sequences that draw in every step, and the tokens that they read. samples: those that
    run or wait. places: how many run at once, as large as they are now. output: tokens that one of
    them draws in all.
    """

    prefills: int
    prefill_tokens: int
    decodes: int
    context: int
    samples: int
    places: float
    output: float


def backlog_seconds(load: Load, cost: CostModel, max_num_batched_tokens: int) -> float:
    """Seconds from now until a request that came now would get its first token.

        s = t(decodes)                        a step without prefills, by the cost model
        T = max_num_batched_tokens - decodes  tokens that it has room for beside them
        p = prefill_tokens                    of `prefills` prompts of equal length

        prefill = s * (1 + p / T) + the prompts' own work, by the cost model
        seats   = max(0, samples + 1 - places) * s * output / places

    and the sum of both. The second is the time until so many of those before it have ended, where
    each takes one of so many places for `output` steps: one falls free every s * output / places
    seconds. The new request's own prompt is not part of it, nor are deadlines and weights. 0.0 as
    long as no step was measured.
    """
    step = cost.predict(load.decodes, load.context) if load.decodes else cost.predict(1)
    room = max(1, max_num_batched_tokens - load.decodes)
    prefill = step * (1 + load.prefill_tokens / room)
    if load.prefills:
        mean = load.prefill_tokens / load.prefills
        prefill += load.prefills * cost.prefill_seconds(math.ceil(mean))
    excess = max(0.0, load.samples + 1 - load.places)
    return prefill + excess * step * load.output / load.places


def expected_backlog(roster: Roster, config: SchedulerConfig, cost: CostModel) -> float:
    """`backlog_seconds` of what a request would find now."""
    return backlog_seconds(load_of(roster, config), cost, config.max_num_batched_tokens)


def load_of(roster: Roster, config: SchedulerConfig) -> Load:
    """What a request that came now would find. O(tenants + running)."""
    manager, waiting = roster.manager, roster.waiting
    running, seats = roster.running, roster.num_samples
    begun = [request for request in running if not request.started]
    decodes = seats - sum(len(request.live) for request in begun)
    left = sum(branch.known - branch.computed for request in begun for branch in request.branches)
    held = manager.num_held_blocks
    each = max(_FEWEST, held / seats) if seats else _FEWEST
    return Load(
        prefills=len(begun) + len(waiting),
        prefill_tokens=left + waiting.num_tokens,
        decodes=decodes,
        context=held * manager.block_size if decodes else 0,
        samples=seats + waiting.num_samples,
        places=max(1.0, min(float(config.seats), manager.num_blocks / each)),
        output=roster.lengths.mean or _longest(running, config),
    )


def _longest(running: Sequence[Request], config: SchedulerConfig) -> float:
    """Tokens that the outputs of running requests may have, on average."""
    most = config.max_model_len
    caps = [min(r.params.max_tokens or most, most - r.prompt_length) for r in running]
    return sum(caps) / len(caps) if caps else 0.0
