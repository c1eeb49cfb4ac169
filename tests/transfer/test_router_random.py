"""Random events: every request is answered once, and nothing of those that are over is left."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pagedkv.transfer.events import AllBlocksCleared, BlockStored, KVEventBatch
from pagedkv.transfer.router import Router
from pagedkv.transfer.routing import (
    Arrival,
    Assign,
    Ended,
    FlipConfig,
    RouterConfig,
    Shed,
    Tick,
    WorkerEvents,
    WorkerGone,
    WorkerReport,
)

WORKERS = tuple(f"w{i}" for i in range(20))  # more than the fleet has places for at the start
NAMES = [bytes([i]) * 16 for i in range(10)]


class Model:
    """What a router is told, and what it must hold to."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        flip = FlipConfig(patience_s=1.0, rest_s=5.0)
        self.router = Router(RouterConfig(16, 1000, epsilon_s=0.01, max_held=20, flip=flip))
        self.reports: dict[str, WorkerReport] = {}
        self.roles = {name: ("prefill", "decode", "both")[i % 3] for i, name in enumerate(WORKERS)}
        self.waiting: dict[str, Arrival] = {}
        self.sent: dict[str, dict[str, int]] = {}  # blocks by request and worker, not reported yet
        self.live: list[str] = []
        self.answers = {"Assign": 0, "Shed": 0}
        self.now, self.count = 0.0, 0

    def handle(self, event: Any) -> None:
        for decision in self.router.handle(event, self.now):
            if isinstance(decision, Shed):
                del self.waiting[decision.request_id]
                self.answers["Shed"] += 1
            elif isinstance(decision, Assign):
                self.assigned(decision, self.waiting.pop(decision.request_id))
                self.answers["Assign"] += 1
        assert self.router.num_held == len(self.waiting)
        assert all(
            arrival.deadline is None or arrival.deadline >= self.now
            for arrival in self.waiting.values()
        )

    def assigned(self, decision: Assign, arrival: Arrival) -> None:
        whole = -(-(arrival.prompt_tokens + arrival.output_tokens) // 16)
        prompt = -(-arrival.prompt_tokens // 16)
        stays = decision.prefill == decision.decode
        blocks = {decision.prefill: whole if stays else prompt, decision.decode: whole}
        if not stays:
            for worker, taken in blocks.items():
                room = self.room(worker)
                assert min(taken, self.reports[worker].num_blocks) <= room, "promised too much"
        for worker in blocks:
            assert not self.reports[worker].draining
        self.sent[arrival.request_id] = blocks
        self.live.append(arrival.request_id)

    def room(self, worker: str) -> int:
        report = self.reports[worker]
        on_the_way = sum(blocks.get(worker, 0) for blocks in self.sent.values())
        return report.free_blocks - report.promised_blocks - on_the_way

    def step(self) -> None:
        rng = self.rng
        self.now += float(rng.exponential(0.05))
        act = rng.integers(20)
        worker = WORKERS[rng.integers(len(WORKERS))]
        if act < 8:
            self.count += 1
            request = f"r{self.count}"
            arrival = Arrival(
                request,
                int(rng.integers(1, 200)),
                int(rng.integers(0, 200)),
                NAMES[: rng.integers(10)],
                deadline=None if rng.integers(2) else self.now + float(rng.exponential(1.0)),
                priority=int(rng.integers(3)),
                tenant=(None, "a", "b")[rng.integers(3)],
            )
            self.waiting[request] = arrival
            self.handle(arrival)
        elif act < 13:
            blocks = int(rng.integers(1, 40))
            seen = tuple(r for r, blocks_of in self.sent.items() if worker in blocks_of)
            report = WorkerReport(
                worker,
                self.roles[worker],
                num_blocks=blocks,
                free_blocks=int(rng.integers(blocks + 1)),
                prefill_tokens_per_s=1000.0,
                queued_tokens=int(rng.integers(3000)),
                host="xy"[rng.integers(2)],
                draining=rng.integers(10) == 0,
                seen=seen[: rng.integers(len(seen) + 1)],
            )
            self.reports[worker] = report
            for request in report.seen:
                del self.sent[request][worker]
            self.handle(report)
        elif act < 15 and self.live:
            request = self.live.pop(int(rng.integers(len(self.live))))
            del self.sent[request]
            self.handle(Ended(request))
        elif act == 15 and self.waiting:
            request = next(iter(self.waiting))
            del self.waiting[request]
            self.handle(Ended(request))
        elif act == 16:
            self.reports.pop(worker, None)
            for blocks_of in self.sent.values():
                blocks_of.pop(worker, None)
            self.handle(WorkerGone(worker))
        elif act < 19:
            stored = BlockStored(NAMES[: rng.integers(10)], None, [], 16, None, "GPU", None)
            batch = KVEventBatch(0.0, [AllBlocksCleared(), stored])
            self.handle(WorkerEvents(worker, int(rng.integers(5)), batch))
        else:
            self.handle(Tick())


@pytest.mark.parametrize("seed", range(5))
def test_conservation_every_request_is_answered_once_and_rooms_add_up(seed: int) -> None:
    model = Model(seed)
    for _ in range(800):
        model.step()
        router = model.router
        assert set(router.fleet.places) == set(model.reports)
        for worker, place in router.fleet.places.items():
            assert router.fleet.columns["room"][place] == model.room(worker)
    stats = model.router.stats()
    assert (stats.assigned, stats.shed) == (model.answers["Assign"], model.answers["Shed"])
    assert stats.assigned > 100
    assert stats.shed > 10
    for request in [*model.live, *model.waiting]:
        model.waiting.pop(request, None)
        model.sent.pop(request, None)
        model.handle(Ended(request))
    for worker in [*model.reports]:
        del model.reports[worker]
        model.handle(WorkerGone(worker))
    assert len(model.router.prefixes) == 0
    assert model.router.num_held == 0
