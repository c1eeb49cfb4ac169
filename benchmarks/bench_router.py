"""What does a routing decision cost, and how does that grow with the workers?

A decision is naming the prompt's blocks as far as they are known, the look-up, the score of every
worker, the choice. 1,000,000 (`--decisions`) of them with 1,000 workers, and a tenth as many with
10 and 100 before that, to see how it grows; half of them prefill and half decode, on hosts of 8.
The bar: of the 1,000,000, 99 of 100 take less than 1 ms. Times are given of the processor, in which
other work on this machine does not count, and by the clock.

Prompts: 500 conversations, chosen by Zipf's law, over 20 system prompts of 512 tokens; lengths are
log-normal, 1,500 tokens on average and 8,192 at most; blocks of 16. The workers' caches are as they
would be: whatever a request computes is told by its workers in events, and the oldest of 65,536
blocks a worker leave. A worker reports after every tenth request that it gets. Events and reports
are timed apart.

Then one decision by the length of the prompt, wholly cached at every tenth of 1,000 workers.
"""

from __future__ import annotations

import argparse
import time
from array import array
from collections import OrderedDict
from collections.abc import Iterator

import numpy as np

from calibration import print_calibration
from pagedkv.cache.index import make_frames
from pagedkv.tiers.names import BlockName, Namer
from pagedkv.transfer.events import (
    MEDIUM,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
    KVEventBatch,
)
from pagedkv.transfer.router import Router
from pagedkv.transfer.routing import (
    Arrival,
    Assign,
    Ended,
    RouterConfig,
    RouterEvent,
    WorkerEvents,
    WorkerReport,
)

BAR_S = 0.001
BLOCK, LONGEST = 16, 8192
CONVERSATIONS, SYSTEM_PROMPTS, SYSTEM_TOKENS = 500, 20, 512
WORKERS = (10, 100, 1000)
HOST_SIZE = 8
POOL = 65_536  # blocks a worker
REPORT_EVERY = 10  # requests of a worker
BUSY = 64  # requests that each worker has at a time
RATE = 10_000.0  # tokens a second
LENGTHS = (128, 1024, 8192, 32_768)
NAMER = Namer(b"benchmark")
FRAMES = make_frames("a tenant", None)


