"""The calls of `CacheProgram` as rules, in an order that hypothesis chooses and shrinks."""

from __future__ import annotations

import random

from cache_program import CacheProgram
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

RANDOMS = st.randoms(use_true_random=False)


class CacheMachine(RuleBasedStateMachine):
    """A block manager beside the reference: equal after every rule, unchanged by every error."""

    sanitize = False

    def __init__(self) -> None:
        super().__init__()
        self.program: CacheProgram | None = None

    @initialize(
        seed=RANDOMS,
        num_blocks=st.sampled_from(range(1, 17)),
        block_size=st.sampled_from((1, 2, 3, 4, 16)),
        caching=st.sampled_from((True, True, True, False)),
    )
    def start(self, seed: random.Random, num_blocks: int, block_size: int, caching: bool) -> None:
        self.program = CacheProgram(
            seed, num_blocks, block_size, prefix_caching=caching, sanitize=self.sanitize
        )

    def call(self, verb: str, chance: random.Random) -> None:
        assert self.program is not None
        self.program.random = chance
        getattr(self.program, verb)()

    @rule(chance=RANDOMS)
    def match(self, chance: random.Random) -> None:
        self.call("match", chance)

    @rule(chance=RANDOMS)
    def open(self, chance: random.Random) -> None:
        """With a namespace, public tokens and extra bytes, or without."""
        self.call("open", chance)

    @rule(chance=RANDOMS)
    def reserve(self, chance: random.Random) -> None:
        self.call("reserve", chance)

    @rule(chance=RANDOMS)
    def commit(self, chance: random.Random) -> None:
        """As many tokens as were reserved, or fewer."""
        self.call("commit", chance)

    @rule(chance=RANDOMS)
    def compute(self, chance: random.Random) -> None:
        """What an engine does with a new request; random calls alone seldom fill blocks."""
        for verb in ("open", "reserve", "commit"):
            self.call(verb, chance)

    @rule(chance=RANDOMS)
    def cancel(self, chance: random.Random) -> None:
        self.call("cancel", chance)

    @rule(chance=RANDOMS)
    def fork(self, chance: random.Random) -> None:
        self.call("fork", chance)

    @rule(chance=RANDOMS)
    def truncate(self, chance: random.Random) -> None:
        self.call("truncate", chance)

    @rule(chance=RANDOMS)
    def close(self, chance: random.Random) -> None:
        self.call("close", chance)

    @rule(chance=RANDOMS)
    def evict(self, chance: random.Random) -> None:
        self.call("evict", chance)

    @rule(chance=RANDOMS)
    def reset_cache(self, chance: random.Random) -> None:
        self.call("reset_cache", chance)

    @rule(chance=RANDOMS)
    def lease(self, chance: random.Random) -> None:
        self.call("lease", chance)

    @rule(chance=RANDOMS)
    def end_lease(self, chance: random.Random) -> None:
        self.call("end_lease", chance)

    @rule(chance=RANDOMS)
    def migrate(self, chance: random.Random) -> None:
        """Exports a sequence and imports it again."""
        self.call("migrate", chance)

    @rule(chance=RANDOMS)
    def restart(self, chance: random.Random) -> None:
        """Goes on with what the snapshot restores."""
        self.call("restart", chance)

    @invariant()
    def agrees_with_the_reference(self) -> None:
        if self.program is not None:
            self.program.compare()

    def teardown(self) -> None:
        if self.program is not None:
            self.program.random = random.Random(0)  # only the order of closing is left
            self.program.finish()
