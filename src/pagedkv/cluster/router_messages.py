"""What the front end tells the router, beside the events of `transfer.routing`."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.messages import Add
from pagedkv.scheduling.namespaces import namespace_bytes, public_length
from pagedkv.transfer.routing import Role

# Tokens of output that a worker is to have room for when it gets a request, at most.
HEADROOM = 256


class Turn(NamedTuple):
    """When a call of the front end is to be taken: Ray does not keep calls in order.

    session: counts what the front end has begun with routers. number: counts the calls of one, from
    0.
    """

    session: int
    number: int


class Duty(NamedTuple):
    """What a worker is for. draining: it gets nothing new.

    boot: of the process that takes requests, see `worker.Started`; None: none does. Reports of
    another are of one that is gone, or come before the front end knows that it is there.
    """

    role: Role
    draining: bool
    boot: str | None


class Wish(msgspec.Struct, frozen=True):
    """A request that wants workers.

    prompt: int32 little-endian, with what was drawn already. namespace, public: as for
    `BlockManager.open`. slack: seconds until its first token is due. Else as `Arrival`.
    """

    request_id: str
    prompt: bytes
    output_tokens: int
    namespace: bytes | None = None
    public: int = 0
    slack: float | None = None
    priority: int = 0
    tenant: str | None = None
    weight: float = 1.0


def make_wish(add: Add, drawn: tuple[int, ...], config: SchedulerConfig, now: float) -> Wish:
    """Of a request that has drawn these tokens. config: of the workers. now: on its clock."""
    tokens = np.array([*add.prompt, *drawn], "<i4")
    room = config.max_model_len - len(tokens)
    left = room if add.params.max_tokens is None else add.params.max_tokens - len(drawn)
    most = max(1, min(left, room, HEADROOM))
    due = [add.arrival + add.ttft_slo] if add.ttft_slo is not None and not drawn else []
    due += [] if add.deadline is None else [add.deadline]
    public = public_length(add.prompt, config.public_prefixes)
    tenant, weight = config.turn_of(add.tenant)
    return Wish(
        add.request_id,
        tokens.tobytes(),
        most * add.params.n,
        namespace_bytes(add.tenant, add.cache_salt),
        public if add.params.prompt_logprobs is None else 0,
        min(due) - now if due and config.overload == "reject" else None,
        add.priority,
        tenant,
        weight,
    )
