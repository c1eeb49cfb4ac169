"""Requests that wait, in a policy's order."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pagedkv.scheduling.line import Key, Line
from pagedkv.scheduling.policies.interface import Policy
from pagedkv.scheduling.request import Request


class WaitingQueue:
    """A line for each tenant; in each, those who were preempted are before all others."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._lines: dict[str | None, Line] = {}  # by tenant; none of them empty

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    @property
    def num_tokens(self) -> int:
        """Prompt tokens of all who wait."""
        return sum(line.num_tokens for line in self._lines.values())

    @property
    def num_samples(self) -> int:
        """Samples that all who wait were asked for."""
        return sum(line.num_samples for line in self._lines.values())

    @property
    def tenants(self) -> Sequence[str | None]:
        """Those that have requests here."""
        return list(self._lines)

    def __contains__(self, request: Request) -> bool:
        return request in self.line(request.tenant)

    def push(self, request: Request) -> None:
        self._lines.setdefault(request.tenant, self.line(request.tenant)).push(request)

    def next(self, now: float, full: Collection[str | None] = ()) -> Request | None:
        """The request to be served next, preempted ones alone of tenants that are `full`.

        None when nobody else waits.
        """
        lines = [
            line for tenant, line in self._lines.items() if line.head.admitted or tenant not in full
        ]
        return self._policy.choose(lines, now) if lines else None

    def remove(self, request: Request) -> None:
        """Takes a request out, wherever it stands; nothing happens when it does not wait.

        Before it counts as admitted, if it is taken out for that.
        """
        line = self.line(request.tenant)
        line.remove(request)
        if not line:
            self._lines.pop(request.tenant, None)

    def line(self, tenant: str | None) -> Line:
        """Requests of a tenant that wait, in order."""
        return self._lines.get(tenant) or Line(self._key)

    def requests(self) -> list[Request]:
        """All who wait, tenant by tenant, each in its order."""
        return [r for line in self._lines.values() for r in line.first(len(line))]

    def _key(self, request: Request) -> Key:
        return not request.admitted, *self._policy.key(request)
