"""What stands for K/V where only its size counts: in a worker, and on its way between two."""

from __future__ import annotations

import numpy as np

from pagedkv.cache.types import Int32
from pagedkv.transfer.limits import TransferLimits
from pagedkv.transfer.messages import Hello, MoveId
from pagedkv.transfer.payload import UInt8, token_bytes


def hello(worker: str, block_size: int, num_blocks: int) -> Hello:
    """What a simulated worker is: its K/V are as small as they can be."""
    return Hello(worker, 1, b"", 1, 1, 1, "bfloat16", block_size, num_blocks)


def limits(piece_tokens: int) -> TransferLimits:
    """So many tokens in a message, at most, of the K/V that `hello` tells of.

    Nothing is lost on a simulated network, so patience is for room alone. The window bridges the
    steps for which answers have to wait.
    """
    piece_bytes = piece_tokens * token_bytes(hello("", 1, 1))
    return TransferLimits(
        lease=60.0, retry=0.5, patience=1e6, piece_bytes=piece_bytes, window=16, memory=60.0
    )


class NoKV:
    """The `Payloads` of a worker that computes nothing."""

    def __init__(self, ours: Hello) -> None:
        self._block_bytes = token_bytes(ours) * ours.block_size

    def read(self, blocks: Int32) -> UInt8:
        return np.zeros((len(blocks), self._block_bytes), np.uint8)

    def write(self, blocks: Int32, data: UInt8) -> None:
        pass

    def copy(self, copies: Int32) -> None:
        pass


class NoTransport:
    """A `Transport` whose reference says how many bytes there were; they were all zero."""

    def put(self, move: MoveId, number: int, blocks: UInt8) -> bytes:
        return str(blocks.size).encode()

    def get(self, reference: bytes) -> UInt8 | None:
        return np.zeros(int(reference), np.uint8)

    def is_intact(self) -> bool:
        return True

    def free(self, move: MoveId, number: int) -> None:
        pass

    def close(self) -> None:
        pass
