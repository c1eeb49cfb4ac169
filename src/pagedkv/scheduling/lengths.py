"""How long outputs are: what each tenant's recent ones say of those that still run."""

from __future__ import annotations

import math
from bisect import bisect_right

# Of each tenant so many latest lengths are kept, and of so many tenants: the latest to have ended
# anything.
WINDOW = 256
MAX_TENANTS = 1024
# So many lengths make a distribution; with fewer the cap stands in for it.
MIN_LENGTHS = 16


class OutputLengths:
    """Lengths of outputs that have ended, by tenant. Bounded: WINDOW * MAX_TENANTS numbers.

    mean: of the latest WINDOW or so, all tenants' together; 0.0 before any has ended.
    """

    def __init__(self) -> None:
        self._recent: dict[str | None, list[int]] = {}  # latest last; tenants too
        self._sorted: dict[str | None, list[int]] = {}  # of the same, until something is added
        self.mean = 0.0
        self._seen = 0

    def record(self, tenant: str | None, length: int) -> None:
        """`length` >= 0: output tokens of a sample that ended by itself or at its limit."""
        self._seen = min(self._seen + 1, WINDOW)
        self.mean += (length - self.mean) / self._seen
        lengths = self._recent.pop(tenant, [])
        lengths.append(length)
        del lengths[:-WINDOW]
        self._recent[tenant] = lengths
        self._sorted.pop(tenant, None)
        if len(self._recent) > MAX_TENANTS:
            oldest = next(iter(self._recent))
            del self._recent[oldest]
            self._sorted.pop(oldest, None)

    def expected(self, tenant: str | None, generated: int, cap: int, quantile: float) -> int:
        """Length of an output of which `generated` tokens are there and more are to come.

        The quantile (the smallest length that at least this share does not exceed) of the tenant's
        recent lengths above `generated`: the residual distribution P(L > l | L > generated). More
        than `generated` and at most `cap`, unless `generated` is `cap`. The cap itself where fewer
        than MIN_LENGTHS lengths are known, or none above `generated`.
        """
        recent = self._recent.get(tenant, [])
        if len(recent) < MIN_LENGTHS:
            return cap
        known = self._sorted.get(tenant)
        if known is None:
            known = self._sorted[tenant] = sorted(recent)
        first = bisect_right(known, generated)
        left = len(known) - first
        if left == 0:
            return cap
        return min(cap, known[first + max(0, math.ceil(quantile * left) - 1)])
