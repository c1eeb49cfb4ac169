"""Is swap or recompute, chosen for each victim by measured cost, better than either alone?

Run: python benchmarks/bench_recovery.py [--requests 120]

Requests with short prompts, with long ones, and with both wait for a pool that holds a few of
them, so that many are preempted. The tier below the device hangs on a link from 0.5 to 32 GB/s; a
token of K/V has 128 KiB, as of an 8B model with 8 K/V heads. The scheduler and the block manager
are the real ones, a step takes 2 ms + 30 us a token + 20 ns a query-key pair, and waits for its
transfers. For each bandwidth the seconds until all is done if victims are always swapped, always
recomputed, and brought back by what is predicted to take less ("auto"); and auto / the better of
the two. Bars: at most 1.05 at every bandwidth, below 1 where the two cross on both kinds of
prompts together. The figures do not depend on the machine's speed. Nothing is asserted.
"""

from __future__ import annotations

import argparse

import numpy as np

from pagedkv.simulation.executor import LinearCost
from pagedkv.simulation.link import Link
from pagedkv.simulation.serve import Server, serve
from pagedkv.simulation.trace import Trace

COST = LinearCost(2e-3, 30e-6, 0.0, 20e-9)
TOKEN_BYTES = 128 * 1024
BLOCK = 16
PIECE = 20e-6  # seconds of a copy, whatever its size
POOLS = {"short": 300, "long": 900, "mixed": 600}
BANDWIDTHS = (0.5, 1, 2, 4, 5, 6, 8, 16, 32)


def workload(kind: str, requests: int) -> Trace:
    """All requests at once: prompts of 64-200 tokens, of 2,000-4,000, or 70 % of the former."""
    rng = np.random.default_rng(0)
    short, long = rng.integers(64, 200, requests), rng.integers(2000, 4000, requests)
    mixed = np.where(rng.random(requests) < 0.7, short, long)
    prompts = {"short": short, "long": long, "mixed": mixed}[kind]
    return Trace(None, prompts, rng.integers(200, 600, requests), None, None, None)


def seconds(trace: Trace, blocks: int, bandwidth: float, recovery: str, caching: bool) -> float:
    link = Link(20_000, BLOCK * TOKEN_BYTES, bandwidth * 1e9, PIECE)
    server = Server(blocks, BLOCK, 64, 2048, prefix_caching=caching, link=link, recovery=recovery)
    return serve(trace, server, COST).seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=120)
    requests = parser.parse_args().requests
    worst = 0.0
    for caching in (False, True):
        for kind, blocks in POOLS.items():
            trace = workload(kind, requests)
            print(f"{kind} prompts, prefix caching {'on' if caching else 'off'}")
            print("   GB/s      swap  recompute      auto  auto / better")
            for bandwidth in BANDWIDTHS:
                swap, recompute, auto = (
                    seconds(trace, blocks, bandwidth, recovery, caching)
                    for recovery in ("swap", "recompute", "auto")
                )
                ratio = auto / min(swap, recompute)
                worst = max(worst, ratio)
                print(
                    f"{bandwidth:7.1f} {swap:9.2f} {recompute:10.2f} {auto:9.2f} {ratio:14.3f}",
                    flush=True,
                )
    print(f"auto / better, worst: {worst:.3f} (bar 1.05)")


if __name__ == "__main__":
    main()
