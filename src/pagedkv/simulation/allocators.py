"""Paging beside contiguous reservations, on the same requests: who fits, and what is wasted.

A reckoning of memory alone. Time goes in steps of `step_seconds`; a request is admitted in order of
arrival when its allocator has room and a seat is free, its prompt is there at once, and every
resident request gains one token a step until its output is complete. Nothing is shared.

A paged request that finds no block is a shortage: it preempts the one admitted last, whose tokens
are dropped and restored when it is admitted again. "paged, partial" lets the preempted one keep its
blocks and lose them one by one, from the tail, each a shortage; only what it lost is restored.
Contiguous requests reserve all they may need beforehand; what compaction moves is their price.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from pagedkv.errors import ConfigError, PagedKVError
from pagedkv.simulation.account import Account, Resident
from pagedkv.simulation.contiguous import FirstFit
from pagedkv.simulation.trace import Trace


class Allocator(Protocol):
    """Where requests live. `account` gets what the allocator alone can see."""

    def fits_ever(self, request: Resident) -> bool: ...

    def admit(self, request: Resident, account: Account) -> bool: ...

    def grow(self, request: Resident) -> bool:
        """Room for one more token."""
        ...

    def yield_block(self) -> bool:
        """Whether somebody who was preempted before gave a block."""
        ...

    def preempt(self, request: Resident) -> None:
        """It runs no more, and waits."""
        ...

    def release(self, request: Resident) -> None: ...

    def reserved(self, request: Resident) -> int: ...

    def holes(self) -> list[int]:
        """Sizes of the holes between extents, in slots."""
        ...

    def has_room_in_holes(self, request: Resident) -> bool:
        """Whether all free slots together would take a request that was not admitted."""
        ...


@dataclass(slots=True)
class Paged:
    """Blocks on demand: ceil(tokens / B) of them a request."""

    num_slots: int
    block_size: int
    partial: bool = False
    _used: int = 0
    # Slots that the request preempted last still holds. It is the first of the queue, and nobody
    # else is preempted before it has given all of them.
    _kept: int = 0

    @property
    def num_blocks(self) -> int:
        return self.num_slots // self.block_size

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def fits_ever(self, request: Resident) -> bool:
        return self._blocks(request.prompt + request.output) <= self.num_blocks

    def admit(self, request: Resident, account: Account) -> bool:
        tokens = request.tokens or request.prompt
        kept = self._kept
        # With its first new token: else it would be the next to make room.
        if self._blocks(tokens + 1) - self._blocks(kept) > self.num_blocks - self._used:
            return False
        self._used += self._blocks(tokens) - self._blocks(kept)
        self._kept = 0
        account.tokens_restored += request.tokens - kept
        return True

    def grow(self, request: Resident) -> bool:
        if request.tokens % self.block_size:
            return True
        if self._used == self.num_blocks:
            return False
        self._used += 1
        return True

    def yield_block(self) -> bool:
        if not self._kept:
            return False
        self._kept = (self._blocks(self._kept) - 1) * self.block_size
        self._used -= 1
        return True

    def preempt(self, request: Resident) -> None:
        if self.partial:
            self._kept = request.tokens
            self.yield_block()
        else:
            self.release(request)

    def release(self, request: Resident) -> None:
        self._used -= self._blocks(request.tokens)

    def reserved(self, request: Resident) -> int:
        return self._blocks(request.tokens) * self.block_size

    def holes(self) -> list[int]:
        return []  # any block fits any request: no hole is too small

    def has_room_in_holes(self, request: Resident) -> bool:
        return False


@dataclass(slots=True)
class Contiguous:
    """One extent a request, of the size that `reservation` says, first fit."""

    num_slots: int
    reservation: Callable[[Resident], int]
    compacting: bool
    _extents: FirstFit = field(init=False)
    _residents: dict[int, Resident] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._extents = FirstFit(self.num_slots)

    def fits_ever(self, request: Resident) -> bool:
        size = self.reservation(request)
        return request.prompt + request.output <= size <= self.num_slots

    def admit(self, request: Resident, account: Account) -> bool:
        size, extents = self.reservation(request), self._extents
        if not extents.allocate(request.key, size):
            if not self.compacting or extents.free_slots < size:
                return False
            account.shortages += 1
            account.tokens_moved += sum(self._residents[key].tokens for key in extents.compact())
            extents.allocate(request.key, size)
        self._residents[request.key] = request
        return True

    def grow(self, request: Resident) -> bool:
        return True

    def yield_block(self) -> bool:
        return False

    def preempt(self, request: Resident) -> None:
        raise PagedKVError("a reservation has room for every token: nobody has to yield")

    def release(self, request: Resident) -> None:
        self._extents.free(request.key)
        del self._residents[request.key]

    def reserved(self, request: Resident) -> int:
        return self.reservation(request)

    def holes(self) -> list[int]:
        return self._extents.holes

    def has_room_in_holes(self, request: Resident) -> bool:
        return self._extents.free_slots >= self.reservation(request)


def run_allocators(
    trace: Trace,
    num_slots: int,
    block_size: int = 16,
    max_length: int | None = None,
    seats: int = 256,
    step_seconds: float = 0.05,
) -> dict[str, Account]:
    """What came of the requests, by allocator.

    max_length: what "max" reserves; None: the longest request's tokens.

    A request that its allocator can never take is left out and counted; one without output takes no
    step and is left out. ConfigError for a number that is not above 0 and for a pool smaller than a
    block.
    """
    for name, value in (
        ("block_size", block_size),
        ("max_length", max_length if max_length is not None else 1),
        ("seats", seats),
        ("step_seconds", step_seconds),
    ):
        if not 0 < value < float("inf"):
            raise ConfigError(f"{name}={value}: give more than 0")
    if num_slots < block_size:
        raise ConfigError(f"num_slots={num_slots}: give a block of {block_size} at least")
    limit = max_length or int((trace.prompt_tokens + trace.output_tokens).max())

    def most(request: Resident) -> int:
        return limit

    def power_of_two(request: Resident) -> int:
        return request.prompt + (1 << max(request.output - 1, 0).bit_length())

    def exact(request: Resident) -> int:
        return request.prompt + request.output

    allocators: dict[str, Allocator] = {
        "paged": Paged(num_slots, block_size),
        "paged, partial": Paged(num_slots, block_size, partial=True),
    }
    for name, reservation in (("max", most), ("pow2", power_of_two), ("oracle", exact)):
        allocators[name] = Contiguous(num_slots, reservation, compacting=False)
        allocators[f"{name}, compacting"] = Contiguous(num_slots, reservation, compacting=True)
    requests = _requests(trace, step_seconds)
    return {
        name: _run(deque(map(replace, requests)), allocator, Account(num_slots), seats)
        for name, allocator in allocators.items()
    }


def compare(
    trace: Trace,
    num_slots: int,
    block_size: int = 16,
    max_length: int | None = None,
    seats: int = 256,
    step_seconds: float = 0.05,
) -> dict[str, dict[str, float]]:
    """Reports of `run_allocators`, with its arguments."""
    accounts = run_allocators(trace, num_slots, block_size, max_length, seats, step_seconds)
    return {name: account.report() for name, account in accounts.items()}


def _requests(trace: Trace, step_seconds: float) -> list[Resident]:
    arrivals = [0] * len(trace)
    if trace.arrivals is not None:
        if trace.arrivals.max() / step_seconds >= 2**63:
            raise ConfigError(f"step_seconds={step_seconds}: too many steps: give more")
        arrivals = (trace.arrivals / step_seconds).astype(int).tolist()
    rows = zip(trace.prompt_tokens.tolist(), trace.output_tokens.tolist(), arrivals, strict=True)
    return [Resident(i, *row) for i, row in enumerate(rows) if row[1]]


def _run(waiting: deque[Resident], allocator: Allocator, account: Account, seats: int) -> Account:
    running: list[Resident] = []  # in order of admission
    now = 0
    while waiting or running:
        if not running:
            now = max(now, waiting[0].arrival)
        refused = _admit(waiting, running, allocator, account, seats, now)
        if not running:
            continue
        account.note(
            now,
            resident=len(running),
            live=sum(request.tokens for request in running),
            reserved=sum(allocator.reserved(request) for request in running),
            holes=allocator.holes(),
            refused=refused,
        )
        now += 1
        _grow(waiting, running, allocator, account)
        for request in [request for request in running if not request.left]:
            allocator.release(request)
            running.remove(request)
    account.end = now
    return account


def _admit(
    waiting: deque[Resident],
    running: list[Resident],
    allocator: Allocator,
    account: Account,
    seats: int,
    now: int,
) -> str | None:
    """Lets in whom there is room for. Returns why the next is refused, see `Account.note`."""
    while waiting and waiting[0].arrival <= now and len(running) < seats:
        request = waiting[0]
        if not allocator.fits_ever(request):
            account.never += 1
        elif allocator.admit(request, account):
            request.start()
            running.append(request)
        else:
            return "holes" if allocator.has_room_in_holes(request) else "full"
        waiting.popleft()
    return None


def _grow(
    waiting: deque[Resident], running: list[Resident], allocator: Allocator, account: Account
) -> None:
    """One more token for everybody; whoever was admitted last makes room where there is none."""
    place = 0
    while place < len(running):
        request = running[place]
        if allocator.grow(request):
            request.tokens += 1
            request.left -= 1
            place += 1
            continue
        account.shortages += 1
        if not allocator.yield_block():
            victim = running.pop()
            allocator.preempt(victim)
            waiting.appendleft(victim)
