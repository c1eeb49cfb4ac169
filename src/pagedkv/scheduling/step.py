"""One step as plain values: what to compute (`Step`), what came of it (`Result`).

`Executor` is who does it. Arrays and numbers only, no reference to a live object, so an executor
may live in another process.

Symbols: n rows, T tokens of the step, c copies, r changed table rows, w table width, m samples.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, NewType, Protocol

import numpy as np
import numpy.typing as npt

from pagedkv.scheduling.params import SamplingParams

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]

Ticket = NewType("Ticket", int)


class Sample(NamedTuple):
    """Draw one token from the logits at the last position of a row.

    Several samples may name one row (n > 1: the forks of a freshly computed prompt).
    """

    row: int  # index into the rows of the Step
    params: SamplingParams
    key: int  # seed + sample index: with `position` it fixes the random number
    position: int  # absolute position of the token to be drawn
    best: bool = False  # take the most likely token: `params` asks for nothing else, nor may it be
    forbidden: tuple[int, ...] = ()  # token ids that may not be drawn (min_tokens)
    # Prompt and output so far, only when a penalty needs them; the output also for the mask that
    # `params.structured_outputs` makes of it.
    prompt: Int32 | None = None
    output: Int32 | None = None


@dataclass(frozen=True, slots=True)
class PromptScore:
    """Report log-probabilities of known prompt tokens for one row.

    `targets[i]` is the token that follows the row's i-th token of this step; there may be fewer
    targets than tokens (nothing follows the last prompt token).
    """

    row: int
    targets: Int32
    top: int  # alternatives to report beside the target


@dataclass(frozen=True, slots=True)
class Transfer:
    """Whole blocks on their way to a lower tier (a store) or from one (a load)."""

    id: int  # never used again
    seq: int  # whose blocks a load fills; 0 for a store
    blocks: Int32  # [k]
    names: tuple[bytes, ...]  # of each block, outside the process
    tokens: tuple[bytes, ...]  # of each block, to be compared where a name is found


@dataclass(frozen=True, slots=True)
class Step:
    """What one iteration computes.

    `slots`, `copies` and tables are ids only; the executor owns the tensors. Copies
    (source block, destination block, filled slots) are done before any slot is written.
    `context_lens[i]` is the length of row i after this step, so its new tokens stand at positions
    `context_lens[i] - query_lens[i] ... context_lens[i] - 1`. `changed_tables` holds the rows of
    the block table that changed since the last Step, padded with block 0.

    Blocks to be stored are read before anything is copied or written, blocks to be loaded are
    written after the copies. A step may consist of transfers alone, and of nothing: then it waits
    for a transfer of an earlier one.
    """

    index: int
    seqs: Int64  # [n] sequence ids
    table_rows: Int32  # [n] row of the persistent block table of each
    query_lens: Int32  # [n] >= 1
    context_lens: Int32  # [n]
    tokens: Int32  # [T]
    positions: Int32  # [T]
    slots: Int64  # [T]
    copies: Int32  # [c, 3]
    changed_rows: Int32  # [r]
    changed_tables: Int32  # [r, w]
    samples: tuple[Sample, ...] = ()
    prompt_scores: tuple[PromptScore, ...] = ()
    stores: tuple[Transfer, ...] = ()
    loads: tuple[Transfer, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: first the token itself, then the best others."""

    ids: Int32
    values: Float32
    rank: int  # 1 = the token was the most likely one


@dataclass(frozen=True, slots=True)
class Transferred:
    """The end of a transfer: its first `blocks` blocks are in place, the others are not.

    lower: how many of these a load has from below the uppermost tier.
    """

    id: int
    blocks: int
    duration: float = 0.0  # seconds
    lower: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """What an executor reports. Sample i produced `tokens[indptr[i]:indptr[i + 1]]` (0..k tokens).

    `parents[i]` is the row that sample i continues. `logprobs` has one entry a token.
    `complete`: indices, ascending, of samples whose form allows nothing after their tokens.
    `errors` maps a row to what went wrong with it: the samples on that row end, others go on, also
    those of the same request. `transfers` have ended, of this step or of earlier ones.
    """

    tokens: Int32
    indptr: Int32  # [m + 1]
    parents: Int32  # [m]
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()  # one entry a PromptScore
    complete: tuple[int, ...] = ()
    errors: dict[int, str] = field(default_factory=dict)
    duration: float = 0.0  # seconds
    shared_spans: int = 0  # spans of K/V that were read once for several rows
    transfers: tuple[Transferred, ...] = ()
    sample_duration: float = 0.0  # seconds of `duration` in which tokens were drawn and scored


class Executor(Protocol):
    """Computes steps. One step is in flight at a time."""

    def submit(self, step: Step) -> Ticket: ...

    def collect(self, ticket: Ticket) -> Result:
        """The Result of a submitted step. Raises whatever made the whole step fail."""
        ...


class TableMirror:
    """A copy of the block table, kept current from the changed rows of each Step.

    Of the executor, which need not share memory with the block manager.
    """

    def __init__(self) -> None:
        self._rows = np.zeros((0, 0), np.int32)

    def apply(self, step: Step, block_size: int) -> Int32:
        """Block tables of the step's rows: int32 [n, w], a copy, padded with block 0.

        w = blocks of the longest of them.
        """
        if len(step.changed_rows):
            width = self._fit(step)
            self._rows[step.changed_rows] = 0
            self._rows[step.changed_rows, :width] = step.changed_tables
        longest = int(step.context_lens.max(initial=1))
        return self._rows[step.table_rows, : -(-longest // block_size)]

    def changes(self, step: Step) -> Int32:
        """Applies the step: int32 [k, 3], the entries that differ: table row, place, block id."""
        if not len(step.changed_rows):
            return np.zeros((0, 3), np.int32)
        width = self._fit(step)
        tables = np.zeros((len(step.changed_rows), self._rows.shape[1]), np.int32)
        tables[:, :width] = step.changed_tables
        rows, places = np.nonzero(tables != self._rows[step.changed_rows])
        self._rows[step.changed_rows] = tables
        changed = np.empty((len(rows), 3), np.int32)
        changed[:, 0], changed[:, 1] = step.changed_rows[rows], places
        changed[:, 2] = tables[rows, places]
        return changed

    def _fit(self, step: Step) -> int:
        """Makes room for the changed rows; their width."""
        height = int(step.changed_rows.max()) + 1
        width: int = step.changed_tables.shape[1]
        if height > self._rows.shape[0] or width > self._rows.shape[1]:
            grown = np.zeros(
                (max(height, self._rows.shape[0]), max(width, self._rows.shape[1])), np.int32
            )
            grown[: self._rows.shape[0], : self._rows.shape[1]] = self._rows
            self._rows = grown
        return width
