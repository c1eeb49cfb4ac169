"""What an engine looks like between two steps, as plain values: for a dashboard or a terminal.

Of what clients have sent it has the names of requests and tenants, and counts; no token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.cache import BlockManager
from pagedkv.cache.survey import NOBODY, STATES, Survey, survey
from pagedkv.engine.core import EngineCore
from pagedkv.scheduling.decisions import Decision, DecisionLog
from pagedkv.scheduling.explain import describe
from pagedkv.scheduling.queue import WaitingQueue
from pagedkv.scheduling.request import Branch, Request

# Most of each that a picture has.
MOST_WAITING = 200
MOST_TENANTS = 200
MOST_DECISIONS = 60
_LOOKED_THROUGH = 4096  # entries of the log, however long it is
# Block ids of tables, all rows together: as many as the pool has blocks, or this if it is more.
FEWEST_IDS = 4096
# In `owner`: the block has no holder.
NO_OWNER = 0xFFFF
_MOST = 0xFFFF


def take_picture(core: EngineCore) -> dict[str, Any]:
    """The pool, who holds it, who waits for it, and what was decided last.

    Costs O(blocks + entries of the tables) and has O(blocks + requests) values: numbers, texts,
    lists, dicts and bytes. Only between two steps, from the thread that steps.

    pool: `num_blocks` N, `block_size`, the number of blocks in each state, and little-endian arrays
        over blocks 1..N as bytes: `states` uint8 (places in STATES); `counts`, `filled` (slots that
        have a token) and `owners` uint16, larger numbers as 65535. owners: place in `sequences` of
        the block's first holder, or NO_OWNER.
    sequences: those that are open, in order of service. `blocks`: block ids of their tables, int32
        as bytes, cut where all tables together would have more than N.
    waiting: `count`, and some of the `requests`, first of each tenant first.
    tenants: requests that run and wait, and blocks whose first holder is one of the tenant's.
    decisions: the last ones in words, oldest first, without what is written for every prefill.
    """
    scheduler, roster = core.scheduler, core.scheduler.roster
    branches = roster.branches
    seen = survey(scheduler.manager, [branch.seq for branch in branches])
    return {
        "pool": _pool(scheduler.manager, seen),
        "sequences": _sequences(scheduler.manager, branches),
        "waiting": {
            "count": len(roster.waiting),
            "requests": [_waiting(request) for request in _first(roster.waiting)],
        },
        "tenants": _tenants(roster.running, roster.waiting, branches, seen),
        "decisions": _decisions(scheduler.log),
    }


def _pool(manager: BlockManager, seen: Survey) -> dict[str, Any]:
    numbers = np.bincount(seen.states, minlength=len(STATES)).tolist()
    owners = np.where(seen.owners == NOBODY, NO_OWNER, seen.owners)
    return {
        "num_blocks": manager.num_blocks,
        "block_size": manager.block_size,
        "numbers": dict(zip(STATES, numbers, strict=True)),
        "states": seen.states.tobytes(),
        "counts": _uint16(seen.counts),
        "filled": _uint16(seen.filled),
        "owners": _uint16(owners),
    }


def _uint16(values: npt.NDArray[np.integer]) -> bytes:
    short: npt.NDArray[np.uint16] = np.minimum(values, _MOST).astype("<u2")
    return short.tobytes()


def _sequences(manager: BlockManager, branches: Sequence[Branch]) -> list[dict[str, Any]]:
    tables = [manager.block_table(branch.seq) for branch in branches]
    most = _cut([len(table) for table in tables], max(manager.num_blocks, FEWEST_IDS))
    return [
        {
            **_request(branch.request),
            "samples": [output.index for output in branch.members],
            "state": _state(branch),
            "tokens": branch.computed,
            "output_tokens": max(len(output.tokens) for output in branch.members),
            "cached_tokens": branch.request.num_cached_tokens,
            "num_blocks": len(table),
            "blocks": table[:most].astype("<i4").tobytes(),
        }
        for branch, table in zip(branches, tables, strict=True)
    ]


def _cut(lengths: Sequence[int], total: int) -> int:
    """The longest that each may be so that all together are at most `total`; at least 1."""
    rest = len(lengths)
    for length in sorted(lengths):
        if length * rest > total:
            return max(1, total // rest)
        total -= length
        rest -= 1
    return max(lengths, default=1)


def _state(branch: Branch) -> str:
    if branch.loading:
        return "loading"
    return "prefill" if branch.computed < branch.request.prompt_length else "decode"


def _request(request: Request) -> dict[str, Any]:
    return {
        "request": request.id,
        "tenant": request.tenant,
        "prompt_tokens": len(request.prompt),
        "arrival": request.arrival,
        "preemptions": request.num_preemptions,
    }


def _waiting(request: Request) -> dict[str, Any]:
    state = "waiting"
    if request.admitted:
        state = "swapped" if request.swapped else "preempted"
    output_tokens = sum(len(output.tokens) for output in request.live)
    return {**_request(request), "state": state, "output_tokens": output_tokens}


def _first(waiting: WaitingQueue) -> Iterable[Request]:
    tenants = waiting.tenants[:MOST_WAITING]
    share = -(-MOST_WAITING // max(1, len(tenants)))
    found = (r for tenant in tenants for r in waiting.line(tenant).first(share))
    return islice(found, MOST_WAITING)


def _tenants(
    running: Sequence[Request], waiting: WaitingQueue, branches: Sequence[Branch], seen: Survey
) -> list[dict[str, Any]]:
    runs = Counter(request.tenant for request in running)
    owned = np.bincount(seen.owners[seen.owners != NOBODY], minlength=len(branches)).tolist()
    blocks: Counter[str | None] = Counter()
    for branch, number in zip(branches, owned, strict=True):
        blocks[branch.request.tenant] += number
    names = list(dict.fromkeys([*runs, *waiting.tenants]))[:MOST_TENANTS]
    return [
        {
            "tenant": name,
            "running": runs[name],
            "waiting": len(waiting.line(name)),
            "blocks": blocks[name],
        }
        for name in names
    ]


def _decisions(log: DecisionLog) -> list[dict[str, Any]]:
    """A prefill has one of kind "chunk" in every step: they would push the others out."""
    going = list(islice(log.waits, MOST_DECISIONS // 3))
    told = (entry for entry in islice(log.newest(), _LOOKED_THROUGH) if entry.kind != "chunk")
    newest = list(islice(told, MOST_DECISIONS - len(going)))
    return [
        {
            "step": entry.step,
            "now": _last(entry),
            "kind": entry.kind,
            "request": entry.request,
            "words": describe(entry),
        }
        for entry in sorted([*reversed(newest), *going], key=_last)
    ]


def _last(entry: Decision) -> float:
    """When it was decided; of a wait, for the last time."""
    last: float = entry.numbers.get("last_now", entry.now)
    return last
