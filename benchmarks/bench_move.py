"""What does it cost to move a sequence to another worker, and how long does it stand still?

Two workers with the embedded model, in one process; K/V go through shared memory, as between
processes. First a sequence that stands still is moved, then some of the same prompt, whose K/V are
there already: only table and state travel. Both against computing the prompt. Then both workers
run, each in a thread of its own with decodes beside, and a request is moved to and fro while it
decodes, of one sample and of several: what it stood still for is the pause between a sample's last
token here and its first there, in median pauses between its tokens, less the one that would have
been there anyway; of several samples the longest. Printed beside a calibration loop of the same
run; nothing is asserted.

Run: python benchmarks/bench_move.py [--tokens 1900] [--moves 6]
"""

from __future__ import annotations

import argparse
import queue
import statistics
import threading
import time
from collections import deque
from dataclasses import replace
from itertools import pairwise, product

import numpy as np

from calibration import print_calibration
from pagedkv import LLM, SamplingParams
from pagedkv.engine.core import EngineCore
from pagedkv.engine.core_loop import CoreLoop
from pagedkv.engine.moves import Moves
from pagedkv.engine.open_moves import open_moves
from pagedkv.engine.wire import (
    Batch,
    Close,
    Complete,
    Disown,
    FromCore,
    FromPeer,
    Move,
    MoveFailed,
    Own,
    ToPeer,
)
from pagedkv.scheduling.messages import Abort, Add
from pagedkv.transfer.fence import Fence, Raised
from pagedkv.transfer.messages import MoveId, split_owned_id

MODEL = "smollm2-135m-instruct"
NAMES = ("a", "b")
STATES = 5  # moves of table and state alone, of each sequence
GROUP = 4  # samples


class Worker:
    def __init__(self, name: str, tokens: int) -> None:
        self.name = name
        blocks = 3 * (tokens + 600) // 16
        self.llm = LLM(MODEL, num_blocks=blocks, preallocate=True, max_moves=8)
        self.core: EngineCore = self.llm.engine.core
        self.moves: Moves = open_moves(self.core, name, 1)


def request(name: str, prompt: list[int], output: int, n: int = 1) -> Add:
    heat = 0.0 if n == 1 else 1.0  # samples are to part
    params = SamplingParams(n=n, temperature=heat, max_tokens=output, ignore_eos=True)
    return Add(name, tuple(prompt), params, time.monotonic(), 0)


def random_prompt(rng: np.random.Generator, tokens: int) -> list[int]:
    return rng.integers(100, 40_000, tokens).tolist()


def carry(workers: dict[str, Worker], source: str, move: Move) -> float:
    """Seconds that both sides together work on the move of a request that is not stepped."""
    orders = deque([(source, move)])
    start = time.perf_counter()
    while orders:
        name, order = orders.popleft()
        worker = workers[name]
        worker.moves.handle(order, time.monotonic())
        worker.moves.advance(time.monotonic())
        for news in worker.moves.take_news():
            match news:
                case ToPeer(to, frame):
                    orders.append((to, FromPeer(name, frame)))
                case Complete(request_id, epoch):
                    orders.append((name, Own(request_id, epoch)))
                case MoveFailed():
                    raise RuntimeError(news.reason)
    return time.perf_counter() - start


def start(worker: Worker, names: list[str], prompt: list[int]) -> float:
    """Steps until all of the requests have their first token; the seconds that it takes."""
    for name in names:
        worker.core.send(request(f"{name}@0", prompt, 8))
    begin = time.perf_counter()
    running = worker.core.scheduler.roster.running
    while len(running) < len(names) or not all(one.started for one in running):
        worker.core.step(time.monotonic())
    return time.perf_counter() - begin


def end(worker: Worker) -> None:
    while worker.core.has_unfinished():
        worker.core.step(time.monotonic())
    worker.moves.advance(time.monotonic())


def bench_still(workers: dict[str, Worker], tokens: int, rounds: int) -> None:
    rng = np.random.default_rng(0)
    computed, moved, state = [], [], []
    a, b = (workers[name] for name in NAMES)
    for i in range(rounds + 1):
        prompt = random_prompt(rng, tokens)
        seconds = start(a, [f"first {i}"], prompt)
        move = carry(workers, "a", Move(f"first {i}", 1, "b", "live"))
        end(b)
        others = [f"other {i} {j}" for j in range(STATES)]
        start(a, others, prompt)
        alone = [carry(workers, "a", Move(name, 1, "b", "live")) for name in others]
        end(b)
        if i:  # the first one introduces the workers, and touches the memory
            computed.append(seconds)
            moved.append(move)
            state += alone
    size = a.llm.report.bytes_per_token * tokens / 2**20
    compute, move = statistics.median(computed), statistics.median(moved)
    print(f"\na sequence of {tokens} tokens, {size:.0f} MiB of K/V, medians of {rounds}")
    print(f"  to compute its prompt        {compute * 1e3:10.1f} ms")
    print(f"  to move it                   {move * 1e3:10.1f} ms  {move / compute:8.2%} of that")
    share = statistics.median(state)
    print(f"  to move its table and state  {share * 1e3:10.2f} ms  {share / compute:8.3%}")


