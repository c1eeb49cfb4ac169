"""Every state that a small `BlockManager` can reach, found breadth first.

Beside the manager runs an oracle of what an executor would have stored: each slot holds the prefix
that was computed into it. The executor is the worst one the contract allows: it scribbles over
reserved slots at once and does copies only at commit; a free or newly given block is wiped. So a
block that is shared, reused or overwritten wrongly is seen in the very next state.

States are told apart by `state_key` alone. The action set, and what is left out of it because it
leads nowhere else, is in docs/decisions/0060-the-exhaustive-small-scope.md.
"""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Iterator
from functools import partial
from hashlib import blake2b
from itertools import combinations, permutations, product
from typing import Any, NamedTuple

import numpy as np

from pagedkv.cache import BlockManager, OutOfBlocks
from pagedkv.cache.index import ROOT

Word = tuple[int, ...]
ALPHABET = (0, 1)
_SCRIBBLE = (-1,)


def words(n: int) -> list[Word]:
    return list(product(ALPHABET, repeat=n))


class Scope(NamedTuple):
    num_blocks: int
    block_size: int
    longest: int  # tokens of a sequence, committed and reserved
    max_seqs: int = 2


class Sequence(NamedTuple):
    """What a sequence should read, and what its executor has still to do."""

    seq: int
    tokens: Word
    reserved: int = 0  # 0: no open reservation
    slots: tuple[int, ...] = ()
    copy: tuple[int, int, int] | None = None  # pending


class Frozen(NamedTuple):
    """A whole state: the manager's memory, the sequences by age, and the K/V by slot."""

    arrays: bytes
    plain: bytes
    sequences: tuple[Sequence, ...]
    stored: tuple[Word | None, ...]


