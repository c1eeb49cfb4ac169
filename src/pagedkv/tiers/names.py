"""Names of blocks outside the process: keyed 128-bit digests, chained over the prefix.

Two blocks have the same name exactly when they stand for the same tokens after the same prefix, in
the same namespace with the same extra bytes, of the same model in the same layout. Whoever finds a
name compares the tokens too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import NewType

from pagedkv.cache.index import Frames, token_bytes
from pagedkv.cache.types import Int32

BlockName = NewType("BlockName", bytes)

NAME_BYTES = 16
ROOT = BlockName(bytes(NAME_BYTES))  # the parent of first blocks; BLAKE2b never gives it by design


class Namer:
    """Makes names. `fingerprint` says all that K/V depend on beside the prefix.

    That is: the model's weights, the K/V dtype, the layout and its version, and the block size.
    """

    root = ROOT

    def __init__(self, fingerprint: bytes) -> None:
        key = hashlib.blake2b(fingerprint, digest_size=64).digest()
        # To be copied: half of what a name takes would go into reading the key.
        self._keyed = hashlib.blake2b(key=key, digest_size=NAME_BYTES)

    def child(self, parent: BlockName, frame: bytes, tokens: Int32) -> BlockName:
        """The name of the block that holds `tokens` (at most a block) behind `parent`."""
        return self.child_of_bytes(parent, frame, token_bytes(tokens))

    def child_of_bytes(self, parent: BlockName, frame: bytes, tokens: bytes) -> BlockName:
        """The same for tokens as key bytes."""
        digest = self._keyed.copy()
        digest.update(parent + len(frame).to_bytes(4) + frame + tokens)
        return BlockName(digest.digest())

    def facts(self, frame: bytes) -> str:
        """A digest of namespace and extra bytes alone, to tell them apart without saying them."""
        return self.child_of_bytes(ROOT, frame, b"").hex()

    def walk(
        self, tokens: Int32, frames: Frames, public_blocks: int, block_size: int
    ) -> Iterator[BlockName]:
        """Names of all blocks of a prompt, one by one, the partly filled last one included."""
        # As `child_of_bytes`, written out: a router makes names by the hundred for a decision.
        content, size = token_bytes(tokens), 4 * block_size
        public, private = (len(frame).to_bytes(4) + frame for frame in frames)
        name: bytes = ROOT
        for i in range(-(-len(tokens) // block_size)):
            digest = self._keyed.copy()
            frame = public if i < public_blocks else private
            digest.update(name + frame + content[i * size : (i + 1) * size])
            name = digest.digest()
            yield BlockName(name)

    def chain(
        self, tokens: Int32, frames: Frames, public_blocks: int, block_size: int
    ) -> list[BlockName]:
        """The same as a list."""
        return list(self.walk(tokens, frames, public_blocks, block_size))