class Front:
    """Runs the workers in threads, and keeps the fence. times: of the tokens of each request."""

    def __init__(self, workers: dict[str, Worker]) -> None:
        self.news: queue.SimpleQueue[tuple[str, float, FromCore]] = queue.SimpleQueue()
        self.fence = Fence()
        self.loops = {name: self._loop(worker) for name, worker in workers.items()}
        self.threads = [threading.Thread(target=loop.run) for loop in self.loops.values()]
        for thread in self.threads:
            thread.start()

    def _loop(self, worker: Worker) -> CoreLoop:
        def post(frame: FromCore) -> None:
            self.news.put((worker.name, time.perf_counter(), frame))

        return CoreLoop(worker.core, post, moves=worker.moves)

    def add(self, add: Add, worker: str) -> None:
        owned = self.fence.open(add.request_id, worker, add.params.n).owned_id
        self.loops[worker].send(replace(add, request_id=owned))

    def move(self, request_id: str) -> None:
        owner = self.fence.owner(request_id)
        to = NAMES[owner.worker == NAMES[0]]
        move = self.fence.begin_move(request_id, to)
        self.loops[owner.worker].send(Move(request_id, move.epoch, to, "live"))

    def take(self) -> list[tuple[MoveId, int, float]]:
        """The next news; tokens that have come: by owner, of which sample, and when."""
        worker, now, frame = self.news.get()
        came, verdicts = [], []
        match frame:
            case Batch():
                for delta in frame.deltas:
                    move = split_owned_id(delta.request_id)
                    ended = delta.finish_reason is not None
                    sample = delta.sample
                    tokens, _, more = self.fence.deliver(move, sample, delta.token_ids, ended)
                    verdicts += more
                    came += [(move, sample, now)] * len(tokens)
            case ToPeer(to, data):
                self.loops[to].send(FromPeer(worker, data))
            case Complete():
                move = MoveId(frame.request_id, frame.epoch)
                verdicts += self.fence.complete(move, frame.counts, frame.ended)
            case MoveFailed():
                raise RuntimeError(frame.reason)
        for verdict in verdicts:
            if not isinstance(verdict, Raised):
                raise RuntimeError(f"{verdict} in a run without failures")
            self.loops[verdict.new.worker].send(Own(verdict.request, verdict.new.epoch))
            self.loops[verdict.old.worker].send(Disown(verdict.request, verdict.old.epoch))
        return came

    def close(self) -> None:
        for loop in self.loops.values():
            loop.send(Close())
        for thread in self.threads:
            thread.join()


def bench_live(workers: dict[str, Worker], lengths: list[int], moves: int) -> None:
    rng = np.random.default_rng(1)
    front = Front(workers)
    print(f"\nmoves while it decodes, {moves} of each length, both workers decode beside")
    for n, length in product((1, GROUP), lengths):
        names = [f"beside {n} {length} {name}" for name in NAMES]
        for name, worker in zip(names, NAMES, strict=True):
            front.add(request(name, random_prompt(rng, 20), 2000), worker)
        name = f"moves {n} {length}"
        output = 20 * (moves + 1)
        front.add(request(name, random_prompt(rng, length), output, n), NAMES[0])
        came: list[list[tuple[MoveId, float]]] = [[] for _ in range(n)]  # of each sample
        ordered = 0
        while min(map(len, came)) < output:
            for move, sample, now in front.take():
                if move.request == name:
                    came[sample].append((move, now))
            if ordered < moves and min(map(len, came)) >= 20 * (ordered + 1):
                ordered += 1
                front.move(name)
        for other in names:
            owner = front.fence.owner(other)
            front.loops[owner.worker].send(Abort(MoveId(other, owner.epoch).owned_id))
        steps = [step for own in came for step in pairwise(own)]
        changes: dict[MoveId, float] = {}  # the longest pause of a sample, by who came to own it
        for (old, last), (new, first) in steps:
            if old != new:
                changes[new] = max(changes.get(new, 0.0), first - last)
        usual = statistics.median(after[1] - before[1] for before, after in steps)
        stood = sorted(change / usual - 1 for change in changes.values())
        print(
            f"  {n} x {length:5} tokens: a token every {usual * 1e3:6.1f} ms; stood still for "
            f"{statistics.median(stood):5.2f} steps (median), {stood[-1]:5.2f} (most) "
            f"in {len(changes)} moves"
        )
    front.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1900)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--moves", type=int, default=6)
    given = parser.parse_args()
    print_calibration()
    workers = {name: Worker(name, given.tokens) for name in NAMES}
    bench_still(workers, given.tokens, given.rounds)
    bench_live(workers, [100, given.tokens], given.moves)


if __name__ == "__main__":
    main()
