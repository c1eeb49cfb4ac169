"""A model without arithmetic whose attention refuses a wrong entry. For tests.

The K/V entry of a token is a fingerprint of the token, its position and the fingerprint before
it, so it stands for the whole prefix. Attention walks the block table and recomputes the chain;
whatever does not belong there (foreign, stale, missing, misplaced) is an error, not a wrong answer.
Logits are a function of the last fingerprint: the next token depends on every entry.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pagedkv.cache.sanitizer import Sanitizer
from pagedkv.engine.transfers import Mover
from pagedkv.errors import GrammarError, PagedKVError
from pagedkv.scheduling.step import (
    Float32,
    Int32,
    Int64,
    Result,
    Sample,
    Step,
    TableMirror,
    Ticket,
    TokenLogprobs,
)
from pagedkv.tiers.interface import Tier, UInt8

if TYPE_CHECKING:
    from pagedkv.engine.grammar import Grammars

Bool = npt.NDArray[np.bool_]
UInt64 = npt.NDArray[np.uint64]


class ToyError(PagedKVError):
    """The toy model found something in the cache, or in a Step, that must not be there."""


def mix(value: UInt64) -> UInt64:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014), elementwise: a bijection on uint64."""
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def chain(before: UInt64, tokens: Int32, positions: Int64) -> UInt64:
    """Fingerprints of tokens that follow prefixes with fingerprints `before`; elementwise."""
    here = tokens.astype(np.uint64) | (positions.astype(np.uint64) << np.uint64(32))
    return mix(before ^ mix(here))


# Of a payload, in the canonical layout: a layer of a head of two float32, which are only carriers.
# K of a slot is its fingerprint; V is its token, and whether it is written.
NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 1, 1, 2


def payload_bytes(block_size: int) -> int:
    """Bytes of a block of the toy model."""
    return NUM_LAYERS * 2 * block_size * NUM_KV_HEADS * HEAD_DIM * 4


