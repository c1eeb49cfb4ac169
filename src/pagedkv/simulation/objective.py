"""When users are served well: tokens in time for so many of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pagedkv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Objective:
    """A request is served well if its first token comes within `ttft` and the others, on average,
    within `tpot` of one another, both in seconds; a load is borne if a `share` of the requests is.

    Goodput is the highest rate that is borne, a device: the definition of DistServe (Zhong et al.,
    OSDI 2024), with its share of 0.9. ConfigError for what cannot be.
    """

    ttft: float
    tpot: float
    share: float = 0.9

    def __post_init__(self) -> None:
        for name in ("ttft", "tpot"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name}={getattr(self, name)}: give more than 0 seconds")
        if not 0 < self.share < 1:
            raise ConfigError(f"share={self.share}: give more than 0 and less than 1")

    def met(self, ttft: float, tpot: float) -> bool:
        """Whether a request that had its first token after `ttft` was served well.

        tpot: mean time between its tokens, NaN for a single one; ttft: NaN if it had none.
        """
        return ttft <= self.ttft and not tpot > self.tpot
