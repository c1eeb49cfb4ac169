"""A request inside the scheduler: its samples, and the sequences that compute them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from pagedkv.cache.types import SeqId
from pagedkv.scheduling.beams import BeamSearch, common_length, split, tree_blocks
from pagedkv.scheduling.counters import TenantCounters
from pagedkv.scheduling.messages import Add
from pagedkv.scheduling.namespaces import namespace_bytes
from pagedkv.scheduling.step import Int32
from pagedkv.tiers.names import BlockName


class Bounds(NamedTuple):
    """What may end a sample of a request: one of `tokens`, or that it has `length` tokens.

    Any other token ends it under no condition; these are looked at more closely.
    """

    tokens: frozenset[int]
    length: int


NO_BOUNDS = Bounds(frozenset(), 0)  # every token is looked at


@dataclass(slots=True, eq=False)
class Output:
    """One sample of a request, or one beam. `tokens` are those drawn so far.

    logprob: sum of a beam's log-probabilities. computed: most tokens, the prompt's among them,
    whose K/V it had when the request was preempted.
    """

    index: int
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logprob: float = 0.0
    computed: int = 0

    @property
    def live(self) -> bool:
        return self.finish_reason is None


@dataclass(slots=True, eq=False)
class Branch:
    """An open sequence of the block manager and the samples that live on it.

    Several samples share a branch while it computes their prompt, several beams while it computes
    the tokens they have in common; at its end the branch is forked.

        [0, computed)       committed: computed == manager.length(seq)
        [computed, known)   still to be computed; a token is drawn where a step reaches `known`

    below: [start, stop) of blocks that a lower tier has, in order; they are loaded when the branch
    gets there. unstored: full blocks, by place, that were not worth storing below. loading: tokens
    that a load is about to bring behind `computed`; nothing else is planned until it ends.
    decodes: it is known to lack one token, with which its lone sample draws the next; see
    `settles_to_decode`. Then the hot path asks nothing else.
    """

    request: Request
    seq: SeqId
    members: list[Output]
    computed: int
    open: bool = True
    common: int = field(init=False)  # output tokens that it computes for several members
    names: list[BlockName] = field(default_factory=list)  # of its first blocks, as far as needed
    below: list[tuple[int, int]] = field(default_factory=list)
    unstored: list[int] = field(default_factory=list)
    loading: int = 0
    decodes: bool = False

    def __post_init__(self) -> None:
        self.carry(self.members)

    def compute(self, count: int) -> None:
        """So many more tokens are committed."""
        self.computed += count
        self.request.note_prefilled(self.computed)

    def carry(self, members: list[Output]) -> None:
        """The branch is that of `members` now."""
        self.members = members
        self.common = self.request.common_output(members)

    @property
    def known(self) -> int:
        """Tokens whose ids are known: the prompt and the common or a lone member's output."""
        members = self.members
        own = len(members[0].tokens) if len(members) == 1 else self.common
        return self.request.prompt_length + own

    @property
    def pending(self) -> int:
        """Tokens that the next step may compute.

        Beams are compared when all of them have drawn: the last token waits for the others.
        """
        if self.loading or self.request.parked:
            return 0
        if self.decodes:
            return 1
        waits = len(self.members) == 1 and self.request.is_gathering
        end = self.known - waits
        if self.below:
            end = min(end, max(self.computed, self.below[0][0]))
        return end - self.computed

    @property
    def draws(self) -> bool:
        """Whether reaching `known` draws tokens.

        Not for the common part of a group that is resumed: its members know their next tokens.
        """
        return len(self.members) == 1 or not self.request.started

    @property
    def settles_to_decode(self) -> bool:
        """Whether from now on each step computes one token and draws one, until the sample ends.

        All else has been done: the prompt is computed and reported, and what was there before a
        preemption; there is nothing to load, to fork, or to compare with other beams.
        """
        request = self.request
        return (
            request.started
            and len(self.members) == len(request.branches) == 1
            and request.search is None
            and not request.scores_prompt
            and not self.below
            and not self.loading
            and self.known - self.computed == 1
        )

    def parts(self) -> list[list[Output]]:
        """The members as they go on after the fork: samples alone, beams by their next token."""
        if self.request.search is None:
            return [[output] for output in self.members]
        parts = split([output.tokens for output in self.members], self.common)
        return [[self.members[i] for i in part] for part in parts]

    def tokens(self, start: int, stop: int) -> list[int]:
        """Known tokens at positions [start, stop)."""
        first = self.request.prompt_length
        if start >= first:
            return self.members[0].tokens[start - first : stop - first]
        prompt = self.request.prompt
        head: list[int] = prompt[start:stop].tolist()
        if stop > len(prompt):
            head += self.members[0].tokens[: stop - len(prompt)]
        return head