class Worker:
    """A worker's cache, and what it tells."""

    def __init__(self, name: str, role: str, host: str) -> None:
        self.name, self.role, self.host = name, role, host
        self.prompts: OrderedDict[int, list[BlockName]] = OrderedDict()
        self.blocks = 0
        self.seq = 1
        self.seen: list[str] = []

    def report(self) -> WorkerReport:
        seen, self.seen = tuple(self.seen), []
        return WorkerReport(
            self.name,
            self.role,
            num_blocks=1_000_000,
            free_blocks=900_000,
            prefill_tokens_per_s=RATE,
            running=BUSY,
            step_s=0.02,
            step_s_per_sequence=0.0002,
            host=self.host,
            seen=seen,
        )

    def computes(self, conversation: int, names: list[BlockName]) -> WorkerEvents | None:
        """Events of a prompt that is in the cache now."""
        have = self.prompts.pop(conversation, [])
        new = names[len(have) :]
        self.prompts[conversation] = max(have, names, key=len)
        events: list[KVEvent] = []
        if new:
            parent = have[-1] if have else None
            tokens = [0] * BLOCK * len(new)
            events.append(BlockStored([*new], parent, tokens, BLOCK, None, MEDIUM, None))
            self.blocks += len(new)
        while self.blocks > POOL:
            _, gone = self.prompts.popitem(last=False)
            # Not the system prompt: other conversations go on with it.
            events.append(BlockRemoved([*gone[SYSTEM_TOKENS // BLOCK :]], MEDIUM))
            self.blocks -= len(gone)
        if not events:
            return None
        self.seq += 1
        return WorkerEvents(self.name, self.seq - 1, KVEventBatch(0.0, events))


class Run:
    """A fleet under requests, and the seconds that each kind of event took."""

    def __init__(self, num_workers: int, texts: np.ndarray) -> None:
        self.chains = [NAMER.chain(text, FRAMES, 0, BLOCK) for text in texts]
        self.router = Router(RouterConfig(block_size=BLOCK, kv_bytes_per_token=131_072))
        split = num_workers > 1
        roles = ("prefill", "decode") if split else ("both",)
        self.workers = {
            name: Worker(name, roles[i % len(roles)], f"host{i // HOST_SIZE}")
            for i in range(num_workers)
            for name in [f"worker{i}"]
        }
        self.seconds: dict[str, array[float]] = {}  # of the processor
        self.by_clock = array("d")  # seconds of decisions
        for worker in self.workers.values():
            self.router.handle(worker.report(), 0.0)
            cleared = KVEventBatch(0.0, [AllBlocksCleared()])
            self.router.handle(WorkerEvents(worker.name, 0, cleared), 0.0)
        self.hits = self.tokens = 0
        self.running: list[str] = []

    def timed(self, event: RouterEvent, now: float) -> list[object]:
        clock, start = time.perf_counter(), time.thread_time()
        decisions = self.router.handle(event, now)
        took = time.thread_time() - start
        if isinstance(event, Arrival):
            self.by_clock.append(time.perf_counter() - clock)
        self.seconds.setdefault(type(event).__name__, array("d")).append(took)
        return list(decisions)

    def serve(self, number: int, conversation: int, tokens: np.ndarray) -> None:
        now, request = number / (RATE * len(self.workers)), f"request{number}"
        names = NAMER.walk(tokens, FRAMES, 0, BLOCK)
        (decision,) = self.timed(Arrival(request, len(tokens), 256, names), now)
        assert isinstance(decision, Assign)
        self.hits += decision.cached_tokens
        self.tokens += len(tokens)
        whole = self.chains[conversation][: len(tokens) // BLOCK]
        for name in dict.fromkeys((decision.prefill, decision.decode)):
            worker = self.workers[name]
            worker.seen.append(request)
            if events := worker.computes(conversation, whole):
                self.timed(events, now)
            if len(worker.seen) == REPORT_EVERY:
                self.timed(worker.report(), now)
        self.running.append(request)
        if len(self.running) > BUSY * len(self.workers):
            self.timed(Ended(self.running[-BUSY * len(self.workers)]), now)
            if len(self.running) > 2 * BUSY * len(self.workers):
                del self.running[: BUSY * len(self.workers)]


def conversations(seed: int = 1) -> np.ndarray:
    """All that is ever said in each, int32 [conversations, longest]."""
    rng = np.random.default_rng(seed)
    texts = rng.integers(0, 50_000, (CONVERSATIONS, LONGEST), dtype=np.int32)
    systems = rng.integers(0, 50_000, (SYSTEM_PROMPTS, SYSTEM_TOKENS), dtype=np.int32)
    texts[:, :SYSTEM_TOKENS] = systems[rng.integers(0, SYSTEM_PROMPTS, CONVERSATIONS)]
    return texts


def prompts(seed: int = 1) -> Iterator[tuple[int, int]]:
    """Endless: (conversation, tokens of it so far)."""
    rng = np.random.default_rng(seed)
    weights = 1 / np.arange(1, CONVERSATIONS + 1)
    while True:
        chosen = rng.choice(CONVERSATIONS, 10_000, p=weights / weights.sum())
        lengths = np.clip(rng.lognormal(np.log(1100), 0.8, 10_000), 16, LONGEST).astype(int)
        yield from zip(chosen.tolist(), lengths.tolist(), strict=True)


def by_length(num_workers: int = 1000, runs: int = 200) -> None:
    print(f"\none decision among {num_workers} workers, a tenth of which have the whole prompt")
    print(f"{'prompt tokens':>14}{'blocks':>8}{'mean us':>10}{'p99 us':>10}")
    for length in LENGTHS:
        tokens = np.arange(length, dtype=np.int32)
        run = Run(num_workers, tokens[:0][None])
        names = NAMER.chain(tokens, FRAMES, 0, BLOCK)
        for worker in [*run.workers.values()][::10]:
            if events := worker.computes(0, names):
                run.router.handle(events, 0.0)
        for i in range(runs):
            walk = NAMER.walk(tokens, FRAMES, 0, BLOCK)
            run.timed(Arrival(f"r{i}", length, 256, walk), 0.0)
            run.router.handle(Ended(f"r{i}"), 0.0)
        took = np.array(run.seconds["Arrival"]) * 1e6
        print(f"{length:>14,}{len(names):>8,}{took.mean():>10.0f}{np.percentile(took, 99):>10.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--decisions", type=int, default=1_000_000, help="of the largest fleet")
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS)
    arguments = parser.parse_args()
    texts = conversations()
    print_calibration()
    print(
        f"{'':>19}{'a decision, us of CPU':>32}{'by the clock':>16}\n"
        f"{'workers':>8}{'decisions':>11}{'mean':>8}{'p50':>8}{'p99':>8}{'p99.9':>8}{'p50':>8}"
        f"{'p99':>8}{'cached':>8}{'names':>11}{'a report':>10}{'an event':>10}{'an end':>8}"
        f"{'CPU s':>8}"
    )
    largest = max(arguments.workers)
    for num_workers in arguments.workers:
        decisions = arguments.decisions // (1 if num_workers == largest else 10)
        run, wall, cpu = Run(num_workers, texts), time.perf_counter(), time.process_time()
        for number, (conversation, length) in zip(range(decisions), prompts(), strict=False):
            run.serve(number, conversation, texts[conversation, :length])
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        took, clock = (np.array(times) * 1e6 for times in (run.seconds["Arrival"], run.by_clock))
        p50, p99, p999 = np.percentile(took, (50, 99, 99.9))
        clock50, clock99 = np.percentile(clock, (50, 99))
        others = [
            np.mean(run.seconds.get(kind, [0.0])) * 1e6
            for kind in ("WorkerReport", "WorkerEvents", "Ended")
        ]
        print(
            f"{num_workers:>8,}{decisions:>11,}{took.mean():>8.0f}{p50:>8.0f}{p99:>8.0f}{p999:>8.0f}"
            f"{clock50:>8.0f}{clock99:>8.0f}{run.hits / run.tokens:>8.0%}"
            f"{len(run.router.prefixes):>11,}{others[0]:>10.0f}{others[1]:>10.0f}{others[2]:>8.0f}"
            f"{cpu:>8.0f}",
            flush=True,
        )
        if num_workers == largest:
            print(
                f"{decisions:,} decisions among {num_workers:,} workers: P50 {p50:.0f} us and P99 "
                f"{p99:.0f} us of CPU, P50 {clock50:.0f} us and P99 {clock99:.0f} us by the clock "
                f"[bar: P99 {BAR_S * 1e6:.0f} us]; wall {wall:.0f} s with all events"
            )
    by_length()


if __name__ == "__main__":
    main()
