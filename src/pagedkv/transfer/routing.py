"""What a router is told and what it decides, as plain values that can be sent and recorded.

Times are seconds of the router's clock. A worker that both prefills and decodes has the role
"both": a request stays there. Block counts are in the worker's own blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from pagedkv.transfer.events import KVEventBatch

Role = Literal["prefill", "decode", "both"]


class Link(msgspec.Struct, frozen=True):
    """What moving K/V takes: seconds = latency_s + bytes / bytes_per_s."""

    latency_s: float
    bytes_per_s: float


class FlipConfig(msgspec.Struct, frozen=True):
    """When a worker changes its role; see `transfer.roles` for what a load is.

    patience_s: that one side has to starve and the other to have a worker to spare, without a
    break. rest_s: after a change, until the next. queue_s: that a prompt may wait. full_share: of
    decode workers' blocks in use or promised, from which on they are full. spare_load: the most
    that a side may have afterwards that gives a worker away.
    """

    patience_s: float = 5.0
    rest_s: float = 60.0
    queue_s: float = 2.0
    full_share: float = 0.9
    spare_load: float = 0.6


class RouterConfig(msgspec.Struct, frozen=True):
    """block_size: tokens a block, of the names that requests are routed by.

    kv_bytes_per_token: of all layers. local, remote: links between workers of one host and of two.
    epsilon_s: scores that differ by no more are equal; which of them is chosen depends on the
        prompt's first block alone, so that equal prompts meet, and hardly changes when workers come
        and go. Must be short beside a prefill and long beside the noise of a measured rate.
    max_held: requests that wait here for room at a worker. flip: None: roles stay.
    """

    block_size: int
    kv_bytes_per_token: int
    local: Link = Link(0.0005, 5e9)
    remote: Link = Link(0.002, 1e9)
    epsilon_s: float = 0.002
    max_held: int = 10_000
    flip: FlipConfig | None = None


# ---- events ------------------------------------------------------------------------------------


class WorkerReport(msgspec.Struct, frozen=True, tag=True):
    """How a worker is doing; the first makes it known. Sent after a step, or a few times a second.

    host: workers of one host have the local link between them.
    free_blocks: free and cached: what a `reserve` could take now. Not those that are computed here
        and held until another worker has them.
    promised_blocks: that waiting requests will take, that running ones may still grow by, and that
        have been granted to moves on their way here.
    wait_s: until room is made for a request that comes now, before the queued tokens are counted.
    queued_tokens: of prompts, waiting or half prefilled, not computed yet and not cached.
    running: sequences that decode. prefill_tokens_per_s: with the decodes that run now.
    step_s: of a decode step now; step_s_per_sequence: what one more makes it longer by.
    seen: requests that have reached it since its last report: the numbers above count them.
    """

    worker: str
    role: Role
    num_blocks: int
    free_blocks: int
    prefill_tokens_per_s: float
    promised_blocks: int = 0
    wait_s: float = 0.0
    queued_tokens: int = 0
    running: int = 0
    step_s: float = 0.0
    step_s_per_sequence: float = 0.0
    host: str = ""
    draining: bool = False
    seen: tuple[str, ...] = ()


class WorkerGone(msgspec.Struct, frozen=True, tag=True):
    """A worker has died or left. One that comes back under the same name is a new one."""

    worker: str


class WorkerEvents(msgspec.Struct, frozen=True, tag=True):
    """What a worker has told of its cache; see `transfer.events`."""

    worker: str
    seq: int
    batch: KVEventBatch


class Arrival(msgspec.Struct, frozen=True, tag=True):
    """A request wants workers.

    names: of its blocks in order (`Namer.walk`); a generator is taken only as far as needed.
    output_tokens: that the decode worker keeps head-room for, of all samples together: their limit,
        or how long outputs are expected to be.
    deadline: for the first token, by the router's clock; it waits for room until then. tpot:
        seconds a token after that; it is refused if no worker is so fast now. None: no hurry.
    priority: lower goes first among requests that wait here. tenant: of those of one priority
        tenants are served in turn, by `weight`, above 0.
    """

    request_id: str
    prompt_tokens: int
    output_tokens: int
    names: Iterable[bytes] = ()
    deadline: float | None = None
    tpot: float | None = None
    priority: int = 0
    tenant: str | None = None
    weight: float = 1.0


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A request is over, wherever it was; one that waits here is dropped."""

    request_id: str


class Tick(msgspec.Struct, frozen=True, tag=True):
    """Time has passed; to be sent about once a second."""


RouterEvent = WorkerReport | WorkerGone | WorkerEvents | Arrival | Ended | Tick


# ---- decisions ---------------------------------------------------------------------------------


class Assign(msgspec.Struct, frozen=True, tag=True):
    """A request's workers; the same one twice where it stays.

    cached_tokens: of its prompt at the prefill worker, as far as is known; decode_cached_tokens: at
    the decode worker, which are not moved. queue_s + prefill_s until the first token, transfer_s
    and a step until the second.
    """

    request_id: str
    prefill: str
    decode: str
    cached_tokens: int
    decode_cached_tokens: int
    queue_s: float
    prefill_s: float
    transfer_s: float


class Shed(msgspec.Struct, frozen=True, tag=True):
    """A request is refused; `reason` is for its client."""

    request_id: str
    reason: str


class AskForPicture(msgspec.Struct, frozen=True, tag=True):
    """Events of a worker are missing: it is to tell everything (`EventStream.ask_for_picture`)."""

    worker: str


class SetRole(msgspec.Struct, frozen=True, tag=True):
    """A worker is to change its role: to move away or finish what it has, and report the new one.

    It gets no new requests until it does.
    """

    worker: str
    role: Role


Decision = Assign | Shed | AskForPicture | SetRole


class RouterStats(msgspec.Struct, frozen=True):
    """Counts since the start, but for what is there now: workers, held, names.

    gaps: times that events of a worker were missing. names: blocks that are known, each once;
    dropped: of a worker, past the bound. cached_tokens: of prompt_tokens, by what was known.
    """

    workers: int = 0
    held: int = 0
    names: int = 0
    assigned: int = 0
    shed: int = 0
    gaps: int = 0
    dropped: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def after(self, earlier: RouterStats) -> RouterStats:
        """What is there now, and the counts of both: of a router and of the one before it."""
        return RouterStats(
            self.workers,
            self.held,
            self.names,
            self.assigned + earlier.assigned,
            self.shed + earlier.shed,
            self.gaps + earlier.gaps,
            self.dropped + earlier.dropped,
            self.prompt_tokens + earlier.prompt_tokens,
            self.cached_tokens + earlier.cached_tokens,
        )
