"""The block manager's contract in plain Python: lists, dicts and tuples, everything by scanning.

Slow and obviously right. A block is a number that is never used again, so nothing can depend on
which free block is handed out. A name is the whole chain of (part, extra, tokens) from the first
block on: equal names mean equal content because they are the content.

Readings of the contract where its words leave room:
* any open lease on a tail forces a copy;
* under shortage the writer that point 2 picked may withdraw the name even if others, all of them
  writers of the call, share the block;
* `demand` counts neither held full hits nor draining ones: they take nothing from the available;
* `evict(k)` returns the blocks evicted;
* when a lease ends, what becomes cached goes in deepest first (of equals in the lease's order),
  together with its cached ancestors, so that leaves stay the first to go.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Name = tuple  # of (part, extra, tokens), first block first


class Refused(Exception):
    """A call that the contract refuses; `kind` is the name of the error's type."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


@dataclass
class Sequence:
    part: tuple
    extra: bytes | None
    public: int
    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    found: int = 0
    outdated: bool = False  # has K/V from before a reset
    reserved: int | None = None
    source: int | None = None


class ReferenceCache:
    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_caching: bool,
        max_seqs: int,
        max_blocks_per_seq: int,
        resistant: bool = False,
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.prefix_caching = prefix_caching
        self.max_seqs, self.max_blocks_per_seq = max_seqs, max_blocks_per_seq
        self.seqs: dict[int, Sequence] = {}  # oldest first
        self.names: dict[int, Name] = {}  # block -> name, in the order they were given
        # Cached blocks, first to be evicted first; a pool that resists no scan has no protected.
        self.resistant = resistant
        self.probation: list[int] = []
        self.protected: list[int] = []
        self.hot: set[int] = set()  # used again since they were named
        self.ghosts: list[Name] = []  # names of evicted blocks
        self.leases: dict[int, list[int]] = {}
        self.blocks_made = self.seqs_made = self.leases_made = 0

    # ---- the order of eviction

    @property
    def order(self) -> list[int]:
        return self.probation + self.protected

    def park(self, blocks: list[int]) -> None:
        """Blocks that have become cached together."""
        hot = [block for block in blocks if self.resistant and block in self.hot]
        self.probation += [block for block in blocks if block not in hot]
        self.protected += hot
        while len(self.protected) > self.num_blocks // 4:
            self.probation.append(self.protected.pop(0))

    def unpark(self, block: int) -> None:
        for ring in (self.probation, self.protected):
            if block in ring:
                ring.remove(block)

    def evict_first(self) -> int:
        block = self.order[0]
        if self.resistant:
            name = self.names[block]
            self.ghosts = [ghost for ghost in self.ghosts if ghost != name] + [name]
            self.ghosts = self.ghosts[-2 * self.num_blocks :]
        self.withdraw(block)
        return block

    def recall(self, seq: Sequence, i: int, name: Name) -> None:
        """Block i of the sequence has just got a name; if it had it before it was used again."""
        if name in self.ghosts:
            self.ghosts.remove(name)
            self.hot |= set(seq.blocks[: i + 1])

    # ---- looking

    def refcount(self, block: int) -> int:
        entries = sum(seq.blocks.count(block) for seq in self.seqs.values())
        return entries + sum(seq.source == block for seq in self.seqs.values())

    def leased(self, block: int) -> bool:
        return any(block in ids for ids in self.leases.values())

    def held(self) -> set[int]:
        sources = {seq.source for seq in self.seqs.values() if seq.source is not None}
        return sources.union(*(seq.blocks for seq in self.seqs.values()))

    def draining(self) -> set[int]:
        return set().union(*self.leases.values()) - self.held()

    def num_free(self) -> int:
        return self.num_blocks - len(self.held()) - len(self.draining()) - len(self.order)

    def available(self) -> int:
        return self.num_free() + len(self.order)

    def extent(self, block: int) -> int:
        return len(self.names[block][-1][2]) if block in self.names else 0

    def get(self, seq: int) -> Sequence:
        if seq not in self.seqs:
            raise Refused("KeyError")
        return self.seqs[seq]

    def get_all(self, seqs: list[int]) -> list[Sequence]:
        found = [self.get(seq) for seq in seqs]
        if len(set(seqs)) < len(seqs):
            raise Refused("ValueError")
        return found

    # ---- names

    def name(self, seq: Sequence, i: int, parent: Name, tokens: list[int]) -> Name:
        public = (i + 1) * self.block_size <= seq.public
        return (*parent, (("public",) if public else seq.part, seq.extra, tuple(tokens)))

    def named(self, name: Name) -> int | None:
        return next((block for block, known in self.names.items() if known == name), None)

    def withdraw(self, block: int) -> None:
        """Takes the name of a block and the names of all its descendants."""
        if block not in self.names:
            return
        stem = self.names[block]
        for other in [b for b, name in self.names.items() if name[: len(stem)] == stem]:
            del self.names[other]
            self.hot.discard(other)
            self.unpark(other)

    def look_up(self, asked: Sequence, tokens: list[int]) -> tuple[list[int], int | None, int]:
        """(full hits, partial hit, cached tokens); at least one token is left to compute."""
        size, most = self.block_size, len(tokens) - 1
        hits: list[int] = []
        parent: Name = ()
        if not self.prefix_caching:
            return hits, None, 0
        while (len(hits) + 1) * size <= most:
            start = len(hits) * size
            name = self.name(asked, len(hits), parent, tokens[start : start + size])
            block = self.named(name)
            if block is None:
                break
            hits.append(block)
            parent = name
        start = len(hits) * size
        rest = tokens[start : min(start + size, max(most, 0))]
        best: tuple[int, tuple, int] | None = None
        part, extra, _ = self.name(asked, len(hits), parent, rest)[-1]
        for block, name in self.names.items():
            if name[:-1] == parent and name[-1][:2] == (part, extra):
                content = name[-1][2]
                common = 0
                while common < min(len(rest), len(content)) and rest[common] == content[common]:
                    common += 1
                if common and (best is None or (-common, content) < (-best[0], best[1])):
                    best = common, content, block
        if best is None:
            return hits, None, start
        return hits, best[2], start + best[0]

    # ---- holding and letting go

    def hold(self, block: int) -> int:
        self.unpark(block)
        return block

    def let_go(self, *blocks: int) -> None:
        """Called after entries or sources have gone; the last mention of a block counts."""
        self.park(
            [
                block
                for i, block in enumerate(blocks)
                if block not in blocks[i + 1 :]
                and self.refcount(block) == 0
                and not self.leased(block)
                and block in self.names
            ]
        )

    def new_block(self) -> int:
        self.blocks_made += 1
        return self.blocks_made

    def drop_entries(self, seq: Sequence, keep_tokens: int) -> None:
        gone = []
        while len(seq.blocks) > -(-keep_tokens // self.block_size):
            gone.append(seq.blocks.pop())
        self.let_go(*gone)

    # ---- the verbs

    def asked(self, namespace: object, public: int, extra: bytes | None) -> Sequence:
        return Sequence(("private", type(namespace).__name__, namespace), extra, public)

    def match(self, tokens, namespace, public, extra) -> tuple[int, int]:
        if not 0 <= public <= len(tokens):
            raise Refused("ValueError")
        hits, _, cached = self.look_up(self.asked(namespace, public, extra), tokens)
        in_use = [hit for hit in hits if self.refcount(hit) or self.leased(hit)]
        return cached, -(-len(tokens) // self.block_size) - len(in_use)

    def open(self, tokens, namespace, public, extra) -> int:
        if not 0 <= public <= len(tokens):
            raise Refused("ValueError")
        return self.open_as(self.asked(namespace, public, extra), tokens)

    def open_as(self, seq: Sequence, tokens: list[int]) -> int:
        if len(tokens) > self.max_blocks_per_seq * self.block_size:
            raise Refused("ValueError")
        if len(self.seqs) == self.max_seqs:
            raise Refused("OutOfSequences")
        hits, partial, cached = self.look_up(seq, tokens)
        seq.blocks = [self.hold(b) for b in hits + ([] if partial is None else [partial])]
        self.hot |= set(seq.blocks)
        seq.tokens, seq.found = tokens[:cached], cached
        return self.add(seq)

    def add(self, seq: Sequence) -> int:
        self.seqs_made += 1
        self.seqs[self.seqs_made] = seq
        return self.seqs_made

    def plan(self, ids: list[int], counts: list[int], available: int | None):
        """The write rule. (copying sequences, blocks to withdraw, blocks needed)."""
        seqs = self.get_all(ids)
        if len(counts) != len(seqs) or any(k < 0 for k in counts):
            raise Refused("ValueError")
        size = self.block_size
        if any(seq.reserved is not None for seq in seqs):
            raise Refused("ValueError")
        if any(
            len(s.tokens) + k > self.max_blocks_per_seq * size
            for s, k in zip(seqs, counts, strict=True)
        ):
            raise Refused("ValueError")
        writers = [s for s, k in zip(seqs, counts, strict=True) if k and len(s.tokens) % size]
        new = sum(
            -(-(len(s.tokens) + k) // size) - len(s.blocks)
            for s, k in zip(seqs, counts, strict=True)
        )
        copying, withdrawn, saving = [], [], []
        for writer in writers:
            block, fill = writer.blocks[-1], len(writer.tokens) % size
            same = [w for w in writers if w.blocks[-1] == block]
            if self.leased(block) or self.refcount(block) != len(same):
                copying.append(writer)  # somebody else sees it
                continue
            longest = max(len(w.tokens) for w in same)
            last = [w for w in same if len(w.tokens) == longest][-1]
            if writer is not last:
                copying.append(writer)
            elif self.extent(block) > fill:
                copying.append(writer)
                saving.append(writer)
            elif self.extent(block) == fill:
                withdrawn.append(block)
        if available is not None:
            for writer in saving:
                if new + len(copying) > available:
                    copying = [w for w in copying if w is not writer]
                    withdrawn.append(writer.blocks[-1])
        return seqs, copying, withdrawn, new + len(copying)

    def reserve(self, ids: list[int], counts: list[int]):
        """(copies as (source, destination, filled), in call order)."""
        seqs, copying, withdrawn, need = self.plan(ids, counts, self.available())
        if need > self.available():
            raise Refused("OutOfBlocks")
        for block in withdrawn:
            self.withdraw(block)
        while self.num_free() < need:
            self.evict_first()
        copies = []
        for seq, count in zip(seqs, counts, strict=True):
            if any(seq is writer for writer in copying):
                seq.source = seq.blocks[-1]
                seq.blocks[-1] = self.new_block()
                copies.append((seq.source, seq.blocks[-1], len(seq.tokens) % self.block_size))
            while len(seq.blocks) * self.block_size < len(seq.tokens) + count:
                seq.blocks.append(self.new_block())
            seq.reserved = count
        return copies

    def commit(self, ids: list[int], tokens: list[list[int]]) -> None:
        seqs = self.get_all(ids)
        if len(tokens) != len(seqs):
            raise Refused("ValueError")
        for seq, new in zip(seqs, tokens, strict=True):
            if seq.reserved is None or len(new) > seq.reserved:
                raise Refused("ValueError")
        sources = [seq.source for seq in seqs if seq.source is not None]
        for seq in seqs:
            seq.source = None
        self.let_go(*sources)
        for seq, new in zip(seqs, tokens, strict=True):
            first = len(seq.tokens) // self.block_size
            seq.tokens += new
            seq.reserved = None
            self.drop_entries(seq, len(seq.tokens))
            if self.prefix_caching:
                for i in range(first, len(seq.tokens) // self.block_size):
                    self.publish_full(seq, i)

    def parent_name(self, seq: Sequence, i: int) -> Name | None:
        """None if the parent has no name: its child is never published."""
        if i == 0:
            return None if seq.outdated else ()
        return self.names.get(seq.blocks[i - 1])

    def publish_full(self, seq: Sequence, i: int) -> None:
        parent = self.parent_name(seq, i)
        if parent is None:
            return
        size = self.block_size
        name = self.name(seq, i, parent, seq.tokens[i * size : (i + 1) * size])
        known = self.named(name)
        own = seq.blocks[i]
        if known is None:
            self.names[own] = name
            self.recall(seq, i, name)
        else:
            seq.blocks[i] = self.hold(known)
            self.let_go(own)

    def cancel(self, ids: list[int]) -> None:
        seqs = self.get_all(ids)
        if any(seq.reserved is None for seq in seqs):
            raise Refused("ValueError")
        for seq in seqs:
            self.end_reservation(seq)

    def end_reservation(self, seq: Sequence) -> None:
        self.drop_entries(seq, len(seq.tokens))
        if seq.source is not None:
            copy, seq.blocks[-1], seq.source = seq.blocks[-1], seq.source, None
            self.let_go(copy)
        seq.reserved = None

    def fork(self, seq_id: int, n: int) -> list[int]:
        seq = self.get(seq_id)
        if n < 0 or seq.reserved is not None:
            raise Refused("ValueError")
        if len(self.seqs) + n > self.max_seqs:
            raise Refused("OutOfSequences")
        return [
            self.add(
                Sequence(
                    seq.part,
                    seq.extra,
                    seq.public,
                    list(seq.tokens),
                    list(seq.blocks),
                    seq.found,
                    seq.outdated,
                )
            )
            for _ in range(n)
        ]

    def truncate(self, seq_id: int, n: int) -> None:
        seq = self.get(seq_id)
        if not 0 <= n <= len(seq.tokens):
            raise Refused("ValueError")
        self.end_reservation(seq)
        self.drop_entries(seq, n)
        del seq.tokens[n:]
        seq.public = min(seq.public, n)
        seq.outdated = seq.outdated and n > 0

    def close(self, seq_id: int) -> None:
        seq = self.get(seq_id)
        self.end_reservation(seq)
        i, fill = divmod(len(seq.tokens), self.block_size)
        if fill and self.prefix_caching:
            block, parent = seq.blocks[i], self.parent_name(seq, i)
            if self.refcount(block) == 1 and block not in self.names and parent is not None:
                name = self.name(seq, i, parent, seq.tokens[i * self.block_size :])
                if self.named(name) is None:
                    self.names[block] = name
                    self.recall(seq, i, name)
        self.drop_entries(seq, 0)
        del self.seqs[seq_id]

    def evict(self, k: int) -> list[int]:
        if k < 0:
            raise Refused("ValueError")
        evicted = []
        while self.order and len(evicted) < k:
            evicted.append(self.evict_first())
        return evicted

    def reset_cache(self) -> None:
        self.names.clear()
        self.probation.clear()
        self.protected.clear()
        self.hot.clear()
        for seq in self.seqs.values():
            seq.outdated = seq.outdated or bool(seq.tokens) or bool(seq.reserved)

    def lease(self, blocks: list[int]) -> int:
        if len(set(blocks)) < len(blocks):
            raise Refused("ValueError")
        for block in blocks:
            self.unpark(block)
        self.leases_made += 1
        self.leases[self.leases_made] = list(blocks)
        return self.leases_made

    def end_lease(self, lease: int) -> None:
        if lease not in self.leases:
            raise Refused("KeyError")
        idle = [
            block
            for block in self.leases.pop(lease)
            if not self.leased(block) and not self.refcount(block) and block in self.names
        ]
        self.park(idle)
        lineage: list[int] = []
        for block in idle:
            for length in range(1, len(self.names[block]) + 1):
                node = self.named(self.names[block][:length])
                if node in self.order and node not in lineage:
                    lineage.append(node)
        lineage.sort(key=lambda node: -len(self.names[node]))
        for block in lineage:
            self.unpark(block)
        self.park(lineage)

    def export_sequence(self, seq_id: int) -> Sequence:
        seq = self.get(seq_id)
        if seq.reserved is not None:
            raise Refused("ValueError")
        return Sequence(seq.part, seq.extra, seq.public, list(seq.tokens))

    def import_sequence(self, facts: Sequence):
        """Opens by name and reserves the rest, or does nothing."""
        tokens = list(facts.tokens)
        asked = Sequence(facts.part, facts.extra, facts.public)
        hits, _, _ = self.look_up(asked, tokens)
        in_use = [hit for hit in hits if self.refcount(hit) or self.leased(hit)]
        if -(-len(tokens) // self.block_size) - len(in_use) > self.available():
            raise Refused("OutOfBlocks")
        seq_id = self.open_as(asked, tokens)
        rest = tokens[len(self.seqs[seq_id].tokens) :]
        return seq_id, self.reserve([seq_id], [len(rest)]), rest
