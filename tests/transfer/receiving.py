"""A worker that receives, met message by message."""

from __future__ import annotations

from typing import Any

import numpy as np
from moving_world import LIMITS, NAMING, hello

from pagedkv.cache import BlockManager
from pagedkv.transfer.actions import Action, Send, Write
from pagedkv.transfer.endpoint import Endpoint
from pagedkv.transfer.limits import TransferLimits
from pagedkv.transfer.messages import Commit, Data, Grant, MoveId, Reserve, pack_tokens

TOKENS = np.arange(1, 13, dtype=np.int32)
MOVE = MoveId("r", 1)


class Receiving:
    """A worker D of 8 blocks of 4, that knows the workers P and Q."""

    def __init__(self, num_blocks: int = 8, limits: TransferLimits = LIMITS) -> None:
        self.manager = BlockManager(num_blocks, 4)
        self.end = Endpoint(self.manager, hello("D", num_blocks, 4), limits)
        for worker in ("P", "Q"):
            self.end.handle(worker, hello(worker, 8, 4), 0.0)

    def reserve(self, move: MoveId = MOVE, worker: str = "P", now: float = 0.0) -> Any:
        """The answer to a request for 12 tokens."""
        reserve = Reserve(*move, pack_tokens(TOKENS), NAMING)
        return answer(self.end.handle(worker, reserve, now))

    def data(self, grant: Grant, start: int, stop: int, now: float = 0.0) -> list[Action]:
        tokens = pack_tokens(TOKENS[start:stop])
        data = Data(*grant.move, grant.lease, start + 1, start, stop, tokens, "float32")
        return self.end.handle("P", data, now)

    def put(self, grant: Grant, start: int, stop: int) -> None:
        (write,) = self.data(grant, start, stop)
        assert isinstance(write, Write)
        self.end.written(grant.move, None, 0.0)

    def commit(self, grant: Grant, total: int = 12) -> list[Action]:
        message = Commit(*grant.move, grant.lease, 99, total, b"state", (1,), (False,))
        return self.end.handle("P", message, 0.0)

    @property
    def available(self) -> int:
        self.manager.check()
        return self.manager.num_free_blocks + self.manager.num_cached_blocks


def answer(actions: list[Action]) -> Any:
    """The one message that is sent."""
    (send,) = (a for a in actions if isinstance(a, Send))
    return send.message
