"""A request that is being moved away, as the machines of `transfer` look at it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pagedkv.cache import SeqId
from pagedkv.scheduling.request import Request
from pagedkv.transfer.departure import Mode
from pagedkv.transfer.outgoing import Parted


class Held(NamedTuple):
    """What can be read of a request now: a sequence that begins with what its samples have in
    common, and how they have parted."""

    seq: SeqId
    parted: Parted | None = None


@dataclass(slots=True)
class Leaving:
    """request_id: its id here. samples: indices of those that move, in the order of their lines."""

    request_id: str
    mode: Mode
    samples: tuple[int, ...]
    to_park: bool = False
    parked: bool = False

    @classmethod
    def of(cls, request: Request, mode: Mode) -> Leaving:
        """Beams take each other's places, so all of them count."""
        outputs = request.live if request.search is None else request.outputs
        return cls(request.id, mode, tuple(output.index for output in outputs))

    def own_lengths(self, request: Request) -> tuple[int, ...]:
        """Tokens that each sample has beyond those of all; of a lone sample none."""
        if len(self.samples) == 1:
            return ()
        common = request.common_output(request.live)
        return tuple(max(0, len(request.outputs[i].tokens) - common) for i in self.samples)

    def _common_output(self, request: Request) -> int:
        """Tokens drawn by all samples that move, as far as they are computed.

        Of samples none, whatever the one has drawn that may be left of them: they have parted.
        """
        if request.search is None:
            return 0
        live = request.live
        return min(request.common_output(live), min(len(output.tokens) for output in live) - 1)

    def held(self, request: Request) -> Held | None:
        """None: nothing now; it waits, or computes again what it had before a preemption.

        Beams have lines of their own when they stand still; before that they may be given up.
        """
        branches = request.branches
        if not branches:
            return None
        if len(self.samples) == 1 or not request.started:
            return Held(branches[0].seq)
        if any(len(branch.members) > 1 for branch in branches):
            return None
        common = request.prompt_length + self._common_output(request)
        if any(branch.computed < common for branch in branches):
            return None
        seqs = {branch.members[0].index: branch.seq for branch in branches}
        fixed = request.search is None or self.parked
        return Held(
            branches[0].seq,
            Parted(common, tuple(seqs.get(i) for i in self.samples) if fixed else ()),
        )
