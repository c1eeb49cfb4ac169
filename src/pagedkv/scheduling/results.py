"""What the Result of a step does to the requests: tokens, ends, forks."""

from __future__ import annotations

import numpy as np

from pagedkv.cache import BlockManager
from pagedkv.scheduling.batch import Batch, Row
from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.messages import Delta
from pagedkv.scheduling.report import conclude_search, extend_search, take_scores, take_tokens
from pagedkv.scheduling.request import Branch
from pagedkv.scheduling.roster import Roster
from pagedkv.scheduling.step import Result, TokenLogprobs
from pagedkv.scheduling.usage import note_merging, recomputed_tokens


def take_result(
    roster: Roster,
    flight: Batch,
    result: Result,
    config: SchedulerConfig,
    capacity: int,
    now: float,
    end: float,
) -> list[Delta]:
    """Commits a step's tokens, and gives every request what it has brought.

    now: of the plan of the step; end: when it had been computed. capacity: tokens the pool holds of
    a sequence.
    """
    deltas = _end_failed_rows(roster, flight, result)
    rows = [row for row in flight.rows if row.branch.open]
    note_merging(roster.manager, [row for row in rows if not row.branch.decodes])
    _commit(roster.manager, flight, rows)
    for row in rows:
        branch = row.branch
        if branch.decodes:
            branch.computed += 1
            continue
        if branch.request.comes_back:
            again = recomputed_tokens(row)
            branch.request.recomputed_tokens += again
            roster.tally.recomputed_tokens += again
        branch.compute(row.count)
    if roster.tiering is not None:
        roster.tiering.take(result)
        roster.tiering.note_filled(rows)
    for row, scores in zip(flight.scored, result.prompt_logprobs, strict=True):
        deltas += take_scores(row.branch.request, row.start, scores)
    deltas += _take_draws(roster, flight, result, config, capacity, end)
    for row in rows:
        branch = row.branch
        if not branch.decodes or branch.members[0].finish_reason is not None:
            _settle(roster, branch, now, end)
    return deltas


def _commit(manager: BlockManager, flight: Batch, rows: list[Row]) -> None:
    """Tells the block manager what these rows of the step have computed."""
    step = flight.step
    if len(rows) == len(flight.rows) == step.num_tokens:  # all of them decode
        manager.commit(step.seqs, step.tokens[:, None])
    else:
        tokens = [row.branch.tokens(row.start, row.start + row.count) for row in rows]
        manager.commit([row.branch.seq for row in rows], tokens)


def _end_failed_rows(roster: Roster, flight: Batch, result: Result) -> list[Delta]:
    """Ends the samples on rows that report an error or owe a token."""
    errors = dict(result.errors)
    for i in np.flatnonzero(np.diff(result.indptr) == 0).tolist():
        errors.setdefault(flight.step.samples[i].row, "the executor drew no token")
    deltas: list[Delta] = []
    for i in sorted(errors):
        branch = flight.rows[i].branch
        request = branch.request
        outputs = branch.members if request.search is None else request.live
        deltas += roster.end(request, outputs, "error", errors[i], "engine")
    return deltas


def _take_draws(
    roster: Roster,
    flight: Batch,
    result: Result,
    config: SchedulerConfig,
    capacity: int,
    end: float,
) -> list[Delta]:
    """What each sample of the step has brought."""
    deltas: list[Delta] = []
    beams: dict[int, list[tuple[Branch, TokenLogprobs]]] = {}  # by Request.order
    bounds, tokens = result.indptr.tolist(), result.tokens.tolist()
    for i, (row, output) in enumerate(zip(flight.drawing, flight.draws, strict=True)):
        branch = row.branch
        request = branch.request
        if output.finish_reason is not None:
            continue
        first, last = bounds[i], bounds[i + 1]
        if last - first != 1:
            branch.decodes = False
        roster.policy.drew(request, last - first)
        request.account.generation_tokens += last - first
        request.last_token_end = end
        if request.search is None:
            new, scores = tokens[first:last], result.logprobs[first:last]
            whole = i in result.complete
            delta = take_tokens(request, output, new, scores, config, capacity, whole)
            deltas += [delta] if output.live else roster.seal(request, [delta])
        elif (scored := result.logprobs[first]) is not None:
            beams.setdefault(request.order, []).append((branch, scored))
    for group in beams.values():
        deltas += _extend_beams(roster, group, capacity)
    return deltas


def _settle(roster: Roster, branch: Branch, now: float, end: float) -> None:
    """After a step: drops ended samples, and forks where the samples part."""
    request = branch.request
    if not request.started and any(output.tokens for output in branch.members):
        request.started = True
        request.first_token_at, request.first_token_end = now, end
        roster.tally.first_token(request)
        roster.awaiting_first_token.discard(request.order)
    roster.drop_ended(request)
    if branch.open and len(branch.members) > 1 and branch.computed == branch.known:
        roster.fork(branch, branch.parts())
    branch.decodes = branch.open and branch.settles_to_decode


def _extend_beams(
    roster: Roster, drawn: list[tuple[Branch, TokenLogprobs]], capacity: int
) -> list[Delta]:
    """The beams of a request go on from what all of them have drawn, or are reported.

    Beams without a continuation among the best release their blocks before the others fork.
    """
    request = drawn[0][0].request
    heirs = extend_search(request, drawn)
    if not heirs:
        deltas = roster.seal(request, conclude_search(request))
        roster.drop_ended(request)
        return deltas
    roster.close([branch for branch, _ in drawn if branch not in heirs])
    for branch, outputs in heirs.items():
        roster.fork(branch, [[output] for output in outputs])
    if len(request.prompt) + len(request.live[0].tokens) > capacity:
        return roster.cut_short(request)
    return []
