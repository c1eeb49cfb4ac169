"""Every state that a small `BlockManager` can reach, found breadth first.

Beside the manager runs an oracle of what an executor would have stored: each slot holds the prefix
that was computed into it. The executor is the worst one the contract allows: it scribbles over
reserved slots at once and does copies only at commit; a free or newly given block is wiped. So a
block that is shared, reused or overwritten wrongly is seen in the very next state.

States are told apart by `state_key` alone. The action set, and what is left out of it because it
leads nowhere else, is in docs/decisions/0060-the-exhaustive-small-scope.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from hashlib import blake2b
from itertools import chain, combinations, permutations, product
from typing import Any, NamedTuple

import numpy as np
from manager_memory import Memory
from wrong_calls import wrong_calls

from pagedkv.cache import BlockManager, OutOfBlocks
from pagedkv.cache.index import ROOT

Word = tuple[int, ...]
Reserve = tuple[Word, Word]  # places of sequences, tokens for each
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

    def explore(self) -> None:
        """Visits every reachable state once and takes every transition out of it."""
        seen = {self.key()}
        self.inspect()
        frontier = [self.freeze()]
        while frontier:
            found = []
            for state in frontier:
                self.states += 1
                for _, key in self.successors(state):
                    if key not in seen:
                        seen.add(key)
                        self.inspect()
                        found.append(self.freeze())
            frontier = found

    def successors(self, state: Frozen) -> Iterator[tuple[partial[None], bytes]]:
        """Each action that succeeds and the key of where it leads; the manager stands there."""
        self.thaw(state)
        granted, refused = self.reservations()
        self.refuse(refused)
        assert self.memory.save() == (state.arrays, state.plain), "a refusal changed something"
        for nth, action in enumerate([*granted, *self.actions()]):
            if nth:
                self.thaw(state)
            self.take(action)
            yield action, self.key()

    def take(self, action: partial[None]) -> None:
        self.transitions += 1
        try:
            action()
            self.wipe_free()
            self.read_back()
        except Exception as error:
            error.add_note(f"{action.func.__name__}{action.args} after {self.sequences}")
            raise

    def refuse(self, reservations: list[Reserve]) -> None:
        """Makes every call that is wrong here."""
        self.transitions += len(reservations)
        for places, counts in reservations:
            self.refused_rightly(dict(zip(places, counts, strict=True)))
            seqs = [self.sequences[i].seq for i in places]
            self.expect(OutOfBlocks, partial(self.manager.reserve, seqs, counts))
        for kind, call in wrong_calls(self.manager, self.sequences):
            self.expect(kind, call)

    def expect(self, kind: type[Exception], call: partial[Any]) -> None:
        try:
            call()
        except kind:
            return
        raise AssertionError(
            f"{call.func.__name__}{call.args} was not refused after {self.sequences}"
        )

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
        """Groups of n; those that have a partly filled tail to write to or copy in every order."""
        for places in combinations(idle, n):
            writers = [i for i in places if len(self.sequences[i].tokens) % self.size]
            others = [i for i in places if i not in writers]
            for order in permutations(writers):
                yield (*order, *others)

    def reservations(self) -> tuple[list[partial[None]], list[Reserve]]:
        """Those that succeed, and of the others only the least: what asks for more fails too."""
        granted: list[partial[None]] = []
        refused: list[Reserve] = []
        idle = [i for i, s in enumerate(self.sequences) if not s.reserved]
        for places in chain.from_iterable(self.orders(idle, n + 1) for n in range(len(idle))):
            seqs = [self.sequences[i].seq for i in places]
            least: list[Word] = []
            for counts in product(*(self.counts(i, len(places) > 1) for i in places)):
                if any(all(a <= b for a, b in zip(few, counts, strict=True)) for few in least):
                    continue
                if self.manager.can_reserve(seqs, counts):
                    granted.append(partial(self.reserve, places, counts))
                else:
                    least.append(counts)
            refused += [(places, counts) for counts in least]
        return granted, refused

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

    def reserve(self, places: Word, counts: Word) -> None:
        result = self.manager.reserve([self.sequences[i].seq for i in places], counts)
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
