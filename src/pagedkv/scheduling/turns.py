"""Whose prefill comes first in a step, and how much of the step it may take."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from pagedkv.scheduling.policies.interface import Policy
from pagedkv.scheduling.request import Request


class Turns(NamedTuple):
    """ahead: `Request.order` of those whose prefill goes before others', see `Policy.ahead`.

    first: the request that is to start next, in this step if there are tokens for it.
    """

    ahead: AbstractSet[int]
    first: Request | None

    @classmethod
    def of(cls, policy: Policy, prefills: Sequence[Request], first: Request | None) -> Turns:
        """prefills: requests that run. first: the one that is to start next."""
        requests = [*prefills] if first is None else [*prefills, first]
        ahead = {request.order for request in policy.ahead(requests)}
        return cls(ahead, first)

    def limit(self, request: Request, budget: int, awaiting: AbstractSet[int]) -> int:
        """Most tokens the request may prefill in a step of `budget` tokens.

        While another request waits for its first token a long prompt leaves half of the step to it.
        Who is ahead leaves nothing to those behind, and these leave everything to one that starts:
        what it does not use is given back to them.

        awaiting: `Request.order` of all that wait for their first token.
        """
        if request.order in self.ahead:
            awaiting = awaiting & self.ahead
        elif self.first is not None and self.first.order in self.ahead:
            return 1
        others_wait = len(awaiting) > (request.order in awaiting)
        return max(1, budget // 2) if others_wait else budget