class ToyExecutor:
    """An Executor over `num_blocks` blocks of `block_size` slots, in plain numpy.

    weights: stands for the model's version; K/V of other weights is foreign.
    eos_token_id is drawn when the drawn token's position is in `eos_positions`; apart from that
    it is a token like any other.
    sanitizer: of the block manager, if it has one: told of every copy, write and read.
    tier: the uppermost one below the device, of blocks of `payload_bytes(block_size)`.
    grammars: what outputs of a form are drawn with; without, a form is an error of its row.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        vocab_size: int = 50,
        weights: int = 0,
        eos_token_id: int = 0,
        eos_positions: Collection[int] = (),
        sanitizer: Sanitizer | None = None,
        tier: Tier | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self.sanitizer, self._grammars = sanitizer, grammars
        self._mover = None if tier is None else Mover(self, tier)
        self.block_size, self.vocab_size = block_size, vocab_size
        self.eos_token_id, self.eos_positions = eos_token_id, frozenset(eos_positions)
        self._root = mix(np.array([weights], np.uint64))
        slots = (num_blocks + 1) * block_size
        self.tokens = np.zeros(slots, np.int32)
        self.prints = np.zeros(slots, np.uint64)
        self.written = np.zeros(slots, np.bool_)
        self._mirror = TableMirror()
        # What each table row had seen when it was last computed: (sequence, length, fingerprint).
        self._seen: dict[int, tuple[int, int, int]] = {}
        self._results: dict[Ticket, Result] = {}

    def poison(self, blocks: Int32) -> None:
        """Makes every slot of the blocks unreadable until it is written again."""
        self.written.reshape(-1, self.block_size)[blocks] = False

    def submit(self, step: Step) -> Ticket:
        """Computes at once. ToyError says which sequence and slot are wrong."""
        ticket = Ticket(step.index)
        self._results[ticket] = self._compute(step)
        return ticket

    def collect(self, ticket: Ticket) -> Result:
        return self._results.pop(ticket)

    # Cache

    def _compute(self, step: Step) -> Result:
        tables = self._mirror.apply(step, self.block_size)
        if self.sanitizer is not None:
            self.sanitizer.check_copies(step.copies)
        transfers = () if self._mover is None else self._mover.store(step)
        self._copy(step.copies)
        if self._mover is not None:
            loaded = {load.seq for load in step.loads}
            self._seen = {row: seen for row, seen in self._seen.items() if seen[0] not in loaded}
            transfers += self._mover.load(step)
        if self.sanitizer is not None:
            self.sanitizer.check_writes(step.seqs, step.query_lens, step.slots)
            self.sanitizer.check_reads(step.seqs, step.context_lens, tables)
        slots = [self._visible(step, tables, i) for i in range(len(step.seqs))]
        self._check_writes(step, slots)
        for i in range(len(step.seqs)):
            self._clear_new_blocks(step, i, slots[i])
        prints = [self._attend(step, i, slots[i]) for i in range(len(step.seqs))]
        return replace(self._answer(step, prints), transfers=transfers)

    def read(self, blocks: Int32) -> UInt8:
        """Payloads of whole blocks, unwritten slots included."""
        if self.sanitizer is not None:
            self.sanitizer.check_blocks(blocks)
        count, size = len(blocks), self.block_size
        words = np.empty((count, 2, size, 2), np.uint32)
        words[:, 0] = self.prints.reshape(-1, size)[blocks].view(np.uint32).reshape(count, size, 2)
        words[:, 1, :, 0] = self.tokens.reshape(-1, size)[blocks]
        words[:, 1, :, 1] = self.written.reshape(-1, size)[blocks]
        return words.view(np.uint8).reshape(count, -1)

    def write(self, blocks: Int32, data: UInt8) -> None:
        """Whole blocks from their payloads."""
        if self.sanitizer is not None:
            self.sanitizer.check_fills(blocks)
        count, size = len(blocks), self.block_size
        words = np.ascontiguousarray(data).view(np.uint32).reshape(count, 2, size, 2)
        prints = np.ascontiguousarray(words[:, 0]).view(np.uint64).reshape(count, size)
        self.prints.reshape(-1, size)[blocks] = prints
        self.tokens.reshape(-1, size)[blocks] = words[:, 1, :, 0]
        self.written.reshape(-1, size)[blocks] = words[:, 1, :, 1] != 0

    def copy(self, copies: Int32) -> None:
        """Copies of blocks outside of a step."""
        if self.sanitizer is not None:
            self.sanitizer.check_copies(copies)
        self._copy(copies)

    def _copy(self, copies: Int32) -> None:
        """Copies filled slots; what else stood in the destinations is gone."""
        sources, destinations = copies[:, 0].tolist(), copies[:, 1].tolist()
        if set(sources) & set(destinations) or len(set(destinations)) < len(destinations):
            raise ToyError(f"copies disturb each other: {copies.tolist()}")
        size = self.block_size
        for source, destination, filled in copies.tolist():
            if not self.written[source * size : source * size + filled].all():
                raise ToyError(f"copy of {filled} slots reads unwritten ones of block {source}")
            self.written[destination * size : (destination + 1) * size] = False
            for array in (self.tokens, self.prints, self.written):
                array[destination * size : destination * size + filled] = array[
                    source * size : source * size + filled
                ]

    def _visible(self, step: Step, tables: Int32, i: int) -> Int64:
        """Slots of positions 0 ... context_len - 1 of row i, through its table."""
        positions = np.arange(step.context_lens[i])
        blocks = tables[i, positions // self.block_size].astype(np.int64)
        if (blocks == 0).any():
            raise ToyError(f"sequence {step.seqs[i]}: the table has the null block at a used place")
        slots: Int64 = blocks * self.block_size + positions % self.block_size
        return slots

    def _check_writes(self, step: Step, slots: list[Int64]) -> None:
        """Every slot is written once, by the row whose table it is in, and seen by no other row."""
        none = np.zeros(0, np.int64)
        expected = [s[-n:] for s, n in zip(slots, step.query_lens.tolist(), strict=True)]
        if not np.array_equal(np.concatenate([none, *expected]), step.slots):
            raise ToyError(f"step {step.index}: slots and block tables disagree")
        if len(np.unique(step.slots)) < len(step.slots):
            raise ToyError(f"step {step.index}: a slot is written twice")
        writes = np.zeros(len(self.written), np.int64)
        writes[step.slots] = 1
        for i, visible in enumerate(slots):
            if writes[visible].sum() != step.query_lens[i]:
                raise ToyError(f"sequence {step.seqs[i]}: another row writes to a slot it reads")

    def _clear_new_blocks(self, step: Step, i: int, slots: Int64) -> None:
        """A write to the first slot of a block ends whatever the block held before."""
        written = slots[-int(step.query_lens[i]) :]
        self.poison((written[written % self.block_size == 0] // self.block_size).astype(np.int32))

    def _attend(self, step: Step, i: int, slots: Int64) -> UInt64:
        """Writes row i's new entries and checks the chain over all it sees.

        Returns the fingerprints of its new tokens.
        """
        count, length = int(step.query_lens[i]), int(step.context_lens[i])
        start = length - count
        first = int(step.query_lens[:i].sum())
        tokens = step.tokens[first : first + count]
        if not np.array_equal(step.positions[first : first + count], np.arange(start, length)):
            raise ToyError(f"sequence {step.seqs[i]}: positions are not {start}..{length - 1}")
        old = slots[:start]
        self._check_chain(int(step.seqs[i]), int(step.table_rows[i]), old)
        before = self.prints[old[-1:]] if start else self._root
        for slot, token, position in zip(
            slots[start:].tolist(), tokens.tolist(), range(start, length), strict=True
        ):
            before = chain(before, np.array([token], np.int32), np.array([position]))
            self.tokens[slot], self.prints[slot], self.written[slot] = token, before[0], True
        self._seen[int(step.table_rows[i])] = (int(step.seqs[i]), length, int(before[0]))
        return self.prints[slots[start:]]

    def _check_chain(self, seq: int, table_row: int, slots: Int64) -> None:
        missing = np.flatnonzero(~self.written[slots])
        if len(missing):
            raise ToyError(f"sequence {seq}: position {missing[0]} reads an unwritten slot")
        prints = self.prints[slots]
        before = np.concatenate([self._root, prints[:-1]]) if len(slots) else prints
        wrong = np.flatnonzero(prints != chain(before, self.tokens[slots], np.arange(len(slots))))
        if len(wrong):
            raise ToyError(f"sequence {seq}: the entry of position {wrong[0]} is of another prefix")
        last_seq, length, fingerprint = self._seen.get(table_row, (0, 0, 0))
        if last_seq == seq and (length != len(slots) or int(prints[-1]) != fingerprint):
            raise ToyError(
                f"sequence {seq}: {len(slots)} tokens are there now, which are not the {length} "
                "computed before"
            )

    # Tokens

    def _answer(self, step: Step, prints: list[UInt64]) -> Result:
        errors: dict[int, str] = {}
        tokens: list[int] = []
        indptr = [0]
        complete: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        if self._grammars is not None:
            self._grammars.begin()
        for i, sample in enumerate(step.samples):
            logits = self._logits(prints[sample.row][-1:])
            try:
                token, ends = self._draw_formed(sample, prints[sample.row][-1:], logits)
            except GrammarError as error:
                token, ends = None, False
                errors[sample.row] = str(error)
            if token is None:
                errors.setdefault(sample.row, "every token is forbidden")
            else:
                complete += [i] * ends
                tokens.append(token)
                top = sample.params.logprobs
                logprobs.append(None if top is None else score(logits, token, top))
            indptr.append(len(tokens))
        return Result(
            tokens=np.array(tokens, np.int32),
            indptr=np.array(indptr, np.int32),
            parents=np.array([sample.row for sample in step.samples], np.int32),
            logprobs=tuple(logprobs),
            prompt_logprobs=tuple(
                tuple(
                    score(self._logits(prints[asked.row][j : j + 1]), int(target), asked.top)
                    for j, target in enumerate(asked.targets)
                )
                for asked in step.prompt_scores
            ),
            complete=tuple(complete),
            errors=errors,
        )

    def _logits(self, fingerprint: UInt64) -> Float32:
        """float32 [V] in [0, 1), a function of the whole visible prefix."""
        vocab = np.arange(self.vocab_size, dtype=np.uint64)
        return uniform(mix(fingerprint ^ mix(vocab)))

    def _draw_formed(
        self, sample: Sample, fingerprint: UInt64, logits: Float32
    ) -> tuple[int | None, bool]:
        """A token, and whether the output's form allows nothing after it."""
        allowed = np.ones(self.vocab_size, np.bool_)
        if sample.params.structured_outputs is None:
            return self._draw(sample, fingerprint, logits, allowed), False
        if self._grammars is None:
            raise GrammarError("this toy has no grammars")
        constraint = self._grammars.constraint(sample)
        token = self._draw(sample, fingerprint, logits, constraint.allowed)
        return token, token is not None and self._grammars.advance(constraint, token)

    def _draw(
        self, sample: Sample, fingerprint: UInt64, logits: Float32, allowed: Bool
    ) -> int | None:
        allowed[list(sample.forbidden)] = False
        if not allowed.any():
            return None
        if sample.position in self.eos_positions and allowed[self.eos_token_id]:
            return self.eos_token_id
        if not sample.params.greedy:
            where = (sample.key % 2**32) | (sample.position << 32)
            noise = mix(np.array([where], np.uint64))
            logits = self._logits(fingerprint ^ noise)
        return int(np.where(allowed, logits, -1.0).argmax())


def uniform(bits: UInt64) -> Float32:
    """The upper 24 bits as float32 in [0, 1)."""
    return ((bits >> np.uint64(40)) / np.float64(2**24)).astype(np.float32)


def score(logits: Float32, token: int, top: int) -> TokenLogprobs:
    """Log-probability of a token and of the `top` best alternatives."""
    values = logits - np.log(np.exp(logits).sum())
    best = np.argsort(-logits, kind="stable")[:top]
    ids = np.concatenate([[token], best]).astype(np.int32)
    rank = 1 + int((logits > logits[token]).sum())
    return TokenLogprobs(ids, values[ids].astype(np.float32), rank)