class Request:
    """One request. Waiting: it has no branches. Running: its branches cover all live samples.

    A group (n > 1) is admitted, preempted and resumed as one, along its fork tree: the prompt on
    one branch, then a branch for each sample, which replays the sample's own tokens. Beams fork
    wherever they part. search: of a request for beams; its outputs are the beams, best first.
    public: leading tokens of the prompt whose blocks all tenants share. bounds: see `bounds_of`.
    looks_back: whether what may be drawn next depends on what was drawn. takes_best: whether that
    is the most likely token, of those that are not forbidden, and nothing is told of it.
    """

    # Without a dict: it has so many attributes that each would be searched for in one of its own.
    __slots__ = (
        "account",
        "add",
        "admitted",
        "admitted_at",
        "arrival",
        "blocks_peak",
        "bounds",
        "branches",
        "deadline",
        "demoted",
        "first_token_at",
        "first_token_end",
        "held_tokens",
        "id",
        "last_token_end",
        "looks_back",
        "namespace",
        "num_cached_tokens",
        "num_passings",
        "num_preemptions",
        "num_prefilled",
        "num_scored",
        "order",
        "outputs",
        "params",
        "parked",
        "priority",
        "prompt",
        "prompt_length",
        "public",
        "recomputed_tokens",
        "resumed",
        "search",
        "seed",
        "started",
        "swapped",
        "swapped_blocks",
        "takes_best",
        "tenant",
        "tpot_slo",
        "ttft_slo",
    )

    def __init__(
        self,
        add: Add,
        order: int,
        search: BeamSearch | None = None,
        public: int = 0,
        bounds: Bounds = NO_BOUNDS,
    ) -> None:
        self.id = add.request_id
        self.add = replace(add, prompt=())  # the prompt is kept once, as an array
        self.params = add.params if search is None else search.draws
        self.search = search
        self.bounds = bounds
        self.seed = add.seed
        # Ints are as large as they like: sums and products of them may be too large for a float.
        self.arrival = float(add.arrival)
        self.priority = add.priority
        self.order = order
        self.ttft_slo, self.tpot_slo, self.deadline = (
            None if time is None else float(time)
            for time in (add.ttft_slo, add.tpot_slo, add.deadline)
        )
        self.tenant = add.tenant
        self.namespace = namespace_bytes(add.tenant, add.cache_salt)
        # Prompt log-probabilities shorten the look-up, which `public` must not exceed; cut to it,
        # a block would be named in one part before a preemption and in another after it.
        self.public = public if add.params.prompt_logprobs is None else 0
        self.prompt: Int32 = np.array(add.prompt, np.int32)
        self.prompt_length = len(self.prompt)
        self.outputs = [Output(i) for i in range(add.params.n)]
        # What its samples are asked of at every token.
        params = self.params
        self.looks_back = (
            params.min_tokens > 0 or params.has_penalties or params.structured_outputs is not None
        )
        self.takes_best = (
            params.greedy
            and params.logprobs is None
            and not params.logit_bias
            and not params.has_penalties
            and params.structured_outputs is None
        )
        self.branches: list[Branch] = []
        self.admitted = False  # ever
        self.admitted_at: float | None = None  # seconds, the first time
        self.num_preemptions = 0
        self.held_tokens = 0  # `num_computed` when it was preempted last
        self.demoted = False  # given up in overload: stands behind those who can be served in time
        self.first_token_at: float | None = None  # seconds: the plan that drew it
        self.num_passings = 0  # plans that left it waiting for what another request computes
        self.parked = False  # keeps its blocks and is in no step, for it is about to be moved
        self.started = False  # the first tokens have been drawn
        self.resumed = False  # it came with tokens that were drawn elsewhere
        self.num_cached_tokens = 0  # prefix hits of the first admission
        self.num_prefilled = 0  # most prompt tokens that were ever there
        self.num_scored = 0  # prompt log-probabilities reported so far
        self.swapped = 0  # tokens whose K/V were sent to a lower tier at the last preemption
        # For RequestUsage and for operators; no decision looks at them.
        self.account = TenantCounters(add.tenant)  # the tenant's, from the roster on
        self.blocks_peak = 0
        self.swapped_blocks = 0
        self.recomputed_tokens = 0
        # Seconds: the end of the step that drew it; `first_token_at` is its beginning.
        self.first_token_end: float | None = None
        self.last_token_end = 0.0

    @property
    def live(self) -> list[Output]:
        return [output for output in self.outputs if output.live]

    def note_prefilled(self, computed: int) -> None:
        """A branch has so many tokens."""
        if self.num_prefilled < self.prompt_length:
            self.num_prefilled = max(self.num_prefilled, min(computed, self.prompt_length))

    @property
    def num_known(self) -> int:
        """Tokens of the prompt and of all live samples."""
        return len(self.prompt) + sum(len(output.tokens) for output in self.live)

    @property
    def num_computed(self) -> int:
        """Tokens whose K/V are there; the prompt counts once for all samples that have forked."""
        counts = [branch.computed for branch in self.branches]
        return sum(counts) - len(self.prompt) * max(0, len(counts) - 1)

    @property
    def comes_back(self) -> bool:
        """Whether it had K/V before it was last admitted: here, or where it came from."""
        return self.num_preemptions > 0 or self.resumed

    @property
    def scores_prompt(self) -> bool:
        """Whether prompt log-probabilities are still to be reported."""
        wanted = self.params.prompt_logprobs is not None
        return wanted and self.num_scored < len(self.prompt) - 1

    @property
    def is_gathering(self) -> bool:
        """Whether some of the beams still compute tokens that they had before a preemption."""
        return self.search is not None and any(
            len(branch.members) > 1 or branch.known - branch.computed > 1
            for branch in self.branches
            if len(self.branches) > 1
        )

    def common_output(self, outputs: Sequence[Output]) -> int:
        """Output tokens that a branch of these samples computes: beams', or a lone sample's."""
        if len(outputs) == 1 or self.search is not None:
            return common_length([output.tokens for output in outputs])
        return 0

    def common_tokens(self) -> Int32:
        """What live samples have in common: the prompt, and output of beams or a lone sample."""
        live = self.live
        count = self.common_output(live)
        if count:
            return np.concatenate([self.prompt, np.array(live[0].tokens[:count], np.int32)])
        return self.prompt

    def lookup_tokens(self, common: Int32) -> Int32:
        """The part of `common` for which K/V from the prefix cache will do.

        A position whose log-probabilities are to be reported has to be computed.
        """
        return common[: self.num_scored + 1] if self.scores_prompt else common

    def own_blocks(self, outputs: Sequence[Output], block_size: int) -> int:
        """Blocks that samples of a resumed group take beyond those of their common part.

        After the fork each holds floor(P / B) prompt blocks in common with the others and all
        later ones alone; the prompt's partial tail stays with one of them.
        """
        if len(outputs) == 1 or not self.started:
            return 0
        prompt = len(self.prompt)
        if self.search is not None:
            return tree_blocks([output.tokens for output in outputs], prompt, block_size)
        shared = prompt // block_size
        own = sum(-(-(prompt + len(o.tokens)) // block_size) - shared for o in outputs)
        return own - (prompt % block_size > 0)

    def total_blocks(self, block_size: int) -> int:
        """Blocks the request takes to draw its next tokens when nothing is shared with others."""
        return -(-len(self.common_tokens()) // block_size) + self.own_blocks(self.live, block_size)
