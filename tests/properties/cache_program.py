"""Random programs run on `BlockManager` and on the reference model, compared after every call.

A K/V oracle runs along: what an executor would have written to each slot, wiped when a block is
freed, so that a stale or foreign slot under an open sequence is seen at once.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from reference_cache import ReferenceCache, Refused

from pagedkv.cache import BlockManager, InvariantError

TENANTS = (None, "a", "b", b"a")
EXTRAS = (None,) * 9 + (b"x",)


@dataclass
class Pair:
    """One sequence under its two ids, and what the executor knows of it."""

    real: int
    model: int
    target: list[int]  # the tokens it is to be given next, if any
    public: int  # at open: what it has read does not change when truncate lowers it
    namespace: object
    extra: bytes | None
    copies: list[tuple[int, int, int]] = field(default_factory=list)  # not done yet
    slots: list[int] = field(default_factory=list)


def drain(manager: BlockManager) -> None:
    """Closes everything, so that nothing stays held behind a test."""
    for lease in list(manager.leases):
        manager.end_lease(lease)
    for row in manager.table.open_rows().tolist():
        manager.close(manager.table.seq(row))


class CacheProgram:
    def __init__(
        self, seed: int | random.Random, num_blocks: int, block_size: int, **options: Any
    ) -> None:
        """seed: of the choices, or what makes them."""
        own = isinstance(seed, random.Random)
        self.random = seed if own else random.Random(f"{seed} {num_blocks} {block_size}")
        self.size = block_size
        self.alphabet = self.random.choice((2, 3))
        self.many_tenants = self.random.random() < 0.4
        self.shape = {
            "num_blocks": num_blocks,
            "block_size": block_size,
            "prefix_caching": options.get("prefix_caching", True),
            "max_seqs": self.random.choice((4, 8, 12)),
            "max_blocks_per_seq": self.random.choice((num_blocks, max(1, num_blocks - 1))),
        }
        self.real = BlockManager(**self.shape, sanitize=options.get("sanitize", False))
        self.model = ReferenceCache(**self.shape, resistant=self.real.pool.eviction.resistant)
        self.pairs: list[Pair] = []
        self.leases: list[tuple[int, int]] = []
        self.prompts: list[list[int]] = [[]]
        self.kv: dict[int, object] = {}  # slot -> what was written there
        self.blocks: dict[int, int] = {}  # real block -> the model's
        self.closed = 0  # a real id that is no longer open
        self.log: list[str] = []

    # ---- one call on both, compared

    def both(
        self, what: str, real: Callable[[], Any], model: Callable[[], Any]
    ) -> tuple[Any, Any] | None:
        """Results of the two, or None if both refuse for the same reason."""
        self.log.append(what)
        before = self.real.snapshot()
        try:
            expected, refused = model(), None
        except Refused as error:
            expected, refused = None, error.kind
        try:
            result = real()
        except InvariantError:
            raise
        except Exception as error:
            assert type(error).__name__ == refused, (
                f"{what}: {error!r}, the model says {refused or expected!r}"
            )
            assert self.real.snapshot() == before, f"{what} was refused and changed something"
            return None
        assert refused is None, f"{what}: gave {result!r}, the model refuses with {refused}"
        return result, expected

    def asks(self, what: str, real: Callable[[], Any], model: Callable[[], Any]) -> Any:
        """A call that changes nothing and must say the same."""
        before = self.real.snapshot()
        answers = self.both(what, real, model)
        assert self.real.snapshot() == before, f"{what} changed something"
        if answers is not None:
            assert answers[0] == answers[1], f"{what}: {answers[0]}, the model says {answers[1]}"
            return answers[0]
        return None

    # ---- the state of both, compared

    def compare(self) -> None:
        real, model = self.real, self.model
        real.check()
        assert real.num_free_blocks == model.num_free()
        assert real.num_cached_blocks == len(model.order)
        assert real.num_held_blocks == len(model.held())
        assert real.num_draining_blocks == len(model.draining())
        same: list[tuple[int, int]] = []
        for pair in self.pairs:
            seq = model.seqs[pair.model]
            assert real.length(pair.real) == len(seq.tokens)
            assert real.cached_tokens(pair.real) == seq.found
            row = int(real.rows([pair.real])[0])
            same += zip(real.block_table(pair.real).tolist(), seq.blocks, strict=True)
            same.append((int(real.table.copy_sources[row]), seq.source or 0))
        same += zip(real.pool.eviction.order().tolist(), model.order, strict=True)
        for mine, theirs in self.leases:
            same += zip(real.leases[mine].tolist(), model.leases[theirs], strict=True)
        pairs = set(same)
        assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs}), (
            f"blocks are shared differently: {sorted(pairs)}"
        )
        for block, twin in pairs - {(0, 0)}:
            assert real.refcount(block) == model.refcount(twin)
            assert int(real.pool.extents[block]) == model.extent(twin)
        self.blocks = dict(sorted(pairs, key=lambda pair: pair[1]))
        for block in real.pool.free_stack().tolist():
            self.wipe(block)
        self.read_back()

    def canonical(self) -> tuple:
        """The model's state without any id: what a state key has to say, no more and no less."""
        seqs = list(self.model.seqs.values())
        sources = [seq.source for seq in seqs if seq.source is not None]
        leased = [block for ids in self.model.leases.values() for block in ids]
        rows = [block for seq in seqs for block in seq.blocks]
        number: dict[int | None, int] = {None: 0}
        for block in rows + sources + self.model.order + leased:
            number.setdefault(block, len(number))
        return (
            tuple(
                (
                    (s.part, s.extra, s.public, tuple(s.tokens), s.found, s.reserved, s.outdated),
                    number[s.source],
                    tuple(number[block] for block in s.blocks),
                )
                for s in seqs
            ),
            tuple(number[block] for block in self.model.order),
            len(self.model.protected),
            tuple(self.model.resistant and b in self.model.hot for b in number),
            tuple(self.model.ghosts),
            tuple(tuple(number[b] for b in ids) for ids in self.model.leases.values()),
            tuple(sorted((number[b], repr(name)) for b, name in self.model.names.items())),
        )

    # ---- the executor

    def wipe(self, block: int) -> None:
        for slot in range(block * self.size, (block + 1) * self.size):
            self.kv.pop(slot, None)

    def entry(
        self, pair: Pair, prefix: list[int]
    ) -> tuple[frozenset[object], bytes | None, tuple[int, ...]]:
        """Who may read the K/V outside the public part, and what it was computed from."""
        return frozenset([pair.namespace]), pair.extra, tuple(prefix)

    def take_over(self, pair: Pair, n: int) -> None:
        """The first n tokens, which the pair may have found as public ones, become its own."""
        for slot in self.real.tables([pair.real]).slots().tolist()[:n]:
            if slot in self.kv:
                readers, extra, prefix = self.kv[slot]
                self.kv[slot] = readers | {pair.namespace}, extra, prefix

    def read_back(self) -> None:
        done = [pair for pair in self.pairs if not pair.slots and not pair.copies]
        view = self.real.tables([pair.real for pair in done])
        slots = view.slots().tolist()
        for pair, length in zip(done, view.lengths.tolist(), strict=True):
            tokens = self.model.seqs[pair.model].tokens
            own, slots = slots[:length], slots[length:]
            for position, slot in enumerate(own[: len(tokens)]):
                self.readable(pair, position, slot, tokens)
        assert not slots

    def readable(self, pair: Pair, position: int, slot: int, tokens: list[int]) -> None:
        assert slot in self.kv, f"position {position} of {tokens} was never written"
        readers, extra, prefix = self.kv[slot]
        assert prefix == tuple(tokens[: position + 1]), f"slot {slot} holds {prefix}"
        assert extra == pair.extra, f"slot {slot} was written under other extra bytes"
        public = (position // self.size + 1) * self.size <= pair.public
        assert pair.namespace in readers or public, f"slot {slot} is of {readers}"

    def copy(self, pair: Pair) -> None:
        for source, destination, filled in pair.copies:
            for offset in range(filled):
                self.kv[destination * self.size + offset] = self.kv[source * self.size + offset]
        pair.copies = []

    def prepare(self, pairs: list[Pair], counts: list[int], reservation: Any, copies: Any) -> None:
        """What the reservation promises, and the executor's note of it."""
        rows = reservation.copies.tolist()
        assert len(rows) == len(copies)
        assert not {r[0] for r in rows} & {r[1] for r in rows}, "a copy source is a destination"
        slots = reservation.slots.tolist()
        for pair, count in zip(pairs, counts, strict=True):
            own, slots = slots[:count], slots[count:]
            pair.slots = own
            seq = self.model.seqs[pair.model]
            start, table = len(seq.tokens), self.real.block_table(pair.real).tolist()
            assert own == [
                table[p // self.size] * self.size + p % self.size
                for p in range(start, start + count)
            ]
            row = rows[0] if seq.source is not None else None
            if row is not None:
                rows = rows[1:]
                assert row[1] == table[start // self.size] and row[2] == start % self.size
                pair.copies = [tuple(row)]
            first_new = -(-start // self.size) - (row is not None)
            for block in table[first_new:]:
                self.wipe(block)
            if self.random.random() < 0.5:  # an executor that copies at once, or late
                self.copy(pair)
        assert not slots and not rows

    # ---- the verbs

    def prompt(self) -> list[int]:
        known = [seq.tokens for seq in self.model.seqs.values()] + self.prompts
        tokens = list(self.random.choice(known))
        cut = self.random.randint(0, len(tokens))
        if self.random.random() < 0.5:
            tokens = tokens[:cut]
        longest = self.shape["num_blocks"] * self.size
        tokens += self.tokens(self.random.randint(0, 1 + self.size))
        tokens = tokens[: longest + (self.random.random() < 0.05)]
        self.prompts = [*self.prompts[-7:], tokens]
        return tokens

    def tokens(self, n: int) -> list[int]:
        return [self.random.randrange(self.alphabet) for _ in range(n)]

    def names(self, tokens: list[int]) -> tuple[object, int, bytes | None]:
        if not self.many_tenants:
            return None, 0, self.random.choice(EXTRAS)
        public = self.random.choice((0, self.random.randint(0, len(tokens)), len(tokens)))
        if self.random.random() < 0.02:
            public = self.random.choice((-1, len(tokens) + 1))
        return self.random.choice(TENANTS), public, self.random.choice(EXTRAS)

    def match(self) -> None:
        tokens = self.prompt()
        name = self.names(tokens)
        answer = self.asks(
            f"match({tokens}, {name})",
            lambda: tuple(self.real.match(tokens, *name)),
            lambda: self.model.match(tokens, *name),
        )
        fits = len(tokens) <= self.shape["max_blocks_per_seq"] * self.size
        if answer is not None and fits and len(self.model.seqs) < self.shape["max_seqs"]:
            self.promise_of_match(tokens, name, *answer)

    def promise_of_match(self, tokens: list[int], name: Any, cached: int, demand: int) -> None:
        trial = BlockManager.restore(self.real.snapshot())
        seq = trial.open(tokens, *name)
        assert trial.cached_tokens(seq) == cached <= max(0, len(tokens) - 1)
        enough = demand <= self.real.num_free_blocks + self.real.num_cached_blocks
        rest = [len(tokens) - cached]
        assert trial.can_reserve([seq], rest) is enough
        if enough:
            trial.reserve([seq], rest)
        trial.check()
        drain(trial)

    def open(self) -> None:
        if len(self.pairs) == self.shape["max_seqs"] and self.random.random() < 0.8:
            self.close()
        tokens = self.prompt()
        name = self.names(tokens)
        ids = self.both(
            f"open({tokens}, {name})",
            lambda: self.real.open(tokens, *name),
            lambda: self.model.open(tokens, *name),
        )
        if ids is not None:
            cached = self.real.cached_tokens(ids[0])
            self.pairs.append(Pair(*ids, tokens[cached:], name[1], name[0], name[2]))

    def some(self, reserved: bool) -> list[Pair]:
        """A few pairs, nearly always such as have an open reservation or not, as asked."""
        fitting = [
            pair
            for pair in self.pairs
            if (self.model.seqs[pair.model].reserved is not None) is reserved
            or self.random.random() < 0.02
        ]
        return self.random.sample(fitting, min(len(fitting), self.random.randint(1, 4)))

    def ids(self, pairs: list[Pair]) -> tuple[list[int], list[int]]:
        """Real and model ids; now and then one that is closed, or one named twice."""
        real, model = [p.real for p in pairs], [p.model for p in pairs]
        chance = self.random.random()
        if chance < 0.02:
            return [*real, self.closed], [*model, -1]
        if chance < 0.04 and real:
            return [*real, real[0]], [*model, model[0]]
        return real, model

    def count(self, pair: Pair) -> int:
        if pair.target and self.random.random() < 0.7:
            return self.random.choice((len(pair.target), self.random.randint(1, len(pair.target))))
        return self.random.choice((0, 1, 1, 1, self.random.randint(0, 2 * self.size + 1)))

    def reserve(self) -> None:
        pairs = self.some(reserved=False)
        if not pairs and self.random.random() < 0.9:
            return
        real, model = self.ids(pairs)
        counts = [self.count(pair) for pair in pairs] + [1] * (len(real) - len(pairs))
        if counts and self.random.random() < 0.02:
            counts[-1] = -1
        self.asks(
            f"demand({model}, {counts})",
            lambda: self.real.demand(real, counts),
            lambda: self.model.plan(model, counts, None)[3],
        )
        can = self.asks(
            f"can_reserve({model}, {counts})",
            lambda: self.real.can_reserve(real, counts),
            lambda: (
                self.model.plan(model, counts, self.model.available())[3] <= self.model.available()
            ),
        )
        held_elsewhere = self.leases or any(
            seq.reserved is not None for seq in self.model.seqs.values()
        )
        results = self.both(
            f"reserve({model}, {counts})",
            lambda: self.real.reserve(real, counts),
            lambda: self.model.reserve(model, counts),
        )
        if results is not None:
            assert can is True
            self.prepare(pairs, counts, *results)
        elif can is False and not held_elsewhere:
            asked = dict(zip(model, counts, strict=True))
            need = sum(
                -(-(len(seq.tokens) + asked.get(i, 0)) // self.size)
                for i, seq in self.model.seqs.items()
            )
            assert need > self.shape["num_blocks"], "refused although everything would fit"

    def commit(self) -> None:
        pairs = self.some(reserved=True)
        if not pairs and self.random.random() < 0.9:
            return
        real, model = self.ids(pairs)
        tokens = []
        for pair in pairs:
            k = self.model.seqs[pair.model].reserved or 0
            j = k if self.random.random() < 0.7 else self.random.randint(0, k)
            if self.random.random() < 0.02:
                j = k + 1
            new = pair.target[:j]
            tokens.append(new + self.tokens(j - len(new)))
        tokens += [[0]] * (len(real) - len(pairs))
        starts = [len(self.model.seqs[pair.model].tokens) for pair in pairs]
        results = self.both(
            f"commit({model}, {tokens})",
            lambda: self.real.commit(real, tokens),
            lambda: self.model.commit(model, tokens),
        )
        if results is None:
            return
        for pair in pairs:
            self.copy(pair)
        for pair, new, start in zip(pairs, tokens, starts, strict=True):
            seq = self.model.seqs[pair.model]
            for i, slot in enumerate(pair.slots):
                rejected = i >= len(new)
                self.kv[slot] = (
                    "rejected" if rejected else self.entry(pair, seq.tokens[: start + i + 1])
                )
            pair.slots, pair.target = [], pair.target[len(new) :]

    def undo(self, pair: Pair) -> None:
        """The executor had begun to write when the reservation was called off."""
        if pair.slots and self.random.random() < 0.5:
            self.copy(pair)
            for slot in pair.slots:
                self.kv[slot] = "called off"
        pair.slots, pair.copies = [], []

    def cancel(self) -> None:
        pairs = self.some(reserved=True)
        real, model = self.ids(pairs)
        for pair in pairs:
            self.undo(pair)
        if (
            self.both(
                f"cancel({model})", lambda: self.real.cancel(real), lambda: self.model.cancel(model)
            )
            is None
        ):
            for pair in pairs:  # refused: the reservations stand, whatever was scribbled
                pair.slots = self.slots_of(pair)

    def slots_of(self, pair: Pair) -> list[int]:
        seq = self.model.seqs[pair.model]
        table = self.real.block_table(pair.real).tolist()
        start = len(seq.tokens)
        row = int(self.real.rows([pair.real])[0])
        if seq.source is not None:
            source = int(self.real.table.copy_sources[row])
            pair.copies = [(source, table[start // self.size], start % self.size)]
        return [
            table[p // self.size] * self.size + p % self.size
            for p in range(start, start + (seq.reserved or 0))
        ]

    def fork(self) -> None:
        if not self.pairs:
            return
        pair, n = (
            self.random.choice(self.some(reserved=False) or self.pairs),
            self.random.choice((0, 1, 1, 1, 1, 2, 2, -1)),
        )
        results = self.both(
            f"fork({pair.model}, {n})",
            lambda: self.real.fork(pair.real, n),
            lambda: self.model.fork(pair.model, n),
        )
        for ids in zip(*(results or ((), ())), strict=True):
            target = pair.target if self.random.random() < 0.5 else []
            self.pairs.append(Pair(*ids, list(target), pair.public, pair.namespace, pair.extra))

    def truncate(self) -> None:
        if not self.pairs:
            return
        pair = self.random.choice(self.pairs)
        tokens = self.model.seqs[pair.model].tokens
        n = self.random.randint(0, len(tokens) + (self.random.random() < 0.1))
        if n <= len(tokens):
            self.undo(pair)
            self.take_over(pair, n)  # no longer public, if they were
            pair.target = tokens[n:] if self.random.random() < 0.5 else []
        self.both(
            f"truncate({pair.model}, {n})",
            lambda: self.real.truncate(pair.real, n),
            lambda: self.model.truncate(pair.model, n),
        )

    def close(self) -> None:
        if not self.pairs:
            return
        pair = self.random.choice(self.pairs)
        self.undo(pair)
        assert self.both(
            f"close({pair.model})",
            lambda: self.real.close(pair.real),
            lambda: self.model.close(pair.model),
        )
        self.pairs.remove(pair)
        self.closed = pair.real

    def evict(self) -> None:
        k = self.random.choice((0, 1, 1, 2, self.shape["num_blocks"] + 1, -1))
        results = self.both(
            f"evict({k})", lambda: self.real.evict(k).tolist(), lambda: self.model.evict(k)
        )
        if results is not None:
            assert [self.blocks[block] for block in results[0]] == results[1]

    def reset_cache(self) -> None:
        if self.random.random() < 0.3:
            self.both("reset_cache()", self.real.reset_cache, self.model.reset_cache)

    def lease(self) -> None:
        leasable = [block for block in self.blocks if block]
        blocks = self.random.sample(leasable, min(len(leasable), self.random.randint(0, 3)))
        if blocks and self.random.random() < 0.05:
            blocks.append(blocks[0])
        twins = [self.blocks[block] for block in blocks]
        results = self.both(
            f"lease({twins})", lambda: self.real.lease(blocks).id, lambda: self.model.lease(twins)
        )
        if results is not None:
            self.leases.append(results)

    def end_lease(self) -> None:
        mine, theirs = self.random.choice(self.leases) if self.leases else (10**6, -1)
        results = self.both(
            f"end_lease({theirs})",
            lambda: self.real.end_lease(mine),
            lambda: self.model.end_lease(theirs),
        )
        if results is not None:
            self.leases.remove((mine, theirs))

    def migrate(self) -> None:
        if not self.pairs:
            return
        pair = self.random.choice(self.pairs)
        records = self.both(
            f"export_sequence({pair.model})",
            lambda: self.real.export_sequence(pair.real),
            lambda: self.model.export_sequence(pair.model),
        )
        if records is None:
            return
        results = self.both(
            "import_sequence",
            lambda: self.real.import_sequence(records[0]),
            lambda: self.model.import_sequence(records[1]),
        )
        if results is not None:
            imported, (model, copies, rest) = results
            assert imported.tokens.tolist() == rest
            new = Pair(imported.seq, model, rest, pair.public, pair.namespace, pair.extra)
            self.pairs.append(new)
            self.prepare([new], [len(rest)], imported.reservation, copies)

    def restart(self) -> None:
        """Goes on with a restored copy; the old manager is emptied and forgotten."""
        data = self.real.snapshot()
        restored = BlockManager.restore(data)
        assert restored.snapshot() == data
        assert restored.state_key() == self.real.state_key()
        drain(self.real)
        self.real = restored

    VERBS = (
        ("match", 6),
        ("open", 10),
        ("reserve", 24),
        ("commit", 22),
        ("cancel", 4),
        ("fork", 5),
        ("truncate", 6),
        ("close", 9),
        ("evict", 2),
        ("reset_cache", 1),
        ("lease", 3),
        ("end_lease", 4),
        ("migrate", 2),
    )

    def run(self, steps: int, restarts: bool) -> None:
        names, weights = zip(*self.VERBS, strict=True)
        try:
            for step in range(steps):
                getattr(self, self.random.choices(names, weights)[0])()
                self.compare()
                if restarts and step % 10 == 9:
                    self.restart()
                    self.compare()
            self.finish()
        except AssertionError as error:
            error.add_note("calls: " + "\n       ".join(self.log[-40:]))
            raise

    def finish(self) -> None:
        while self.leases:
            self.end_lease()
            self.compare()
        while self.pairs:
            self.close()
            self.compare()
        assert self.real.num_free_blocks + self.real.num_cached_blocks == self.shape["num_blocks"]
