"""What the machine can give: bytes read and multiplications a second, by all threads of torch.

No step takes less than its bytes over the one, or its operations over the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from pagedkv.bench.rounds import fast, in_turns
from pagedkv.engine.measure import mapped_ones

_SIDE = 1024  # of the matrices
READ, MULTIPLY = "read", "multiply"


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes and operations (a multiplication or an addition each) a second."""

    read_bandwidth: float
    matrix_rate: float

    def floor(self, num_bytes: float, operations: float) -> float:
        """The least seconds for both, which may overlap."""
        return max(num_bytes / self.read_bandwidth, operations / self.matrix_rate)

    def __str__(self) -> str:
        return (
            f"the same run reads {self.read_bandwidth / 1e9:.1f} GB/s and multiplies at "
            f"{self.matrix_rate / 1e9:.0f} GFLOP/s"
        )


@dataclass(slots=True)
class Yardstick:
    """Calls to be timed in turn with what is measured; holds `num_bytes` of memory.

    A sum over a buffer in huge pages, where the system gives them, and a product of matrices.
    num_bytes should be far larger than the caches.
    """

    dtype: torch.dtype
    num_bytes: int = 2**28
    _memory: torch.Tensor = field(init=False, repr=False)
    _factors: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._memory = mapped_ones(self.num_bytes, "MADV_HUGEPAGE")
        a, b, out = torch.ones(3, _SIDE, _SIDE, dtype=self.dtype)
        self._factors = a, b, out

    def calls(self) -> dict[str, Callable[[], object]]:
        a, b, out = self._factors
        return {READ: self._memory.sum, MULTIPLY: lambda: torch.mm(a, b, out=out)}

    def limits(self, taken: Mapping[str, Sequence[float]]) -> Limits:
        """From the seconds of these calls: what the fastest tenth reached."""
        return Limits(self.num_bytes / fast(taken[READ]), 2 * _SIDE**3 / fast(taken[MULTIPLY]))


def measure_limits(dtype: torch.dtype, seconds: float = 0.5) -> Limits:
    """The machine alone, for what cannot be measured in turn with it."""
    yardstick = Yardstick(dtype)
    return yardstick.limits(in_turns(yardstick.calls(), seconds=seconds, rounds=10))
