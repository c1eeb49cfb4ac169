"""How many blocks does the order of eviction keep, against plain LRU, on real request traces?

Needs a folder of traces with block ids: `mooncake_conversation.csv` (block512_ids) and
`agent_sessions.csv` (block16_ids); give it as an argument or in PAGEDKV_TRACES. An id stands for a
block and all before it. Each request opens its blocks in the real BlockManager (one token a block),
computes the rest and closes. Prints the hit rate of both orders at capacities from a hundredth of
the distinct blocks up; nothing is asserted.
"""

from __future__ import annotations

import csv
import os
import sys
from pathlib import Path

from pagedkv.cache import BlockManager

TRACES = {"mooncake_conversation.csv": "block512_ids", "agent_sessions.csv": "block16_ids"}
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.6)


def read_ids(text: str) -> list[int]:
    """Run-length coded ids: "0-2 7" is [0, 1, 2, 7]."""
    ids: list[int] = []
    for item in text.split():
        first, _, last = item.partition("-")
        ids += range(int(first), int(last or first) + 1)
    return ids


def hit_rate(requests: list[list[int]], num_blocks: int, lru: bool) -> float:
    m = BlockManager(num_blocks, 1, max_seqs=1)
    m.pool.eviction.resistant = not lru
    found = asked = 0
    for ids in requests:
        ids = ids[:num_blocks]
        seq = m.open(ids)
        rest = ids[m.length(seq) :]
        found += m.length(seq)
        asked += len(ids)
        m.reserve([seq], [len(rest)])
        m.commit([seq], [rest])
        m.close(seq)
    return 100 * found / max(asked, 1)


def main() -> None:
    folder = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("PAGEDKV_TRACES")
    if not folder:
        print("no traces: give their folder as an argument or in PAGEDKV_TRACES")
        return
    for name, column in TRACES.items():
        with (Path(folder) / name).open() as lines:
            requests = [read_ids(row[column]) for row in csv.DictReader(lines)]
        distinct = len({block for ids in requests for block in ids})
        longest = max(map(len, requests))
        print(f"{name}: {len(requests)} requests, {distinct} distinct blocks, longest {longest}")
        for num_blocks in sorted({max(longest, int(distinct * share)) for share in SHARES}):
            lru = hit_rate(requests, num_blocks, lru=True)
            ours = hit_rate(requests, num_blocks, lru=False)
            print(
                f"  {num_blocks:7d} blocks: LRU {lru:6.2f} %, ours {ours:6.2f} %, {ours - lru:+.2f}"
            )


if __name__ == "__main__":
    main()
