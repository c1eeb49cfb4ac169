"""Paging beside contiguous reservations, on the same requests: who fits, and what is wasted.

A reckoning of memory alone. Time goes in steps of `step_seconds`; a request is admitted in order of
arrival when its allocator has room and a seat is free, its prompt is there at once, and every
resident request gains one token a step until its output is complete. Nothing is shared.

A paged request that finds no block preempts the one admitted last, whose tokens are dropped and
restored when it is admitted again. Contiguous requests reserve all they may need beforehand.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from pagedkv.errors import ConfigError
from pagedkv.simulation.contiguous import FirstFit
from pagedkv.simulation.trace import Trace


@dataclass(slots=True)
class Resident:
    """A request of the trace: `tokens` of it are in the pool, `left` are still to come."""

    key: int
    prompt: int
    output: int
    arrival: int  # step
    tokens: int = 0
    left: int = 0

    def start(self) -> None:
        """Puts what is known of it into the pool."""
        done = self.tokens or self.prompt
        self.tokens, self.left = done, self.prompt + self.output - done


@dataclass(slots=True)
class Account:
    """Sums over steps; `report` divides them by the steps in which anybody was resident."""

    num_slots: int
    steps: int = 0
    resident: int = 0
    live: int = 0
    reserved: int = 0
    refused: int = 0  # steps in which the first of the queue found no room
    refused_for_holes: int = 0  # of these, those in which the free slots would have sufficed
    holes: int = 0
    largest_hole: int = 0
    tokens_moved: int = 0  # by compaction
    tokens_restored: int = 0  # after preemption
    never: int = 0  # requests larger than the pool or the reservation
    end: int = 0  # step in which the last request ended
    peak: int = 0

    def report(self) -> dict[str, float]:
        """Means per step in slots of the pool, and totals."""
        steps, slots = max(self.steps, 1), self.num_slots * max(self.steps, 1)
        return {
            "mean_resident": self.resident / steps,
            "peak_resident": self.peak,
            "utilisation": self.live / slots,
            "internal_waste": (self.reserved - self.live) / slots,
            "refused_steps": self.refused,
            "refused_while_free_sufficed": self.refused_for_holes,
            "mean_holes": self.holes / steps,
            "mean_largest_hole": self.largest_hole / slots,
            "tokens_moved": self.tokens_moved,
            "tokens_restored": self.tokens_restored,
            "never_fit": self.never,
            "steps": self.end,
        }


class Allocator(Protocol):
    """Where requests live. `account` gets what the allocator alone can see."""

    def fits_ever(self, request: Resident) -> bool: ...

    def admit(self, request: Resident, account: Account) -> bool: ...

    def grow(self, request: Resident) -> bool:
        """Room for one more token."""
        ...

    def release(self, request: Resident) -> None: ...

    def reserved(self, request: Resident) -> int: ...

    def note(self, account: Account) -> None:
        """Adds one step's holes."""
        ...


@dataclass(slots=True)
class Paged:
    """Blocks on demand: ceil(tokens / B) of them a request."""

    num_slots: int
    block_size: int
    _used: int = 0

    @property
    def num_blocks(self) -> int:
        return self.num_slots // self.block_size

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def fits_ever(self, request: Resident) -> bool:
        return self._blocks(request.prompt + request.output) <= self.num_blocks

    def admit(self, request: Resident, account: Account) -> bool:
        tokens = request.tokens or request.prompt
        # With its first new token: else it would be the next to make room.
        if self._blocks(tokens + 1) > self.num_blocks - self._used:
            return False
        self._used += self._blocks(tokens)
        account.tokens_restored += request.tokens
        return True

    def grow(self, request: Resident) -> bool:
        if request.tokens % self.block_size:
            return True
        if self._used == self.num_blocks:
            return False
        self._used += 1
        return True

    def release(self, request: Resident) -> None:
        self._used -= self._blocks(request.tokens)

    def reserved(self, request: Resident) -> int:
        return self._blocks(request.tokens) * self.block_size

    def note(self, account: Account) -> None:
        pass  # any block fits any request: no hole is too small


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
            if extents.free_slots < size:
                return False
            if not self.compacting:
                account.refused_for_holes += 1
                return False
            account.tokens_moved += sum(self._residents[key].tokens for key in extents.compact())
            extents.allocate(request.key, size)
        self._residents[request.key] = request
        return True

    def grow(self, request: Resident) -> bool:
        return True

    def release(self, request: Resident) -> None:
        self._extents.free(request.key)
        del self._residents[request.key]

    def reserved(self, request: Resident) -> int:
        return self.reservation(request)

    def note(self, account: Account) -> None:
        holes = self._extents.holes
        account.holes += len(holes)
        account.largest_hole += max(holes, default=0)


def compare(
    trace: Trace,
    num_slots: int,
    block_size: int = 16,
    max_length: int | None = None,
    seats: int = 256,
    step_seconds: float = 0.05,
) -> dict[str, dict[str, float]]:
    """Reports by allocator. max_length: what "max" reserves; None: the longest request's tokens.

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

    allocators: dict[str, Allocator] = {"paged": Paged(num_slots, block_size)}
    for name, reservation in (("max", most), ("pow2", power_of_two), ("oracle", exact)):
        allocators[name] = Contiguous(num_slots, reservation, compacting=False)
        allocators[f"{name}, compacting"] = Contiguous(num_slots, reservation, compacting=True)
    return {
        name: _run(_requests(trace, step_seconds), allocator, Account(num_slots), seats).report()
        for name, allocator in allocators.items()
    }


def _requests(trace: Trace, step_seconds: float) -> deque[Resident]:
    arrivals = [0] * len(trace)
    if trace.arrivals is not None:
        if trace.arrivals.max() / step_seconds >= 2**63:
            raise ConfigError(f"step_seconds={step_seconds}: too many steps: give more")
        arrivals = (trace.arrivals / step_seconds).astype(int).tolist()
    rows = zip(trace.prompt_tokens.tolist(), trace.output_tokens.tolist(), arrivals, strict=True)
    return deque(Resident(i, *row) for i, row in enumerate(rows) if row[1])


def _run(waiting: deque[Resident], allocator: Allocator, account: Account, seats: int) -> Account:
    running: list[Resident] = []  # in order of admission
    now = 0
    while waiting or running:
        if not running:
            now = max(now, waiting[0].arrival)
        _admit(waiting, running, allocator, account, seats, now)
        if not running:
            continue
        account.steps += 1
        account.resident += len(running)
        account.peak = max(account.peak, len(running))
        account.live += sum(request.tokens for request in running)
        account.reserved += sum(allocator.reserved(request) for request in running)
        allocator.note(account)
        now += 1
        _grow(waiting, running, allocator)
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
) -> None:
    while waiting and waiting[0].arrival <= now and len(running) < seats:
        request = waiting[0]
        if not allocator.fits_ever(request):
            account.never += 1
        elif allocator.admit(request, account):
            request.start()
            running.append(request)
        else:
            account.refused += 1
            return
        waiting.popleft()


def _grow(waiting: deque[Resident], running: list[Resident], allocator: Allocator) -> None:
    """One more token for everybody; whoever was admitted last makes room where there is none."""
    place = 0
    while place < len(running):
        request = running[place]
        if allocator.grow(request):
            request.tokens += 1
            request.left -= 1
            place += 1
            continue
        victim = running.pop()
        allocator.release(victim)
        waiting.appendleft(victim)
