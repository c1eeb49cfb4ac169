"""The rows of one step, and the Step made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pagedkv.cache import BlockManager, Reservation
from pagedkv.errors import PagedKVError
from pagedkv.scheduling.ending import ending_tokens
from pagedkv.scheduling.request import Branch, Output, Request
from pagedkv.scheduling.step import Int64, PromptScore, Sample, Step, Transfer
from pagedkv.scheduling.turns import Turns


@dataclass(slots=True, eq=False)
class Row:
    """`count` tokens of one branch, from position `start` on, to be computed or to be loaded.

    limit: why they are fewer than could be computed; "" if they are not.
    """

    branch: Branch
    start: int
    count: int
    limit: str = ""

    def cut(self, budget: int, share: int) -> None:
        """Shortens the row to what is left of the step, and to what is left of its own share."""
        most = min(budget, share)
        if self.count > most:
            self.count, self.limit = most, "share" if share < budget else "budget"

    @property
    def draws(self) -> list[Output]:
        """The samples that draw a token from this row."""
        branch = self.branch
        if branch.decodes:
            return branch.members
        ends = self.start + self.count == branch.known
        if not ends or not branch.draws:
            return []
        # Beams all start from the same draw.
        return branch.members[:1] if branch.request.search else branch.members

    @property
    def scores(self) -> bool:
        """Whether the row computes log-probabilities of prompt tokens that are wanted still."""
        request = self.branch.request
        return request.scores_prompt and self.start + self.count > request.num_scored


@dataclass(slots=True, eq=False)
class Batch:
    """The rows of the step in flight, and what was asked of them, in the order of the Step.

    `drawing` and `draws` have an entry for each sample: its row, and who gets the token. `stamp` is
    the block manager's at the time of the plan: the tables the executor has once the step is done.
    """

    step: Step
    rows: list[Row]
    drawing: list[Row]
    draws: list[Output]
    scored: list[Row]
    stamp: int


def select_rows(
    running: Sequence[Request],
    budget: int,
    turns: Callable[[Sequence[Request]], Turns],
    most: Callable[[Request, int, Turns], int],
) -> tuple[list[Row], int]:
    """Rows for what is running, and the tokens left of the budget.

    There is no prefill phase and no decode phase, only known tokens that are not computed yet.
    Branches that lack a single one (running decodes) come first, then the others, as they are
    served, those who are ahead before them.
    They always fit, for there are no more seats than tokens.
    turns: of requests that prefill. most: tokens that a request may prefill in a step of so many.
    """
    total = budget
    pending = [
        Row(branch, branch.computed, branch.pending)
        for request in running
        for branch in request.branches
    ]
    rows = [row for row in pending if row.count == 1]
    budget -= len(rows)
    prefills = [row for row in pending if row.count > 1]
    if not prefills or budget == 0:
        return rows, budget
    order = turns([row.branch.request for row in prefills])
    used: dict[int, int] = {}
    for row in sorted(prefills, key=lambda row: row.branch.request.order not in order.ahead):
        if budget == 0:
            break
        request = row.branch.request
        limit = most(request, total, order) - used.get(request.order, 0)
        row.cut(budget, limit)
        if row.count:
            used[request.order] = used.get(request.order, 0) + row.count
            budget -= row.count
            rows.append(row)
    return rows, budget


def drop_last(rows: list[Row]) -> None:
    """Takes the last row out, with the others of its request if they are beams.

    Beams are compared when all of them have drawn: none goes on without the others.
    """
    request = rows[-1].branch.request
    if request.search is None:
        rows.pop()
    else:
        rows[:] = [row for row in rows if row.branch.request is not request]


def make_batch(
    manager: BlockManager,
    index: int,
    rows: list[Row],
    seqs: Int64,
    reservation: Reservation,
    since: int,
    eos: tuple[int, ...],
    stores: tuple[Transfer, ...] = (),
    loads: tuple[Transfer, ...] = (),
) -> Batch:
    """Lays the Step out.

    seqs: [n], of the rows. reservation: of the rows first, then of what is loaded.
    """
    counts = np.array([row.count for row in rows], np.int32)
    starts = np.array([row.start for row in rows], np.int32)
    total = int(counts.sum())
    firsts = counts.cumsum() - counts
    changed = manager.changed_rows(since)
    scoring: list[int] = []
    tokens: list[int] = []
    samples: list[Sample] = []
    drawing: list[Row] = []
    draws: list[Output] = []
    for i, row in enumerate(rows):
        branch = row.branch
        if branch.decodes:
            tokens.append(branch.members[0].tokens[-1])
        else:
            tokens += branch.tokens(row.start, row.start + row.count)
            if row.scores:
                scoring.append(i)
        for output in row.draws:
            samples.append(_sample(i, branch.request, output, eos))
            drawing.append(row)
            draws.append(output)
    if len(tokens) != total:
        raise PagedKVError(
            f"rows of {total} tokens gave {len(tokens)}: one is taken to decode and does not"
        )
    step = Step(
        index=index,
        seqs=seqs,
        table_rows=manager.rows(seqs),
        query_lens=counts,
        context_lens=starts + counts,
        tokens=np.array(tokens, np.int32),
        positions=np.arange(total, dtype=np.int32) + np.repeat(starts - firsts, counts),
        slots=reservation.slots[:total],
        copies=reservation.copies,
        changed_rows=changed,
        changed_tables=manager.padded_rows(changed),
        samples=tuple(samples),
        prompt_scores=tuple(_prompt_score(i, rows[i]) for i in scoring),
        stores=stores,
        loads=loads,
    )
    return Batch(step, rows, drawing, draws, [rows[i] for i in scoring], manager.stamp())


def _sample(row: int, request: Request, output: Output, eos: tuple[int, ...]) -> Sample:
    params = request.params
    sample = Sample(
        row,
        params,
        request.seed + output.index,
        request.prompt_length + len(output.tokens),
        request.takes_best,
    )
    if not request.looks_back:
        return sample
    if len(output.tokens) < params.min_tokens:
        forbidden = ending_tokens(request, eos)
        sample = sample._replace(best=sample.best and not forbidden, forbidden=forbidden)
    penalised = params.has_penalties
    if penalised or params.structured_outputs is not None:
        sample = sample._replace(output=np.array(output.tokens, np.int32))
    return sample._replace(prompt=request.prompt) if penalised else sample


def _prompt_score(index: int, row: Row) -> PromptScore:
    request = row.branch.request
    targets = request.prompt[row.start + 1 : row.start + row.count + 1]
    return PromptScore(index, targets, request.params.prompt_logprobs or 0)
