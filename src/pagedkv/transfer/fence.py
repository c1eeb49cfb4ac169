"""The fence: the front end's word on who owns a request, and which tokens are delivered."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from pagedkv.transfer.messages import MoveId


class Owner(NamedTuple):
    """The worker that has a request, and the epoch under which it has it."""

    worker: str
    epoch: int


class Raised(NamedTuple):
    """Ownership has moved: tell `new` to own, `old` to give up what it has of the request."""

    request: str
    old: Owner
    new: Owner


class Disowned(NamedTuple):
    """The copy at `owner` is of no use: tell it so."""

    request: str
    owner: Owner


class Orphaned(NamedTuple):
    """Nobody has the request. Resume it from what was delivered; see `Fence.resume`.

    tokens: of each sample, those that were delivered. ended: which samples have ended.
    """

    request: str
    tokens: tuple[tuple[int, ...], ...]
    ended: tuple[bool, ...]


Verdict = Raised | Disowned | Orphaned


@dataclass(slots=True)
class _Copy:
    """A move under way. counts, ended: what the new owner takes as reported; None: not complete."""

    owner: Owner
    counts: tuple[int, ...] | None = None
    ended: tuple[bool, ...] = ()


@dataclass(slots=True)
class _Entry:
    owner: Owner | None
    tokens: list[list[int]]
    ended: list[bool]  # the owner has reported the sample's end
    next_epoch: int
    copies: dict[int, _Copy] = field(default_factory=dict)  # by epoch

    def caught_up(self, copy: _Copy) -> int:
        """0: all that the copy takes as reported was delivered; 1: more; -1: less."""
        counts, ended = copy.counts or (), copy.ended
        if any(len(mine) > count for mine, count in zip(self.tokens, counts, strict=True)):
            return 1
        if any(len(mine) < count for mine, count in zip(self.tokens, counts, strict=True)):
            return -1
        if any(mine and not his for mine, his in zip(self.ended, ended, strict=True)):
            return 1
        return 0 if all(mine for mine, his in zip(self.ended, ended, strict=True) if his) else -1


class Fence:
    """(request, epoch, tokens delivered) of every request that is open at a front end.

    Ownership moves by raising the epoch here, once: when the new owner has said that its copy is
    complete, and the old owner has delivered all that the copy takes as reported. A copy that is
    behind what was delivered, for the old owner went on, is disowned. Only the current epoch's next
    token is delivered. KeyError for a request that is not open, but where a method says otherwise.
    """

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._owned: defaultdict[str, dict[str, None]] = defaultdict(dict)  # requests, by worker
        self._speaking: dict[str, MoveId] = {}  # owners, by the id that a request has there

    def open(
        self, request: str, worker: str, samples: int = 1, ended: Collection[int] = ()
    ) -> MoveId:
        """A new request goes to `worker`. ended: samples that the client wants no more.

        ValueError: the id is open already.
        """
        if request in self._entries:
            raise ValueError(f"request {request!r} is open already: choose another id")
        tokens: list[list[int]] = [[] for _ in range(samples)]
        entry = _Entry(None, tokens, [i in ended for i in range(samples)], 1)
        self._entries[request] = entry
        self._give(request, entry, Owner(worker, 0))
        return MoveId(request, 0)

    def owner(self, request: str) -> Owner | None:
        """Who has the request; None: nobody, it is to be resumed."""
        return self._entries[request].owner

    def speaking(self, owned_id: str) -> MoveId | None:
        """Whose word it is that comes under this id; None: not that of a request's owner."""
        return self._speaking.get(owned_id)

    def delivered(self, request: str) -> tuple[tuple[int, ...], ...]:
        """Tokens of each sample that were delivered."""
        return tuple(map(tuple, self._entries[request].tokens))

    def requests_of(self, worker: str) -> list[str]:
        """Requests that the worker owns, in the order in which it came to own them."""
        return list(self._owned.get(worker, ()))

    def begin_move(self, request: str, to: str) -> MoveId:
        """A move to worker `to` begins, under an epoch that was never given before."""
        entry = self._entries[request]
        epoch, entry.next_epoch = entry.next_epoch, entry.next_epoch + 1
        entry.copies[epoch] = _Copy(Owner(to, epoch))
        return MoveId(request, epoch)

    def end(self, request: str, sample: int) -> None:
        """A sample of an orphaned request is over: its end was handed out, or needs not be.

        ValueError: the request has an owner, who says what is over.
        """
        entry = self._entries[request]
        if entry.owner is not None:
            raise ValueError(f"request {request!r} has an owner, {entry.owner}: let it end samples")
        entry.ended[sample] = True

    def resume(self, request: str, worker: str) -> MoveId:
        """An orphaned request is resumed at `worker`. ValueError: it has an owner."""
        entry = self._entries[request]
        if entry.owner is not None:
            raise ValueError(f"request {request!r} has an owner, {entry.owner}: it cannot resume")
        epoch, entry.next_epoch = entry.next_epoch, entry.next_epoch + 1
        self._give(request, entry, Owner(worker, epoch))
        return MoveId(request, epoch)

    def deliver(
        self,
        move: MoveId,
        sample: int,
        tokens: tuple[int, ...],
        ended: bool = False,
        first: int | None = None,
    ) -> tuple[tuple[int, ...], bool, list[Verdict]]:
        """A report of the worker that has, or had, the request under `move.epoch`.

        first: place of `tokens` in the sample's output; None: the link keeps order and loses none.
        Returns the tokens to hand out, whether the sample's end is to be handed out, and what
        follows from it. Reports of another epoch, of a request that is not open, and tokens that
        are not next, give nothing.
        """
        entry = self._entries.get(move.request)
        if entry is None or entry.owner is None or entry.owner.epoch != move.epoch:
            return (), False, []
        mine = entry.tokens[sample]
        skip = 0 if first is None else len(mine) - first
        if entry.ended[sample] or not 0 <= skip <= len(tokens):
            return (), False, []
        new = tokens[skip:]
        mine += new
        entry.ended[sample] = ended
        return new, ended, self._settle(move.request, entry) if entry.copies else []

    def complete(
        self, move: MoveId, counts: tuple[int, ...], ended: tuple[bool, ...]
    ) -> list[Verdict]:
        """The receiver of a move has all of it. Unknown moves give nothing."""
        entry = self._entries.get(move.request)
        copy = None if entry is None else entry.copies.get(move.epoch)
        if entry is None or copy is None:
            return []
        if len(counts) != len(entry.tokens) or len(ended) != len(counts):
            del entry.copies[move.epoch]
            return [Disowned(move.request, copy.owner)]
        copy.counts, copy.ended = counts, ended
        return self._settle(move.request, entry)

    def move_failed(self, move: MoveId, worker: str) -> list[Verdict]:
        """`worker`, one of the two sides, says that a move has failed.

        If it owns the request under this epoch, the request is orphaned. The old owner may say so
        too late, when it had not heard that ownership has moved: then nothing follows.
        """
        entry = self._entries.get(move.request)
        if entry is None:
            return []
        copy = entry.copies.pop(move.epoch, None)
        if copy is not None:
            return [Disowned(move.request, copy.owner)]
        if entry.owner == Owner(worker, move.epoch):
            return self._orphan(move.request, entry)
        return []

    def worker_lost(self, worker: str) -> list[Verdict]:
        """The worker is gone with all that it had."""
        verdicts: list[Verdict] = []
        for request, entry in self._entries.items():
            for epoch in [e for e, copy in entry.copies.items() if copy.owner.worker == worker]:
                del entry.copies[epoch]
            if entry.owner is not None and entry.owner.worker == worker:
                verdicts += self._orphan(request, entry)
        return verdicts

    def close(self, request: str) -> list[Verdict]:
        """The request has ended, or its client is gone: whoever still has of it is told."""
        entry = self._entries.pop(request, None)
        if entry is None:
            return []
        owner, owners = entry.owner, [copy.owner for copy in entry.copies.values()]
        self._give(request, entry, None)
        if owner is not None and not all(entry.ended):
            owners.append(owner)
        return [Disowned(request, owner) for owner in owners]

    def _give(self, request: str, entry: _Entry, owner: Owner | None) -> None:
        """The one place where a request changes its owner."""
        if entry.owner is not None:
            del self._owned[entry.owner.worker][request]
            del self._speaking[MoveId(request, entry.owner.epoch).owned_id]
        entry.owner = owner
        if owner is not None:
            self._owned[owner.worker][request] = None
            move = MoveId(request, owner.epoch)
            self._speaking[move.owned_id] = move

    def _settle(self, request: str, entry: _Entry) -> list[Verdict]:
        """Raises the epoch where a complete copy has been caught up with."""
        verdicts: list[Verdict] = []
        for epoch, copy in list(entry.copies.items()):
            if copy.counts is None or entry.owner is None or epoch not in entry.copies:
                continue
            order = entry.caught_up(copy)
            if order < 0:
                continue
            del entry.copies[epoch]
            if order > 0:
                verdicts.append(Disowned(request, copy.owner))
                continue
            old = entry.owner
            self._give(request, entry, copy.owner)
            verdicts.append(Raised(request, old, copy.owner))
            # Other moves were from the old owner.
            verdicts += [Disowned(request, other.owner) for other in entry.copies.values()]
            entry.copies.clear()
        return verdicts

    def _orphan(self, request: str, entry: _Entry) -> list[Verdict]:
        """No owner: copies are of a state that may be behind, or wait for what never comes."""
        self._give(request, entry, None)
        verdicts: list[Verdict] = [Disowned(request, copy.owner) for copy in entry.copies.values()]
        entry.copies.clear()
        verdicts.append(Orphaned(request, tuple(map(tuple, entry.tokens)), tuple(entry.ended)))
        return verdicts
