"""What several engines look like, as one picture: pools one behind the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pagedkv.engine.picture import MOST_DECISIONS, MOST_TENANTS, MOST_WAITING, NO_OWNER


def join_pictures(pictures: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Of at least one worker, by name; see `take_picture`.

    Block b of a worker is block b + (blocks of the workers before it). Sequences and requests that
    wait say which `worker` has them, decisions begin with it.
    """
    parts = list(pictures.values())
    return {
        "pool": _pool([part["pool"] for part in parts], [len(part["sequences"]) for part in parts]),
        "sequences": _sequences(pictures),
        "waiting": {
            "count": sum(part["waiting"]["count"] for part in parts),
            "requests": [
                {**request, "worker": name}
                for name, part in pictures.items()
                for request in part["waiting"]["requests"]
            ][:MOST_WAITING],
        },
        "tenants": _tenants(parts),
        "decisions": sorted(
            (
                {**decision, "words": f"{name}: {decision['words']}"}
                for name, part in pictures.items()
                for decision in part["decisions"]
            ),
            key=lambda decision: float(decision["now"]),
        )[-MOST_DECISIONS:],
    }


def _pool(pools: Sequence[dict[str, Any]], num_sequences: Sequence[int]) -> dict[str, Any]:
    numbers: Counter[str] = Counter()
    owners, before = [], 0
    for pool, count in zip(pools, num_sequences, strict=True):
        numbers.update(pool["numbers"])
        own = np.frombuffer(pool["owners"], "<u2").astype(np.int64)
        moved = np.where(own == NO_OWNER, NO_OWNER, np.minimum(own + before, NO_OWNER))
        owners.append(moved.astype("<u2").tobytes())
        before += count
    return {
        "num_blocks": sum(pool["num_blocks"] for pool in pools),
        "block_size": pools[0]["block_size"],
        "numbers": {state: numbers[state] for state in pools[0]["numbers"]},
        "owners": b"".join(owners),
        **{name: b"".join(pool[name] for pool in pools) for name in ("states", "counts", "filled")},
    }


def _sequences(pictures: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    sequences, before = [], 0
    for name, part in pictures.items():
        for sequence in part["sequences"]:
            blocks = np.frombuffer(sequence["blocks"], "<i4") + np.int32(before)
            sequences.append({**sequence, "worker": name, "blocks": blocks.astype("<i4").tobytes()})
        before += part["pool"]["num_blocks"]
    return sequences


def _tenants(parts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    sums: dict[str | None, Counter[str]] = {}
    for part in parts:
        for tenant in part["tenants"]:
            counted = {name: tenant[name] for name in ("running", "waiting", "blocks")}
            sums.setdefault(tenant["tenant"], Counter()).update(counted)
    return [
        {"tenant": name, **{k: counted[k] for k in ("running", "waiting", "blocks")}}
        for name, counted in sums.items()
    ][:MOST_TENANTS]
