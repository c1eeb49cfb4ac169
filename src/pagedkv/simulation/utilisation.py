"""How much of the slots that a request reserves holds tokens, over its life: paging and the rest.

Exact sums, no queueing: step k = 1 ... output of a request has prompt + k - 1 live tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pagedkv.errors import ConfigError
from pagedkv.simulation.trace import Int64, Trace


@dataclass(frozen=True, slots=True)
class Utilisation:
    """Live tokens / reserved slots, each summed over all steps of all requests."""

    paged: dict[int, float]  # by block size: ceil(live / B) * B slots
    max: float  # `max_length` slots for every request
    pow2: float  # prompt + the smallest power of two >= output
    oracle: float  # prompt + output
    max_length: int
    longer: int  # requests of more tokens than max_length


def utilisation(
    trace: Trace, block_sizes: Sequence[int], max_length: int | None = None
) -> Utilisation:
    """Compares reservations on a trace. max_length: None: its longest request's.

    ConfigError: no block size, one outside [1, 2**31), no output in the trace, max_length below 1.
    """
    for size in block_sizes:
        if not 1 <= size < 2**31:
            raise ConfigError(f"block size {size}: give at least 1 and less than 2**31")
    if not block_sizes:
        raise ConfigError("no block sizes: give at least one")
    prompts, outputs = trace.prompt_tokens, trace.output_tokens
    if not outputs.any():
        raise ConfigError("no request of the trace has an output: there is no step to look at")
    longest = int((prompts + outputs).max())
    limit = longest if max_length is None else max_length
    if limit < 1:
        raise ConfigError(f"max_length={limit}: give at least 1")
    live = _sum(_triangle(prompts + outputs - 1) - _triangle(prompts - 1))
    powers = 2 ** np.ceil(np.log2(np.maximum(outputs, 1))).astype(np.int64)
    return Utilisation(
        {
            size: live / _sum(_slots(prompts + outputs - 1, size) - _slots(prompts - 1, size))
            for size in block_sizes
        },
        live / (limit * _sum(outputs)),
        live / _sum(outputs * (prompts + powers)),
        live / _sum(outputs * (prompts + outputs)),
        limit,
        int(((prompts + outputs) > limit).sum()),
    )


def _triangle(n: Int64) -> Int64:
    """1 + 2 + ... + n."""
    return n * (n + 1) // 2


def _slots(n: Int64, size: int) -> Int64:
    """Sum of ceil(x / size) * size over x = 1 ... n."""
    full, rest = np.divmod(n, size)
    slots: Int64 = size * (size * _triangle(full) + rest * (full + 1))
    return slots


def _sum(values: Int64) -> int:
    """As a Python integer: of long traces the sum may pass int64."""
    return sum(values.tolist())
