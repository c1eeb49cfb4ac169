"""Which two workers a request is best served by.

score = queue + (prompt - hit) / rate + transfer + a decode step, in seconds, over all pairs of a
prefill and a decode worker. The first two depend on the one, the last on the other, the transfer on
the other and on whether both stand in one host. So the best pair is found without looking at pairs:
each prefill worker is compared with the best decode worker of its host and with the best of all.
(The score is that of Mooncake's algorithm 1, FAST 2025, with a decode worker in it.)

Scores that differ by no more than epsilon are equal. Among equals rendezvous hashing of the
prompt's first block chooses (Thaler and Ravishankar, 1998): equal prompts meet, and hardly any
moves when workers come and go.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv.cache.types import Int64, Mask
from pagedkv.transfer.fleet import Fleet
from pagedkv.transfer.routing import RouterConfig

Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request needs.

    cached: leading blocks that each worker has, int64 [places]. affinity: a number below 2**64 that
    equal prompts share. within_s: until the first token, at most. tpot_s: a decode step, at most.
    """

    prompt_tokens: int
    output_tokens: int
    cached: Int64
    affinity: int
    within_s: float = np.inf
    tpot_s: float = np.inf


class Pair(NamedTuple):
    """Places of two workers, the same twice where the request stays; seconds, and tokens cached."""

    prefill: int
    decode: int
    queue_s: float
    prefill_s: float
    transfer_s: float
    cached_tokens: int
    decode_cached_tokens: int


class NoPair(NamedTuple):
    """Why there is none. side: the role that is short of room; "" if it is not a matter of room.

    hopeless: nothing that workers finish will help.
    """

    reason: str
    side: str = ""
    hopeless: bool = False


def blocks_of(tokens: int, block_size: int) -> int:
    """Blocks that so many tokens take."""
    return -(-tokens // block_size)


def choose_pair(config: RouterConfig, fleet: Fleet, wanted: Wanted) -> Pair | NoPair:
    """The best pair whose workers have room. Changes nothing. O(workers), vectorised.

    A prefill worker needs room for the prompt, a decode worker for prompt and output, but for no
    more than all its blocks. One of role "both" may keep a request without having room yet: its
    own scheduler has a queue, and knows who is to go first.
    """
    columns, prompt = fleet.columns, wanted.prompt_tokens
    size, num_blocks, room = config.block_size, columns["num_blocks"], columns["room"]
    need = blocks_of(prompt, size)
    need_all = np.minimum(blocks_of(prompt + wanted.output_tokens, size), num_blocks)
    left = prompt - np.minimum(wanted.cached * size, prompt - 1)
    queue, step = columns["queue_s"], columns["step_s"]
    prefill = left / columns["rate"]
    fits = num_blocks >= need
    first = np.where(columns["prefills"] & fits, queue + prefill, np.inf)
    in_time = np.where(first <= wanted.within_s, first, np.inf)
    can_decode = columns["decodes"] & fits & (step <= wanted.tpot_s)
    moves = stays = np.where(can_decode, in_time + step, np.inf)
    can_receive = can_decode & (room >= need_all)
    if can_receive.any():
        onward = _Onward(config, fleet, left, step, can_receive)
        moves = np.where(room >= need, in_time + onward.best(), np.inf)
    totals = np.minimum(stays, moves)
    best = totals.min()
    if best == np.inf:
        return _why(config, columns, wanted, first, can_decode, can_receive)
    p = _rendezvous(columns["seed"], totals, best + config.epsilon_s, wanted.affinity)
    d, transfer = p, 0.0
    if moves[p] < stays[p]:
        times = onward.times_from(p)
        d = _rendezvous(columns["seed"], times, times.min() + config.epsilon_s, wanted.affinity)
        transfer = float(times[d] - step[d]) if d != p else 0.0
    hit = prompt - left
    return Pair(p, d, float(queue[p]), float(prefill[p]), transfer, int(hit[p]), int(hit[d]))


class _Onward:
    """Seconds from the end of the prefill to the second token, by decode worker."""

    def __init__(
        self, config: RouterConfig, fleet: Fleet, left: Int64, step: Float64, can: Mask
    ) -> None:
        size = left * config.kv_bytes_per_token
        self._hosts, self._num_hosts = fleet.columns["host"], fleet.num_hosts
        local, remote = config.local, config.remote
        self._local = np.where(can, local.latency_s + size / local.bytes_per_s + step, np.inf)
        if self._num_hosts > 1:
            far = remote.latency_s + size / remote.bytes_per_s + step
            self._remote = np.where(can, far, np.inf)

    def best(self) -> Float64:
        """To the best decode worker from each place, or one number for all."""
        if self._num_hosts == 1:
            return np.atleast_1d(self._local.min())
        near = np.full(self._num_hosts, np.inf)
        np.minimum.at(near, self._hosts, self._local)
        times: Float64 = np.minimum(near[self._hosts], self._remote.min())
        return times

    def times_from(self, place: int) -> Float64:
        """To each decode worker from one place."""
        if self._num_hosts == 1:
            return self._local
        times: Float64 = np.where(self._hosts == self._hosts[place], self._local, self._remote)
        return times


def _rendezvous(seeds: npt.NDArray[np.uint64], scores: Float64, most: float, affinity: int) -> int:
    """Of the places whose score is at most `most` the one with the largest mixed hash."""
    places = np.flatnonzero(scores <= most)
    if len(places) == 1:
        return int(places[0])
    # The finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014) of both numbers.
    x = seeds[places] ^ np.uint64(affinity)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return int(places[(x ^ (x >> np.uint64(31))).argmax()])


def _why(
    config: RouterConfig,
    columns: dict[str, npt.NDArray[Any]],
    wanted: Wanted,
    first: Float64,
    can_decode: Mask,
    can_receive: Mask,
) -> NoPair:
    need = blocks_of(wanted.prompt_tokens, config.block_size)
    for role in ("prefill", "decode"):
        able = columns[role + "s"]
        if not able.any():
            return NoPair(f"no {role} worker is there", role)
        largest = int(columns["num_blocks"][able].max())
        if largest < need:
            return NoPair(
                f"{wanted.prompt_tokens} prompt tokens take {need} blocks, "
                f"the largest {role} worker has {largest}",
                hopeless=True,
            )
    soonest = float(first.min())
    if soonest > wanted.within_s:
        late = soonest - wanted.within_s
        return NoPair(f"the first token would come {late:.3f} s after its deadline", hopeless=True)
    if not can_decode.any():
        # Not to be waited for: whoever comes behind it may want nothing of the kind.
        reason = f"no decode worker makes a step in the {wanted.tpot_s} s that it asks for"
        return NoPair(reason, hopeless=True)
    side = "prefill" if can_receive.any() else "decode"
    return NoPair(f"no {side} worker has room", side)
