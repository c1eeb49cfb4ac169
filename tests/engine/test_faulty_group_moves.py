"""A group whose samples have parted moves while each message in turn meets with a fault."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from moving import Cluster, Worker, toy_worker
from test_moving_requests import alone, outcome, request

from pagedkv.cache import BlockManager
from pagedkv.engine.wire import FromPeer, MoveNews, MoveOrder, PeerGone, ToPeer
from pagedkv.scheduling.messages import Abort, Delta
from pagedkv.transfer.limits import TransferLimits
from pagedkv.transfer.messages import Data, Part, unpack

FRAME_FAULTS = ("drop", "duplicate", "delay", "overtake", "corrupt")
PAYLOAD_FAULTS = ("spoil", "lose")
DEATHS = ("kill_sender", "kill_receiver")
MODES = ("prefilled", "live")
LATE = {"delay": 9, "overtake": 1, "duplicate": 2}  # turns
LIMITS = TransferLimits(lease=4.0, retry=1.0, retries=4, patience=6.0, piece_bytes=1)
ADD = request("a", range(1, 7), n=2, max_tokens=18, temperature=1.0)
EXPECTED = alone(ADD, ())


class Faulty(Cluster):
    """The n-th frame between workers p and d meets with a fault. told: of the death of a peer."""

    def __init__(self, faults: Mapping[int, str], told: bool) -> None:
        self.payloads: dict = {}
        super().__init__(
            *(
                toy_worker(name, self.payloads, 100 // size, size, limits=LIMITS)
                for name, size in zip("pd", (4, 3), strict=True)
            )
        )
        self.faults, self.told = faults, told
        self.kinds: list[type] = []  # of each frame
        self.late: list[tuple[float, str, FromPeer]] = []
        self.dying: list[str] = []

    def hear(self, worker: Worker, news: MoveNews) -> None:
        if not isinstance(news, ToPeer):
            super().hear(worker, news)
            return
        fault, message = self.faults.get(len(self.kinds)), unpack(news.frame)
        self.kinds.append(type(message))
        order = FromPeer(worker.name, news.frame)
        if fault in DEATHS:
            self.dying.append(worker.name if fault == "kill_sender" else news.worker)
        if fault == "corrupt":
            place = len(news.frame) // 2
            changed = bytes([news.frame[place] ^ 0x40])
            frame = news.frame[:place] + changed + news.frame[place + 1 :]
            order = FromPeer(worker.name, frame)
        if fault in PAYLOAD_FAULTS and isinstance(message, Data):
            payload = np.array(self.payloads[message.payload])
            payload[len(payload) // 3] ^= 1
            self.payloads[message.payload] = payload if fault == "spoil" else payload[:0]
        if fault in LATE:
            self.late.append((self.now + 0.3 * LATE[fault], news.worker, order))
        if fault not in ("drop", "delay", "overtake"):
            self.order(news.worker, order)

    def order(self, worker: str, order: MoveOrder | Abort) -> None:
        if worker in self.workers:
            super().order(worker, order)

    def deliver(self, delta: Delta) -> None:
        super().deliver(delta)
        self.act([] if self.is_open("a") else self.fence.close("a"))

    def each(self) -> None:
        """Between two turns: who dies, dies; what is late comes."""
        for name in self.dying:
            dead = self.workers.pop(name, None)
            if dead is not None:
                let_go(dead.manager)
                self.act(self.fence.worker_lost(name))
                for other in self.workers if self.told else ():
                    self.order(other, PeerGone(name))
        self.dying.clear()
        due = [entry for entry in self.late if entry[0] <= self.now]
        self.late = [entry for entry in self.late if entry[0] > self.now]
        for _, worker, order in due:
            self.order(worker, order)


def let_go(manager: BlockManager) -> None:
    """What a worker holds dies with it."""
    for lease in list(manager.leases):
        manager.end_lease(lease)
    for seq in manager.table.seqs[manager.table.seqs > 0].tolist():
        manager.close(seq)


def run(mode: str, faults: Mapping[int, str], told: bool = True) -> Faulty:
    cluster = Faulty(faults, told)
    cluster.add(ADD, "p")
    while min(map(len, cluster.tokens("a"))) < 5:
        cluster.turn(cluster.workers["p"])
    cluster.move("a", "d", mode)
    cluster.run(200, cluster.each)
    while cluster.late:
        cluster.now += 0.3
        cluster.each()
        for worker in cluster.workers.values():
            cluster.turn(worker)
    assert outcome(cluster.deltas["a"], 2) == EXPECTED
    cluster.check_idle()
    return cluster


BASELINE = {mode: run(mode, {}) for mode in MODES}


@pytest.mark.parametrize("mode", MODES)
def test_samples_have_lines_of_their_own(mode: str) -> None:
    assert BASELINE[mode].kinds.count(Part) == 1
    assert BASELINE[mode].moved == ["a"]


@pytest.mark.parametrize("fault", FRAME_FAULTS)
@pytest.mark.parametrize("mode", MODES)
def test_a_fault_at_any_message_changes_nothing(mode: str, fault: str) -> None:
    for number in range(len(BASELINE[mode].kinds)):
        cluster = run(mode, {number: fault})
        assert cluster.moved == ["a"] or fault in ("drop", "delay", "corrupt"), number
        if cluster.moved:
            again = cluster.workers["d"].core.scheduler.counters.recomputed_tokens
            assert again <= 2 * 4, number  # a partly filled block of each


@pytest.mark.parametrize("fault", PAYLOAD_FAULTS)
@pytest.mark.parametrize("mode", MODES)
def test_a_payload_that_is_not_as_it_was_comes_again(mode: str, fault: str) -> None:
    for number, kind in enumerate(BASELINE[mode].kinds):
        if kind is Data:
            assert run(mode, {number: fault}).moved == ["a"], number


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("death", DEATHS)
@pytest.mark.parametrize("mode", MODES)
def test_a_death_at_any_message_loses_nothing(mode: str, death: str, told: bool) -> None:
    for number in range(len(BASELINE[mode].kinds)):
        run(mode, {number: death}, told)
