"""How many blocks does the order of eviction keep, against plain LRU, on real request traces?

Needs a folder of traces with block ids: `mooncake_conversation.csv` (block512_ids) and
`agent_sessions.csv` (block16_ids); give it as an argument or in PAGEDKV_TRACES. An id stands for a
block and all before it. Each request opens its blocks in the real BlockManager (one token a block),
computes the rest and closes. Prints the hit rate of both orders at capacities from a hundredth of
the distinct blocks up; nothing is asserted.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pagedkv.simulation.prefix_cache import hit_rate
from pagedkv.simulation.trace import read_trace

TRACES = ("mooncake_conversation.csv", "agent_sessions.csv")
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.6)


def main() -> None:
    folder = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("PAGEDKV_TRACES")
    if not folder:
        print("no traces: give their folder as an argument or in PAGEDKV_TRACES")
        return
    for name in TRACES:
        trace = read_trace(Path(folder) / name)
        assert trace.block_ids is not None
        distinct = len({block for ids in trace.block_ids for block in ids.tolist()})
        longest = max(map(len, trace.block_ids))
        print(f"{name}: {len(trace)} requests, {distinct} distinct blocks, longest {longest}")
        for num_blocks in sorted({max(longest, int(distinct * share)) for share in SHARES}):
            lru, ours = (
                100 * hit_rate(trace, num_blocks, eviction=policy).token_hit_rate
                for policy in ("lru", "slru")
            )
            print(
                f"  {num_blocks:7d} blocks: LRU {lru:6.2f} %, ours {ours:6.2f} %, {ours - lru:+.2f}"
            )


if __name__ == "__main__":
    main()
