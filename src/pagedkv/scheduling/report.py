"""What a request has brought, noted at its samples and reported in deltas."""

from __future__ import annotations

from collections.abc import Sequence

from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.ending import GOES_ON, Ending, find_ending
from pagedkv.scheduling.messages import Add, Delta, Resume
from pagedkv.scheduling.params import SamplingParams
from pagedkv.scheduling.request import Branch, Output, Request
from pagedkv.scheduling.step import TokenLogprobs


def refused(add: Add, error: str, error_type: str) -> list[Delta]:
    """The end of each sample of a request that is not taken in, of one if it has no params."""
    n = add.params.n if isinstance(add.params, SamplingParams) else 1
    return [
        Delta(add.request_id, i, finish_reason="error", error=error, error_type=error_type)
        for i in range(n)
    ]


def refused_resume(resume: Resume, error: str, error_type: str) -> list[Delta]:
    """The same of a request that came with tokens, for the samples that have not ended."""
    ended = {i for i, output in enumerate(resume.outputs) if output.finish_reason is not None}
    deltas = refused(resume.add, error, error_type)
    return [delta for delta in deltas if delta.sample not in ended] or deltas


def take_scores(request: Request, start: int, scores: tuple[TokenLogprobs, ...]) -> list[Delta]:
    """Prompt log-probabilities that follow position `start`, less those reported before."""
    new = scores[request.num_scored - start :]
    if not request.live or not new:
        return []
    request.num_scored += len(new)
    return [
        Delta(
            request.id,
            request.live[0].index,
            prompt_logprobs=new,
            num_cached_tokens=request.num_cached_tokens,
            admitted_at=request.admitted_at,
        )
    ]


def take_tokens(
    request: Request,
    output: Output,
    tokens: Sequence[int],
    logprobs: tuple[TokenLogprobs | None, ...],
    config: SchedulerConfig,
    capacity: int,
    complete: bool,
) -> Delta:
    """Appends what a sample has drawn, up to the token that ends the output.

    complete: nothing may follow the last of them.
    """
    end, completed, (ends, length) = GOES_ON, False, request.bounds
    for count, token in enumerate(tokens, 1):
        output.tokens.append(token)
        if token in ends or len(output.tokens) >= length:
            end = find_ending(request, output, config, capacity)
        if complete and count == len(tokens) and end.finish_reason != "stop":
            end, completed = Ending("stop"), True
        if end.finish_reason is not None:
            output.finish_reason = end.finish_reason
            tokens, logprobs = tokens[:count], logprobs[:count]
            break
    return Delta(
        request.id,
        output.index,
        tuple(tokens),
        logprobs,
        (),
        end.finish_reason,
        end.stop_reason,
        end.error,
        None,
        request.num_cached_tokens,
        request.admitted_at,
        completed,
    )


def end_outputs(
    request: Request,
    outputs: Sequence[Output],
    reason: str,
    error: str | None = None,
    error_type: str | None = None,
) -> list[Delta]:
    """Ends samples of a request without further tokens."""
    deltas = []
    for output in outputs:
        output.finish_reason = reason
        deltas.append(
            Delta(
                request.id,
                output.index,
                finish_reason=reason,
                error=error,
                num_cached_tokens=request.num_cached_tokens,
                admitted_at=request.admitted_at,
                error_type=error_type,
            )
        )
    return deltas


def end_at(request: Request, output: Output, end: Ending) -> Delta:
    """The end of a sample at what it has drawn and reported already."""
    output.finish_reason = end.finish_reason
    return Delta(
        request.id,
        output.index,
        finish_reason=end.finish_reason,
        stop_reason=end.stop_reason,
        error=end.error,
        num_cached_tokens=request.num_cached_tokens,
        admitted_at=request.admitted_at,
    )


def extend_search(
    request: Request, drawn: Sequence[tuple[Branch, TokenLogprobs]]
) -> dict[Branch, list[Output]]:
    """Puts the beams that go on into the request's outputs, best first.

    drawn: every branch of the request, and what was drawn from it. Returns the outputs that
    continue a branch, for each branch that has any; nothing when the search is over.
    """
    heirs: dict[Branch, list[Output]] = {}
    if request.search is None:
        return heirs
    ranked = sorted(drawn, key=lambda entry: entry[0].members[0].index)
    beams = [(branch.members[0].tokens, branch.members[0].logprob) for branch, _ in ranked]
    children = request.search.extend(beams, [scores for _, scores in ranked])
    for output, child in zip(request.outputs, children, strict=bool(children)):
        output.tokens, output.logprob = [*beams[child.parent][0], child.token], child.logprob
        heirs.setdefault(ranked[child.parent][0], []).append(output)
    return heirs


def conclude_search(request: Request, error: str | None = None) -> list[Delta]:
    """Ends all beams of a request with its hypotheses, best first.

    error: why the search is cut short. The finished hypotheses come first then, and the running
    beams fill up.
    """
    deltas: list[Delta] = []
    if request.search is not None:
        running = [(output.tokens, output.logprob) for output in request.live] if error else []
        found = request.search.conclude(running, error)
        for output, hypothesis in zip(request.outputs, found, strict=False):
            output.finish_reason = hypothesis.finish_reason
            deltas.append(
                Delta(
                    request.id,
                    output.index,
                    token_ids=hypothesis.tokens,
                    finish_reason=hypothesis.finish_reason,
                    error=hypothesis.error,
                    score=hypothesis.score,
                    num_cached_tokens=request.num_cached_tokens,
                    admitted_at=request.admitted_at,
                )
            )
    return deltas + end_outputs(request, request.live, "length", error)
