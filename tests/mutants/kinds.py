"""What planted faults are made of: `Mutant`, and the kinds of fault there are."""

from __future__ import annotations

from typing import NamedTuple

KINDS = {
    "conservation": "each block is in exactly one of the four states",
    "reference exactness": "a count is the number of holders",
    "no leak": "nothing is held when nothing runs",
    "all or nothing": "a call that fails changes nothing",
    "admission arithmetic": "what is promised to fit fits, and the other way round",
    "terminal once": "every request ends exactly once, and is forgotten then",
    "write exclusivity": "a slot is written only where nobody else reads",
    "publish after compute": "a name is given when the content is there, not before",
    "key completeness": "equal names mean equal content",
    "hit verification": "content is compared, never guessed",
    "index consistency": "a name leads to its content; leaves are evicted first",
    "scan resistance": "what is used again outlasts what comes once",
    "hits are protected": "a hit is held before anything is evicted",
    "at least one token": "every request computes a token",
    "boundaries": "lengths at and beside the edges of blocks",
    "inert garbage": "what is not a sequence's own is not read for it",
    "isolation": "a request's output is that of its solo run",
    "preemption": "a preempted request draws nothing twice",
    "groups": "samples of one request are independent and released each",
    "beams": "a search keeps what an exhaustive one would, in blocks that beams have in common",
    "progress": "what was admitted can go on",
    "refusal": "what can never run is refused at once",
    "bounded waiting": "a long prompt does not hold up the first tokens of others",
    "copy ordering": "a block is not reused or overwritten while it is read elsewhere",
    "mirrors": "what is reported is the state",
    "bounded memory": "what is taken stays within what the container grants",
    "streaming": "no character of a stop string is shown",
    "input totality": "bad input ends its own request",
    "idempotence": "ending a thing twice ends it once",
    "deadlines": "as many requests as can be are on time, and none runs after its deadline",
    "fairness": "tenants are served by their weights, and nothing earns credit",
    "access": "who has no key learns nothing, who has one acts in its own name",
    "determinism": "the same calls give the same results",
}


class Mutant(NamedTuple):
    """`old`, which stands once in the file, becomes `new`; `tests` (under tests/) must fail."""

    name: str
    kinds: tuple[str, ...]
    file: str  # under the package
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def module(self) -> str:
        return "pagedkv." + self.file.removesuffix(".py").replace("/", ".")
