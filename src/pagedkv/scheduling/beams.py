"""Beam search: which continuations of a group's beams stay, which are finished, when to stop.

The rules are those of transformers' `generate(num_beams=...)`. Pure bookkeeping over tokens and
log-probabilities; the sequences that compute them are the scheduler's business.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import NamedTuple

from pagedkv.errors import RequestError
from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.messages import Add, Hypothesis
from pagedkv.scheduling.params import MAX_LOGPROBS, BeamSearchParams
from pagedkv.scheduling.step import TokenLogprobs


class Child(NamedTuple):
    """`token` appended to beam `parent`; `logprob` is the sum over the generated tokens."""

    parent: int
    token: int
    logprob: float


class BeamSearch:
    """The search of one request: its limits, and the hypotheses finished so far, best first.

    eos: token ids that finish a hypothesis. limit: most tokens of one.
    """

    def __init__(self, params: BeamSearchParams, eos: tuple[int, ...], limit: int) -> None:
        self.params, self.limit = params, limit
        self.eos = () if params.ignore_eos else eos
        # What a row is asked for: its best token, and as alternatives every token that can matter.
        self.draws = replace(params.sampling, logprobs=num_candidates(params, eos))
        self.finished: list[Hypothesis] = []

    def extend(
        self, beams: Sequence[tuple[list[int], float]], scores: Sequence[TokenLogprobs]
    ) -> list[Child]:
        """One step of the search; the beams that go on, best first, or none: it is over.

        beams: tokens and summed log-probability of each; scores: what `draws` gave for each.
        Equal sums are settled by beam, then by token id.
        """
        width = self.params.beam_width
        best = sorted(
            (
                Child(parent, token, beams[parent][1] + value)
                for parent, scored in enumerate(scores)
                for token, value in zip(
                    scored.ids[1:].tolist(), scored.values[1:].tolist(), strict=True
                )
            ),
            key=lambda child: (-child.logprob, child.parent, child.token),
        )[: num_candidates(self.params, self.eos)]
        count = len(beams[0][0]) + 1
        ended = [child.token in self.eos or count >= self.limit for child in best]
        for child, end in zip(best[:width], ended, strict=False):
            if end:
                reason = "stop" if child.token in self.eos else "length"
                tokens = (*beams[child.parent][0], child.token)
                self.finished.append(Hypothesis(tokens, self.score(child.logprob, count), reason))
        self.finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self.finished[width:]
        going = [child for child, end in zip(best, ended, strict=True) if not end][:width]
        return [] if not going or self._is_settled(going[0].logprob, count) else going

    def conclude(
        self, beams: Sequence[tuple[list[int], float]], error: str | None = None
    ) -> list[Hypothesis]:
        """Hypotheses of a search that stops now: the finished ones, then the best of `beams`.

        error: why those beams were cut short.
        """
        cut = [
            Hypothesis(tuple(tokens), self.score(logprob, len(tokens)), "length", error)
            for tokens, logprob in beams
            if tokens
        ]
        return [*self.finished, *cut][: self.params.beam_width]

    def score(self, logprob: float, count: int) -> float:
        """Of `count` >= 1 tokens whose log-probabilities sum up to `logprob`."""
        return logprob / math.pow(count, self.params.length_penalty)

    def _is_settled(self, best: float, count: int) -> bool:
        """Whether the running beams are not expected to improve a full set of hypotheses."""
        if len(self.finished) < self.params.beam_width:
            return False
        return self.params.early_stopping or self.score(best, count) <= self.finished[-1].score


def num_candidates(params: BeamSearchParams, eos: tuple[int, ...]) -> int:
    """Continuations that can matter: when each beam ends with every end token, enough go on."""
    return max(2, 1 + (0 if params.ignore_eos else len(eos))) * params.beam_width


def check_beams(add: Add, config: SchedulerConfig) -> None:
    """RequestError if the request's beam search contradicts its sampling or passes a limit."""
    beam = add.beam
    if beam is None:
        return
    if not isinstance(beam, BeamSearchParams):
        raise RequestError(f"beam={beam!r:.200} must be BeamSearchParams")
    if add.params != beam.sampling:
        raise RequestError(
            "the sampling parameters contradict beam search, which draws nothing: leave them to "
            "BeamSearchParams"
        )
    wanted = num_candidates(beam, config.eos_token_ids)
    most = min(MAX_LOGPROBS, config.vocab_size or MAX_LOGPROBS)
    if wanted > most:
        raise RequestError(
            f"beam_width={beam.beam_width} needs the {wanted} best tokens of each beam and "
            f"{most} can be had: give at most {most * beam.beam_width // wanted}"
        )


def start_search(add: Add, config: SchedulerConfig) -> BeamSearch | None:
    """The search that a valid request asks for, if any."""
    if add.beam is None:
        return None
    room = config.max_model_len - len(add.prompt)
    return BeamSearch(add.beam, config.eos_token_ids, min(add.beam.max_tokens, room))


def common_length(sequences: Sequence[list[int]]) -> int:
    """Leading tokens that all sequences have in common."""
    first, last = min(sequences), max(sequences)
    return sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    )


def split(sequences: Sequence[list[int]], at: int) -> list[list[int]]:
    """Indices of the sequences, those together that have the same token at position `at`."""
    parts: dict[int, list[int]] = {}
    for i, tokens in enumerate(sequences):
        parts.setdefault(tokens[at], []).append(i)
    return list(parts.values())


def tree_blocks(sequences: Sequence[list[int]], prompt: int, block_size: int) -> int:
    """Blocks of beams resumed along their fork tree, beyond those of their common part.

    At a fork each part but one copies the partly filled tail.
    """
    at = common_length(sequences)
    forked = prompt + at
    if len(sequences) == 1:
        return 0
    total = -(forked % block_size > 0)
    for part in split(sequences, at):
        members = [sequences[i] for i in part]
        end = prompt + common_length(members)
        total += -(-end // block_size) - forked // block_size
        total += tree_blocks(members, prompt, block_size)
    return total