class Memory:
    """Saves and reloads a manager in place, many times faster than `snapshot` and `restore`.

    Walks its objects once, moves all their arrays into one buffer, and knows nothing else about
    them; an attribute of a kind that it cannot save is an error.
    """

    def __init__(self, manager: BlockManager) -> None:
        self._buffer = bytearray(1 << 14)
        self._used = 0
        self._moved: dict[int, tuple[np.ndarray, int]] = {}  # by id: the array, its place
        self._objects: list[tuple[Any, list[str]]] = []
        self._walk(manager, set())

    def _walk(self, value: Any, seen: set[int]) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        plain = []
        for name in getattr(value, "__dict__", None) or value.__slots__:
            part = getattr(value, name)
            if isinstance(part, np.ndarray):
                object.__setattr__(value, name, self._move(part))
            elif type(part).__module__.startswith("pagedkv."):
                self._walk(part, seen)
            elif part is None or isinstance(part, str):
                continue  # the sanitizer that is not there, and a setting
            elif isinstance(part, int | list | dict | array):
                plain.append(name)
            else:
                raise TypeError(f"{type(value).__name__}.{name} is a {type(part).__name__}")
        if hasattr(value, "__dict__"):
            self._objects.append((value, plain))

    def _move(self, part: np.ndarray) -> np.ndarray:
        """The same array, or view of an array, in the buffer."""
        owner = part if part.base is None else part.base
        if id(owner) not in self._moved:
            self._moved[id(owner)] = owner, self._used
            self._used += -(-owner.nbytes // 8) * 8
        place = self._moved[id(owner)][1]
        place += part.__array_interface__["data"][0] - owner.__array_interface__["data"][0]
        moved = np.ndarray(part.shape, part.dtype, self._buffer, place, part.strides)
        moved[...] = part
        return moved

    def save(self) -> tuple[bytes, bytes]:
        plain = [[getattr(value, name) for name in names] for value, names in self._objects]
        return bytes(self._buffer[: self._used]), pickle.dumps(plain, 5)

    def load(self, arrays: bytes, plain: bytes) -> None:
        memoryview(self._buffer)[: self._used] = arrays
        for (value, names), parts in zip(self._objects, pickle.loads(plain), strict=True):
            value.__dict__.update(zip(names, parts, strict=True))


class Explorer:
    """Runs one action after another on one manager; `explore` runs them all."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.size = scope.block_size
        self.manager = BlockManager(scope.num_blocks, self.size, max_seqs=scope.max_seqs)
        self.memory = Memory(self.manager)
        self.sequences: list[Sequence] = []
        self.stored: list[Word | None] = [None] * ((scope.num_blocks + 1) * self.size)
        self.states = self.transitions = 0
        self.refused = False  # the last action

    def explore(self) -> None:
        """Visits every reachable state once and takes every transition out of it."""
        seen = {self.key()}
        self.inspect()
        frontier = [self.freeze()]
        while frontier:
            found = []
            for state in frontier:
                self.states += 1
                self.thaw(state)
                before = key = self.key()
                for action in list(self.actions()):
                    if key != before:  # after a refusal nothing has to be undone
                        self.thaw(state)
                    self.take(action)
                    key = self.key()
                    assert key == before or not self.refused, "a refusal changed something"
                    if key not in seen:
                        seen.add(key)
                        self.inspect()
                        found.append(self.freeze())
            frontier = found

    def take(self, action: partial[None]) -> None:
        self.transitions += 1
        self.refused = False
        try:
            action()
            self.wipe_free()
            self.read_back()
        except Exception as error:
            error.add_note(f"{action.func.__name__}{action.args} after {self.sequences}")
            raise

    def key(self) -> bytes:
        self.manager.table.found[:] = 0
        return blake2b(self.manager.state_key(), digest_size=16).digest()

    def freeze(self) -> Frozen:
        return Frozen(*self.memory.save(), tuple(self.sequences), tuple(self.stored))

    def thaw(self, state: Frozen) -> None:
        self.memory.load(state.arrays, state.plain)
        self.sequences, self.stored = list(state.sequences), list(state.stored)

    def drain(self) -> None:
        for sequence in self.sequences:
            self.manager.close(sequence.seq)
        self.sequences = []

    # ---- what can be done now

    def actions(self) -> Iterator[partial[None]]:
        idle = [i for i, s in enumerate(self.sequences) if not s.reserved]
        busy = [i for i, s in enumerate(self.sequences) if s.reserved]
        if len(self.sequences) < self.scope.max_seqs:
            for word in self.known_words():
                yield partial(self.open, word)
            for i in idle:
                yield partial(self.fork, i)
        for n in range(1, len(idle) + 1):
            for places in self.orders(idle, n):
                yield from self.reservations(places)
        for i in busy:
            yield partial(self.cancel, i)
            for j in range(self.sequences[i].reserved + 1):
                for word in words(j):
                    yield partial(self.commit, (i,), (word,))
        for n in range(2, len(busy) + 1):
            for places in combinations(busy, n):
                for new in product(*(words(self.sequences[i].reserved) for i in places)):
                    yield partial(self.commit, places, new)
        for i, sequence in enumerate(self.sequences):
            for n in range(len(sequence.tokens)):
                yield partial(self.truncate, i, n)
            yield partial(self.close, i)
        if self.manager.num_cached_blocks:
            yield partial(self.evict)

    def orders(self, idle: list[int], n: int) -> Iterator[Word]:
        """Groups of n; in every order if all have a partly filled tail to write to or copy."""
        for places in combinations(idle, n):
            if all(len(self.sequences[i].tokens) % self.size for i in places):
                yield from permutations(places)
            else:
                yield places

    def reservations(self, places: Word) -> Iterator[partial[None]]:
        """Of those that are refused only the least: whatever asks for more is refused too."""
        seqs = [self.sequences[i].seq for i in places]
        refused: list[Word] = []
        for counts in product(*(self.counts(i, len(places) > 1) for i in places)):
            if any(all(a <= b for a, b in zip(least, counts, strict=True)) for least in refused):
                continue
            promised = self.manager.can_reserve(seqs, counts)
            if not promised:
                refused.append(counts)
            yield partial(self.reserve, places, counts, promised)

    def counts(self, i: int, joint: bool) -> list[int]:
        """Tokens to reserve; in a joint call only one count for each number of new blocks."""
        start, longest = len(self.sequences[i].tokens), self.scope.longest
        counts = range(1, longest - start + 1)
        if not joint:
            return list(counts)
        return [k for k in counts if (start + k) % self.size == 0 or start + k == longest]

    def known_words(self) -> list[Word]:
        """Prefixes of what is published that leave room for a token: all that `open` can find."""
        found = {()}
        for block in np.flatnonzero(self.manager.pool.extents).tolist():
            chain = self.chain(block)
            found |= {chain[:n] for n in range(1, min(len(chain), self.scope.longest - 1) + 1)}
        return sorted(found)

    def chain(self, block: int) -> Word:
        """The whole prefix that a published block's name stands for."""
        chain: Word = ()
        while block != ROOT:
            extent = self.manager.pool.extents[block]
            chain = (*self.manager.contents[block, :extent].tolist(), *chain)
            block = self.manager.index.parents[block]
        return chain

    # ---- the actions

    def open(self, word: Word) -> None:
        prompt = [*word, 0]
        fits = self.manager.match(prompt).demand <= self.available()
        seq = self.manager.open(prompt)
        assert self.manager.cached_tokens(seq) == len(word)
        self.sequences.append(Sequence(seq, word))
        assert self.manager.can_reserve([seq], [1]) == fits, "the demand was wrong"

    def fork(self, i: int) -> None:
        parent = self.sequences[i]
        (seq,) = self.manager.fork(parent.seq)
        self.sequences.append(parent._replace(seq=seq))

    def reserve(self, places: Word, counts: Word, promised: bool) -> None:
        seqs = [self.sequences[i].seq for i in places]
        try:
            result = self.manager.reserve(seqs, counts)
        except OutOfBlocks:
            self.refused = True
            assert not promised, "refused although can_reserve said yes"
            self.refused_rightly(dict(zip(places, counts, strict=True)))
            return
        assert promised, "succeeded although can_reserve said no"
        slots, copies = result.slots.tolist(), result.copies.tolist()
        assert not {c[0] for c in copies} & {c[1] for c in copies}
        destinations = {copy[1]: copy for copy in copies}
        tables = self.tables()
        for i, count in zip(places, counts, strict=True):
            sequence = self.sequences[i]
            own, slots = slots[:count], slots[count:]
            table, start = tables[sequence.seq], len(sequence.tokens)
            assert own == [self.slot(table, p) for p in range(start, start + count)]
            index, fill = divmod(start, self.size)
            copy = destinations.pop(table[index], None)
            assert copy is None or copy[2] == fill > 0
            for block in table[index + (fill > 0 and copy is None) :]:
                self.wipe(block)  # entries past the end are the null block
            self.sequences[i] = sequence._replace(
                reserved=count, slots=tuple(own), copy=tuple(copy) if copy else None
            )
        assert not slots and not destinations
        for i in places:
            for slot in self.sequences[i].slots:
                self.stored[slot] = _SCRIBBLE

    def refused_rightly(self, asked: dict[int, int]) -> None:
        """Only if the sequences would not fit without any sharing, or a reservation is open."""
        if any(s.reserved for s in self.sequences):
            return
        lengths = [len(s.tokens) + asked.get(i, 0) for i, s in enumerate(self.sequences)]
        assert sum(-(-n // self.size) for n in lengths) > self.scope.num_blocks

    def commit(self, places: Word, new: tuple[Word, ...]) -> None:
        chosen = [self.sequences[i] for i in places]
        self.manager.commit([s.seq for s in chosen], new)
        for s in chosen:
            if s.copy is not None:
                source, destination, filled = s.copy
                for offset in range(filled):
                    content = self.stored[source * self.size + offset]
                    self.stored[destination * self.size + offset] = content
        for i, s, word in zip(places, chosen, new, strict=True):
            tokens = s.tokens + word
            for j, slot in enumerate(s.slots[: len(word)]):
                self.stored[slot] = tokens[: len(s.tokens) + j + 1]
            self.sequences[i] = Sequence(s.seq, tokens)

    def cancel(self, i: int) -> None:
        sequence = self.sequences[i]
        self.manager.cancel([sequence.seq])
        self.sequences[i] = Sequence(sequence.seq, sequence.tokens)

    def truncate(self, i: int, n: int) -> None:
        sequence = self.sequences[i]
        self.manager.truncate(sequence.seq, n)
        self.sequences[i] = Sequence(sequence.seq, sequence.tokens[:n])

    def close(self, i: int) -> None:
        self.manager.close(self.sequences.pop(i).seq)

    def evict(self) -> None:
        before = self.available()
        assert len(self.manager.evict(1)) == 1
        assert self.available() == before

    # ---- what must hold

    def available(self) -> int:
        return self.manager.num_free_blocks + self.manager.num_cached_blocks

    def tables(self) -> dict[int, list[int]]:
        """Whole rows of the block table by sequence."""
        table = self.manager.table
        return dict(zip(table.seqs.tolist(), table.blocks.tolist(), strict=True))

    def slot(self, table: list[int], position: int) -> int:
        return table[position // self.size] * self.size + position % self.size

    def wipe(self, block: int) -> None:
        self.stored[block * self.size : (block + 1) * self.size] = [None] * self.size

    def wipe_free(self) -> None:
        for block in self.manager.pool.free_stack().tolist():
            self.wipe(block)

    def read_back(self) -> None:
        """After every transition: each sequence reads its own prefixes and nothing else."""
        tables = self.tables()
        for sequence in self.sequences:
            tokens, table = sequence.tokens, tables[sequence.seq]
            if sequence.copy is not None:  # not done yet: what it copies is still in the source
                table[len(tokens) // self.size] = sequence.copy[0]
            for position in range(len(tokens)):
                found = self.stored[self.slot(table, position)]
                assert found == tokens[: position + 1], (
                    f"position {position} of {tokens} reads {found} in block table {table}"
                )

    def inspect(self) -> None:
        """In every state: the invariants, what a later hit would read, and what it would find."""
        manager = self.manager
        manager.check()
        for sequence in self.sequences:
            length = len(sequence.tokens)
            assert manager.length(sequence.seq) == length
            blocks = -(-(length + sequence.reserved) // self.size)
            assert len(manager.block_table(sequence.seq)) == blocks
        for block in np.flatnonzero(manager.pool.extents).tolist():
            chain, extent = self.chain(block), int(manager.pool.extents[block])
            for offset in range(extent):
                prefix = chain[: len(chain) - extent + offset + 1]
                found = self.stored[block * self.size + offset]
                assert found == prefix, f"block {block} is published as {prefix}, holds {found}"
        known = set(self.known_words())
        for word in known:
            for letter in ALPHABET:
                longer = (*word, letter)
                if longer not in known and len(longer) < self.scope.longest:
                    assert manager.match([*longer, 0]).cached_tokens == len(word)
