"""The requests that have not ended, those who wait and those who run, and how they leave."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Sequence

from pagedkv.cache import BlockManager, SeqId
from pagedkv.scheduling.decisions import DecisionLog
from pagedkv.scheduling.lengths import OutputLengths
from pagedkv.scheduling.messages import Add, Delta
from pagedkv.scheduling.policies.interface import Policy
from pagedkv.scheduling.queue import WaitingQueue
from pagedkv.scheduling.recovery import Reuse
from pagedkv.scheduling.report import conclude_search, end_outputs
from pagedkv.scheduling.request import Branch, Output, Request
from pagedkv.scheduling.tally import Tally
from pagedkv.scheduling.tenants import TenantTable, check_quota
from pagedkv.scheduling.tiering import Tiering
from pagedkv.scheduling.usage import note_blocks, note_computed, usage_of


class Roster:
    """Every request is in `requests`, and either waits or runs.

    running: by the policy's key. awaiting_first_token: `Request.order` of all who wait for their
    first token; not iterated. lengths: of the outputs that have ended. reuse: of what preempted
    requests held. tiering: None without a tier below the device. swapped_out: `Request.order` of
    those who wait and have K/V below the device; not iterated.
    """

    def __init__(
        self,
        manager: BlockManager,
        policy: Policy,
        log: DecisionLog,
        tenants: TenantTable,
        tally: Tally,
        tiering: Tiering | None = None,
    ) -> None:
        self.manager, self.policy, self.log = manager, policy, log
        self.tenants, self.tally, self.tiering = tenants, tally, tiering
        self.requests: dict[str, Request] = {}
        self.waiting = WaitingQueue(policy)
        self.running: list[Request] = []
        self.awaiting_first_token: set[int] = set()
        self.swapped_out: set[int] = set()
        self.lengths = OutputLengths()
        self.reuse = Reuse()
        self.num_preemptions = 0  # since the start
        # By tenant: requests that run or ran, and have not ended.
        self._started: Counter[str | None] = Counter()

    @property
    def num_samples(self) -> int:
        """Live samples of the running requests: seats taken."""
        return sum([len(branch.members) for request in self.running for branch in request.branches])

    @property
    def branches(self) -> list[Branch]:
        """Those that are open, by request in order of service."""
        return [branch for request in self.running for branch in request.branches]

    @property
    def held_elsewhere(self) -> bool:
        """Whether blocks are held for requests that are being moved, away from here or to here."""
        mine = sum(len(request.branches) for request in self.running if not request.parked)
        return self.manager.num_open_sequences > mine or self.manager.num_draining_blocks > 0

    def has(self, request: Request) -> bool:
        """Whether the request has neither ended nor gone elsewhere."""
        return self.requests.get(request.id) is request

    def check_quota(self, add: Add) -> None:
        """OverloadError if its tenant has as much waiting as it may."""
        line, granted = self.waiting.line(add.tenant), self.tenants[add.tenant]
        check_quota(add.tenant, granted, len(line), line.num_tokens, len(add.prompt))

    def enter(self, request: Request) -> None:
        """A request that is new here waits; one that was resumed like one that was preempted."""
        self.requests[request.id] = request
        request.account = self.tally.account(request.tenant)
        request.account.requests += 1
        if request.admitted:
            self.policy.took_over(request)
            self._started[request.tenant] += 1
        if not request.started:
            self.awaiting_first_token.add(request.order)
        self._wait(request)

    def next(self, now: float) -> Request | None:
        """Who is to start next. None: nobody waits whose tenant may run one more request."""
        return self.waiting.next(now, self._full_tenants())

    def held_back(self) -> list[Request]:
        """The first of each tenant that runs as many requests as it may."""
        lines = [self.waiting.line(tenant) for tenant in self._full_tenants()]
        return [line.head for line in lines if line]

    def start(self, request: Request, seqs: Sequence[SeqId], now: float) -> list[Branch]:
        """A waiting request runs on what was opened for it.

        seqs: one for all of its samples, or one for each that is live.
        """
        lengths = [self.manager.length(seq) for seq in seqs]
        cached = min(lengths)
        self.waiting.remove(request)
        self.swapped_out.discard(request.order)
        self.policy.admitted(request, cached, request.admitted)
        if not request.admitted:
            request.num_cached_tokens = cached
            request.note_prefilled(cached)
            request.admitted_at = now
            self._started[request.tenant] += 1
        else:
            self._note_reuse(request, cached)
        request.admitted = True
        live = request.live
        members = [live] if len(seqs) == 1 else [[output] for output in live]
        request.branches = [
            Branch(request, seq, own, length)
            for seq, own, length in zip(seqs, members, lengths, strict=True)
        ]
        bisect.insort(self.running, request, key=self.policy.key)
        return request.branches

    def preempt(self, request: Request, swapped_blocks: int = 0) -> None:
        """Back to the waiting queue. Its blocks go; the prefix cache may still have them later.

        swapped_blocks: so many of the last ones, with what they hold, are stored below first.
        """
        request.swapped, request.held_tokens = 0, request.num_computed
        if swapped_blocks and self.tiering is not None:
            self.tiering.swap_out(request, swapped_blocks)
        if request.swapped:
            self.swapped_out.add(request.order)
        note_computed(request)
        self.close(request.branches)
        self.running.remove(request)
        self.policy.preempted(request)
        self._wait(request)
        request.num_preemptions += 1
        self.num_preemptions += 1

    def demote(self, request: Request, demoted: bool) -> None:
        """Changes whether a request stands behind those that can be served in time."""
        if request.branches:
            self.running.remove(request)
            request.demoted = demoted
            bisect.insort(self.running, request, key=self.policy.key)
        else:
            self.waiting.remove(request)
            request.demoted = demoted
            self.waiting.push(request)

    def fork(self, branch: Branch, parts: Sequence[list[Output]]) -> None:
        """The branch goes on with the first of the parts, a fork of it with each other one."""
        request, (own, *others) = branch.request, parts
        branch.carry(own)
        forks = self.manager.fork(branch.seq, len(others))
        request.branches += [
            Branch(request, seq, members, branch.computed, names=list(branch.names))
            for seq, members in zip(forks, others, strict=True)
        ]

    def end(
        self,
        request: Request,
        outputs: list[Output],
        reason: str,
        error: str | None = None,
        error_type: str | None = None,
    ) -> list[Delta]:
        """Ends live samples of a request wherever it is, and releases what they alone hold."""
        deltas = self.seal(request, end_outputs(request, outputs, reason, error, error_type))
        if error is not None and reason != "length":
            self.log.note(reason, request.id, samples=len(outputs), message=error)
        self.drop_ended(request)
        return deltas

    def cut_short(self, request: Request) -> list[Delta]:
        """Ends the last sample, or all beams, of a request too large for the pool even alone."""
        last = request.live[-1]
        tokens = len(request.prompt) + len(last.tokens)
        manager = self.manager
        self.log.note("cut_short", request.id, tokens=tokens, blocks=manager.num_blocks)
        message = (
            f"cut short at {tokens} tokens: the request alone takes more than the pool's "
            f"{manager.num_blocks} blocks of {manager.block_size}; make the pool larger"
        )
        if request.search is None:
            return self.end(request, [last], "length", message)
        deltas = self.seal(request, conclude_search(request, message))
        self.drop_ended(request)
        return deltas

    def seal(self, request: Request, deltas: list[Delta]) -> list[Delta]:
        """If these deltas are the end of the request, the last says what it has taken.

        Before `drop_ended`, which releases its blocks.
        """
        if not deltas or request.live:
            return deltas
        note_blocks(self.manager, request)
        return [*deltas[:-1], deltas[-1]._replace(usage=usage_of(request))]

    def drop_ended(self, request: Request) -> None:
        """Takes ended samples off their branches; a request without samples leaves."""
        if request.branches and all(
            output.finish_reason is None for branch in request.branches for output in branch.members
        ):
            return
        for branch in request.branches:
            for output in branch.members:
                if output.finish_reason in ("stop", "length"):
                    self.lengths.record(request.tenant, len(output.tokens))
            branch.members = [output for output in branch.members if output.live]
        self.close([branch for branch in request.branches if not branch.members])
        if not request.live and self.requests.pop(request.id, None) is request:
            self._forget(request)
            self.tally.left(request)
            self.log.note(
                "end",
                request.id,
                reasons=[output.finish_reason for output in request.outputs],
                tokens=[len(output.tokens) for output in request.outputs],
            )
            if request.admitted:
                self._end_started(request.tenant)

    def release(self, request: Request) -> None:
        """A request that has not ended goes elsewhere. What its blocks hold stays cached."""
        self.close(request.branches)
        del self.requests[request.id]
        self._forget(request)
        self.tally.released(request)
        tokens = [len(output.tokens) for output in request.outputs]
        self.log.note("release", request.id, tokens=tokens)
        if request.admitted:
            self._end_started(request.tenant)

    def _forget(self, request: Request) -> None:
        """A request that has left neither waits nor runs."""
        self.waiting.remove(request)
        self.awaiting_first_token.discard(request.order)
        self.swapped_out.discard(request.order)
        if request in self.running:
            self.running.remove(request)
        self.policy.left(request)

    def close(self, branches: Sequence[Branch]) -> None:
        """Releases branches of a request: nobody goes on with them."""
        if branches:
            note_blocks(self.manager, branches[0].request)
        for branch in list(branches):
            branch.open = False
            branch.request.branches.remove(branch)
            if self.tiering is None or not self.tiering.closes(branch):
                self.manager.close(branch.seq)

    def _note_reuse(self, request: Request, cached: int) -> None:
        """A request comes back of whose tokens `cached` are still there."""
        # Own tokens of the samples of a group are not looked up.
        if self.manager.prefix_caching and len(request.outputs) == 1 and request.held_tokens:
            size, held = self.manager.block_size, request.held_tokens
            self.reuse.observe(-(-max(0, held - cached) // size), -(-held // size))

    def _wait(self, request: Request) -> None:
        first = not self.waiting.line(request.tenant)
        self.waiting.push(request)
        if first:
            self._compete(request.tenant)

    def _end_started(self, tenant: str | None) -> None:
        was_full = tenant in self._full_tenants()
        self._started[tenant] -= 1
        if not self._started[tenant]:
            del self._started[tenant]
        if was_full and self.waiting.line(tenant):
            self._compete(tenant)

    def _compete(self, tenant: str | None) -> None:
        full = self._full_tenants()
        if tenant not in full:
            self.policy.joined(tenant, [t for t in self.waiting.tenants if t not in full])

    def _full_tenants(self) -> list[str | None]:
        """Tenants that run as many requests as they may."""
        return [t for t, n in self._started.items() if n >= (self.tenants[t].max_running or n + 1)]
