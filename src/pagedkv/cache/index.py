"""Exact names of cached content: a trie whose nodes are keyed by everything that makes K/V differ.

A node's key is (its parent node's serial, namespace part and extra bytes, tokens), framed so that
no two facts give the same bytes. Serials are never used again, so a key can only ever mean one
content; equality of keys is equality of content and no hash is trusted.

With one layer group a node has exactly one block, so the block's id is the node's id. Keys hold
tokens big-endian with the sign bit flipped: the order of the bytes is the order of the numbers.

Most nodes have one child. A node therefore points at one full child, its heir; only the other
children are kept in order, to be searched. A chain grows and shrinks without touching the order,
and a long chain is followed from heir to heir.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

import numpy as np

from pagedkv.cache.sorted_keys import SortedKeys
from pagedkv.cache.types import Int32

if TYPE_CHECKING:
    from pagedkv.cache.events import EventLog

# A Python dict is rebuilt whole when its deleted entries have used it up. Many small ones, chosen
# by the parent's serial, spread that over the steps.
_SHARDS = 64

ROOT = 0  # parent of first blocks; also the null block, which is never a node
_SIGN = np.uint32(0x80000000)


class Frames(NamedTuple):
    """The part of a key between parent and tokens, for the public and the private part."""

    public: bytes
    private: bytes


def _framed(value: bytes) -> bytes:
    return len(value).to_bytes(4) + value


def make_frames(namespace: str | bytes | None, extra: bytes | None) -> Frames:
    """Frames of a sequence. None, "" and b"" are three different namespaces."""
    if namespace is None:
        name = b"\0"
    elif isinstance(namespace, str):
        name = b"s" + namespace.encode()
    elif isinstance(namespace, bytes):
        name = b"b" + namespace
    else:
        raise ValueError(f"namespace must be str, bytes or None, got {namespace!r}")
    if extra is not None and not isinstance(extra, bytes):
        raise ValueError(f"extra must be bytes or None, got {extra!r}")
    tail = b"\0" if extra is None else b"x" + _framed(extra)
    return Frames(b"P" + tail, b"N" + _framed(name) + tail)


def token_bytes(tokens: Int32) -> bytes:
    """Tokens as key bytes, 4 each."""
    return (tokens.view(np.uint32) ^ _SIGN).astype(">u4").tobytes()


def tokens_of(data: bytes) -> Int32:
    """The tokens that key bytes stand for: a new int32 array."""
    return (np.frombuffer(data, ">u4").astype(np.uint32) ^ _SIGN).view(np.int32)


class PrefixIndex:
    """The named blocks. `contents` int32 [num_blocks + 1, B] is the manager's, read only here."""

    def __init__(self, contents: Int32) -> None:
        self._contents = contents
        self._block_size = contents.shape[1]
        size = len(contents)
        self.keys: list[bytes] = [b""] * size  # b"": not named
        # Arrays, not lists: the garbage collector would walk through lists of this length.
        self.parents = array("q", [ROOT]) * size
        self.serials = array("q", [0]) * size
        # Checksums of whole names, chained: they tell the eviction order what has been here before,
        # where a mistake costs nothing but a block kept a little longer.
        self.digests = array("q", [0]) * size
        self.heirs = array("q", [ROOT]) * size
        self.others = array("q", [0]) * size  # named children besides the heir
        self._order = SortedKeys()  # their keys
        self._nodes: list[dict[bytes, int]] = [{} for _ in range(_SHARDS)]
        self.next_serial = 1
        self.log: EventLog | None = None  # where somebody listens

    def __len__(self) -> int:
        return sum(map(len, self._nodes))

    def find(self, parent: int, frame: bytes, tokens: bytes) -> int:
        """The block named exactly so, or ROOT."""
        serial = self.serials[parent]
        return self._nodes[serial % _SHARDS].get(serial.to_bytes(8) + frame + tokens, ROOT)

    def full_hits(self, tokens: Int32, frames: Frames, public_blocks: int, limit: int) -> list[int]:
        """Blocks of the longest cached chain of full blocks, at most `limit`.

        The first `public_blocks` are looked up in the public part. Most of a long chain is found
        by following heirs and comparing contents at once; only where that guess fails is a name
        looked up.
        """
        block_size = self._block_size
        hits: list[int] = []
        span = 32  # how far to follow at once; grows, so that a wrong guess costs little
        while len(hits) < limit:
            i = len(hits)
            frame = frames.public if i < public_blocks else frames.private
            piece = token_bytes(tokens[i * block_size : (i + 1) * block_size])
            block = self.find(hits[-1] if hits else ROOT, frame, piece)
            if block == ROOT:
                break
            hits.append(block)
            # A child's frame is its parent's, except where the public part ends.
            end = public_blocks if i < public_blocks else limit
            hits += self._follow(block, frame, tokens, i + 1, min(end, limit, i + 1 + span))
            span *= 4
        return hits

    def _follow(self, block: int, frame: bytes, tokens: Int32, start: int, end: int) -> list[int]:
        heirs = self.heirs
        path: list[int] = []
        while start + len(path) < end and (block := heirs[block]) != ROOT:
            path.append(block)
        if not path:
            return path
        block_size = self._block_size
        wanted = tokens[start * block_size : (start + len(path)) * block_size]
        same = (self._contents[path] == wanted.reshape(len(path), block_size)).all(axis=1)
        n = len(path) if same.all() else int(same.argmin())
        # Frames can differ only below a public node, whose heir may be private.
        at = 8 + len(frame)
        while n and self.keys[path[n - 1]][8:at] != frame:
            n -= 1
        return path[:n]

    def partial_hit(self, parent: int, frame: bytes, tokens: Int32) -> tuple[int, int]:
        """(block, length) of the child sharing the longest prefix with `tokens` (at most B).

        Of equals the one with the smallest token string; (ROOT, 0) if no child shares a token.
        """
        stem = self.serials[parent].to_bytes(8) + frame
        wanted = token_bytes(tokens)
        near = [self._order.below(stem + wanted), self._order.at_or_above(stem + wanted)]
        if self.heirs[parent] != ROOT:
            near.append(self.keys[self.heirs[parent]])
        near = [key for key in near if key.startswith(stem)]
        longest = max((_common_tokens(key[len(stem) :], wanted) for key in near), default=0)
        if not longest:
            return ROOT, 0
        start = stem + wanted[: 4 * longest]
        near.append(self._order.at_or_above(start))
        return self.node(min(key for key in near if key.startswith(start))), longest

    def publish(self, block: int, parent: int, frame: bytes, tokens: bytes) -> int:
        """Names a block, unless the name is taken; returns the block that has it.

        The parent is ROOT or a named full block.
        """
        serial = self.serials[parent]
        key = serial.to_bytes(8) + frame + tokens
        owner = self._nodes[serial % _SHARDS].setdefault(key, block)
        if owner == block:
            if self.heirs[parent] == ROOT and len(tokens) == 4 * self._block_size:
                self.heirs[parent] = block
            self.digests[block] = crc32(tokens, crc32(frame, self.digests[parent]))
            self._link(block, parent, self.next_serial, key)
        return owner

    def _link(self, block: int, parent: int, serial: int, key: bytes) -> None:
        self.keys[block] = key
        self.parents[block] = parent
        self.serials[block] = serial
        self.next_serial = serial + 1
        if self.heirs[parent] != block:
            self.others[parent] += 1
            self._order.add(key)

    def children(self, block: int) -> list[int]:
        """Named children, in no particular but a repeatable order."""
        found = [self.heirs[block]] if self.heirs[block] != ROOT else []
        if self.others[block]:
            stem = self.serials[block].to_bytes(8)
            found += [self.node(key) for key in self._order.starting_with(stem)]
        return found

    def withdraw(self, block: int) -> list[int]:
        """Takes the names of a block and all its descendants; returns them, leaves first."""
        found = [block]
        if self.heirs[block] != ROOT or self.others[block]:
            for node in found:
                found += self.children(node)
        found.reverse()
        if self.log is not None:
            self.log.withdraw(found)
        for node in found:
            self._forget(node)
        return found

    def lineage(self, blocks: list[int]) -> Int32:
        """Named blocks with all their ancestors, deepest first, equals as first met."""
        depths = {ROOT: 0}
        for block in blocks:
            path = []
            while block not in depths:
                path.append(block)
                block = self.parents[block]
            for node in reversed(path):
                depths[node] = depths[self.parents[node]] + 1
        del depths[ROOT]
        return np.array(sorted(depths, key=depths.__getitem__, reverse=True), np.int32)

    def _forget(self, block: int) -> None:
        key, parent = self.keys[block], self.parents[block]
        del self._nodes[key[7] % _SHARDS][key]
        if self.heirs[parent] == block:
            self.heirs[parent] = ROOT
        else:
            self.others[parent] -= 1
            self._order.remove(key)
        self.keys[block] = b""
        self.serials[block] = 0
        self.parents[block] = ROOT

    def load(
        self,
        blocks: list[int],
        parents: list[int],
        serials: list[int],
        keys: list[bytes],
        heirs: list[int],
        digests: list[int],
        next_serial: int,
    ) -> None:
        """Takes over saved names, given in the order of their serials."""
        self.heirs[:] = array("q", heirs)
        for block, digest in zip(blocks, digests, strict=True):
            self.digests[block] = digest
        for block, parent, serial, key in zip(blocks, parents, serials, keys, strict=True):
            self._nodes[key[7] % _SHARDS][key] = block
            self._link(block, parent, serial, key)
        self.next_serial = next_serial

    def node(self, key: bytes) -> int:
        """The block that a whole key names, or ROOT."""
        return self._nodes[key[7] % _SHARDS].get(key, ROOT)  # the serial's last byte

    def ordered_keys(self) -> list[bytes]:
        """Keys of the children that are no heirs, as the order has them."""
        return list(self._order)


def _common_tokens(a: bytes, b: bytes) -> int:
    n = min(len(a), len(b)) // 4
    for i in range(n):
        if a[4 * i : 4 * i + 4] != b[4 * i : 4 * i + 4]:
            return i
    return n
