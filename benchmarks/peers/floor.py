"""The least time that a workload can take on a machine, from its two limits.

Each step takes at least max(bytes / bandwidth, flops / rate); the floor is their sum. The prefill
of all prompts is one step, a common prefix computed once; then each decode step reads all weights,
the K/V of every row that still runs, and those of a common prefix once for all. The output head is
computed for rows that give a token only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagedkv.bench.limits import Limits
from peers.workloads import Workload


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a model: weights of its layers and of its head, K and V values of a token, and operations
    of one query against one key (both in all layers)."""

    linear: int
    head: int
    kv: int
    attention: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Shape:
        """From the config.json of a Llama-like model."""
        hidden, layers = config["hidden_size"], config["num_hidden_layers"]
        queries = config["num_attention_heads"] * config["head_dim"]
        keys = config["num_key_value_heads"] * config["head_dim"]
        layer = 2 * hidden * queries + 2 * hidden * keys + 3 * hidden * config["intermediate_size"]
        return cls(
            linear=layers * layer,
            head=hidden * config["vocab_size"],
            kv=2 * layers * keys,
            attention=4 * layers * queries,
        )


def floor_seconds(workload: Workload, shape: Shape, limits: Limits, itemsize: int) -> float:
    """itemsize: bytes of a weight and of a K or V value."""

    def step(values: float, flops: float) -> float:
        return limits.floor(itemsize * values, flops)

    weights = shape.linear + shape.head
    flops = 0.0
    for i, (prompt, _) in enumerate(workload.requests):
        start = workload.shared if i else 0
        new = len(prompt) - start
        flops += 2 * shape.linear * new + 2 * shape.head
        flops += shape.attention * (start * new + new * new / 2)
    seconds = step(weights, flops)
    for t in range(1, max(output for _, output in workload.requests)):
        contexts = [len(prompt) + t for prompt, output in workload.requests if output > t]
        read = sum(contexts) - workload.shared * (len(contexts) - 1)
        seconds += step(
            weights + shape.kv * read,
            2 * weights * len(contexts) + shape.attention * sum(contexts),
        )
    return seconds
