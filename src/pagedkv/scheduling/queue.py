"""Requests that wait, in a policy's order."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pagedkv.scheduling.line import Line
from pagedkv.scheduling.policies.interface import Policy
from pagedkv.scheduling.request import Request


class WaitingQueue:
    """Those who were preempted, in one line before all others; then a line for each tenant."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._again = Line(policy.key)
        self._lines: dict[str | None, Line] = {}  # by tenant; none of them empty

    def __len__(self) -> int:
        return len(self._again) + sum(map(len, self._lines.values()))

    @property
    def num_tokens(self) -> int:
        """Prompt tokens of all who wait."""
        return self._again.num_tokens + sum(line.num_tokens for line in self._lines.values())

    def __contains__(self, request: Request) -> bool:
        return request in self._line(request)

    def push(self, request: Request) -> None:
        line = self._again
        if not request.admitted:
            line = self._lines.setdefault(request.tenant, self.line(request.tenant))
        line.push(request)

    def next(self, now: float, without: Collection[str | None] = ()) -> Request | None:
        """The request to be served next; None when nobody waits but tenants to be left out."""
        if self._again:
            return self._again.head
        lines = [line for tenant, line in self._lines.items() if tenant not in without]
        return self._policy.choose(lines, now) if lines else None

    def remove(self, request: Request) -> None:
        """Takes a request out, wherever it stands; nothing happens when it does not wait.

        Before it counts as admitted, if it is taken out for that.
        """
        line = self._line(request)
        line.remove(request)
        if not line and line is not self._again:
            self._lines.pop(request.tenant, None)

    def line(self, tenant: str | None) -> Line:
        """Requests of a tenant that have not started, in order."""
        return self._lines.get(tenant) or Line(self._policy.key)

    @property
    def tenants(self) -> Sequence[str | None]:
        """Those that have such requests."""
        return list(self._lines)

    def requests(self) -> list[Request]:
        """All who wait: the preempted, then tenant by tenant, each in its order."""
        lines = [self._again, *self._lines.values()]
        return [request for line in lines for request in line.first(len(line))]

    def _line(self, request: Request) -> Line:
        return self._again if request.admitted else self.line(request.tenant)
