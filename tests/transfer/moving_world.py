"""Workers, a front end and the links between them, tick by tick. The links can be made to fail.

What a token's K/V is, and which token follows, are functions of all tokens before: a wrong entry
is seen when it is read, and a wrong output when it is compared.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from pagedkv.cache import BlockManager, OutOfBlocks, SeqId
from pagedkv.transfer import actions as do
from pagedkv.transfer.departure import Mode
from pagedkv.transfer.endpoint import Endpoint
from pagedkv.transfer.fence import Disowned, Fence, Orphaned, Raised
from pagedkv.transfer.limits import TransferLimits
from pagedkv.transfer.messages import (
    Data,
    FrameError,
    Hello,
    Message,
    MoveId,
    Naming,
    pack,
    unpack,
)
from pagedkv.transfer.payload import as_blocks, filled, store, token_bytes
from pagedkv.transfer.state import pack_state, unpack_state

TICK = 0.25
LIMITS = TransferLimits(
    lease=4.0, retry=1.0, retries=4, patience=6.0, piece_bytes=128, window=2, memory=40.0
)
NAMING = Naming(b"tenant", 0, None)
FRAME_FAULTS = ("drop", "duplicate", "delay", "overtake", "corrupt")
PAYLOAD_FAULTS = ("spoil", "lose")
DEATHS = ("kill_sender", "kill_receiver")


def kv_of(tokens: Sequence[int], position: int) -> bytes:
    """16 bytes: a float32 pair each for K and V; of all tokens up to the position."""
    return xxhash.xxh3_128_digest(np.array(tokens[: position + 1], np.int32).tobytes())


def next_token(tokens: Sequence[int]) -> int:
    return xxhash.xxh3_64_intdigest(np.array(tokens, np.int32).tobytes()) % 1000 + 1


def undisturbed(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def hello(worker: str, num_blocks: int, block_size: int, boot: int = 1, **changes: Any) -> Hello:
    facts: dict[str, Any] = {
        "worker": worker,
        "boot": boot,
        "model": b"model",
        "num_layers": 1,
        "num_kv_heads": 1,
        "head_dim": 2,
        "dtype": "float32",
        "block_size": block_size,
        "num_blocks": num_blocks,
    }
    return Hello(**(facts | changes))


@dataclass
class Live:
    """A request at a worker."""

    id: MoveId
    prompt: list[int]
    output: list[int]
    limit: int
    seq: SeqId | None = None
    parked: bool = False
    waits: int = 0  # steps until it is admitted
    mode: Mode | None = None  # of the move under way
    move: MoveId | None = None

    @property
    def known(self) -> list[int]:
        return self.prompt + self.output


@dataclass
class Network:
    """Frames between workers. faults: what happens to the n-th frame that is sent."""

    faults: Mapping[int, str] = field(default_factory=dict)
    latency: int = 1
    count: int = 0
    queue: list[tuple[int, int, str, str, bytes]] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)  # of each frame: the name of its message

    def send(self, world: World, source: str, to: str, message: Message) -> None:
        number, self.count = self.count, self.count + 1
        self.kinds.append(type(message).__name__)
        frame, fault = pack(message), self.faults.get(number)
        due = world.ticks + self.latency
        if fault == "drop":
            return
        if fault in DEATHS:
            world.dying.append(source if fault == "kill_sender" else to)
        if fault == "corrupt":
            place = (number * 37) % len(frame)
            frame = frame[:place] + bytes([frame[place] ^ 0x40]) + frame[place + 1 :]
        if fault in PAYLOAD_FAULTS and isinstance(message, Data):
            blocks = world.workers[source].payloads.pop(message.payload)
            if fault == "spoil":
                spoilt = blocks.copy()
                spoilt.reshape(-1)[number % spoilt.size] ^= 1
                world.workers[source].payloads[message.payload] = spoilt
        late = {"delay": 9, "overtake": 2}.get(fault or "", 0)
        heapq.heappush(self.queue, (due + late, number, source, to, frame))
        if fault == "duplicate":
            heapq.heappush(self.queue, (due + 3, number, source, to, frame))

    def due(self, ticks: int) -> list[tuple[str, str, bytes]]:
        frames = []
        while self.queue and self.queue[0][0] <= ticks:
            frames.append(heapq.heappop(self.queue)[2:])
        return frames


class Worker:
    """A core with a scheduler that takes every request in every step, and the host of moves."""

    def __init__(self, world: World, ours: Hello, limits: TransferLimits, chunk: int) -> None:
        self.world, self.name, self.chunk = world, ours.worker, chunk
        self.manager = BlockManager(ours.num_blocks, ours.block_size, max_seqs=16)
        self.endpoint = Endpoint(self.manager, ours, limits)
        self.kv = np.zeros((ours.num_blocks + 1, token_bytes(ours) * ours.block_size), np.uint8)
        self.payloads: dict[bytes, Any] = {}  # the transport's: what references stand for
        self.requests: dict[MoveId, Live] = {}
        self.alive = True
        self.num_computed = 0  # tokens whose K/V was computed here
        self.remaining: list[int] = []  # tokens that were missing there when a request was parked
        self.parked_for: dict[MoveId, int] = {}  # ticks

    @property
    def now(self) -> float:
        """On its own clock."""
        return self.world.now + self.world.clocks.get(self.name, 0.0)

    # ---- the K/V store ------------------------------------------------------------------------

    def read(self, blocks: Any) -> Any:
        return self.kv[blocks]

    def write(self, blocks: Any, data: Any) -> None:
        self.kv[blocks] = data

    def _slots(self) -> Any:
        """The store as 16 bytes a slot, [slots, K/V, 8]."""
        ours = self.endpoint.ours
        return self.kv.reshape(-1, 2, ours.block_size, 8).transpose(0, 2, 1, 3)

    def verify(self, seq: SeqId, tokens: Sequence[int]) -> None:
        """Every committed token's K/V is what it must be."""
        size = self.manager.block_size
        table, length = self.manager.block_table(seq), self.manager.length(seq)
        for i in range(length):
            entry = self._slots()[table[i // size], i % size]
            assert entry.tobytes() == kv_of(tokens, i), f"{self.name}: K/V of token {i} is wrong"

    # ---- steps --------------------------------------------------------------------------------

    def step(self) -> None:
        for request in list(self.requests.values()):
            if request.waits:
                request.waits -= 1
            elif not request.parked:
                self._compute(request)
            else:
                self.parked_for[request.id] = self.parked_for.get(request.id, 0) + 1
        self.pump()

    def _compute(self, request: Live) -> None:
        manager, known = self.manager, request.known
        opened = request.seq is None
        if request.seq is None:
            request.seq = manager.open(known, *_args(NAMING))
            self.verify(request.seq, known)
        seq = request.seq
        start = manager.length(seq)
        count = min(self.chunk, len(known) - start)
        try:
            slots = manager.reserve([seq], [count])
        except OutOfBlocks:
            manager.close(seq)
            request.seq = None
            return
        if opened:
            self.endpoint.admitted(request.id, self.now)
        for source, target, _ in slots.copies:
            self.kv[target] = self.kv[source]
        size = manager.block_size
        for i, slot in enumerate(slots.slots, start):
            entry = np.frombuffer(kv_of(known, i), np.uint8).reshape(2, 8)
            self._slots()[slot // size, slot % size] = entry
        manager.commit([seq], [known[start : start + count]])
        self.num_computed += count
        if start + count == len(known):
            self._draw(request)

    def _draw(self, request: Live) -> None:
        index = len(request.output)
        request.output.append(next_token(request.known))
        ended = len(request.output) == request.limit
        self.world.to_front(self.name, ("delta", request.id, index, request.output[-1], ended))
        if ended:
            self.drop(request.id, "the request has ended here")
        elif request.mode == "prefilled":
            self._park(request)

    def _park(self, request: Live) -> None:
        assert request.seq is not None and request.move is not None
        request.parked = True
        state = pack_state((request.prompt, request.output, request.limit))
        counts, now = (len(request.output),), self.now
        self.carry(self.endpoint.parked(request.move, request.seq, state, counts, (False,), now))

    def pump(self) -> None:
        for request in list(self.requests.values()):
            if request.move in self.endpoint.sender and request.seq is not None:
                self.carry(self.endpoint.progress(request.move, request.seq, self.now))

    # ---- what comes ---------------------------------------------------------------------------

    def enter(self, request: Live) -> None:
        self.requests[request.id] = request

    def move(self, owned: MoveId, move: MoveId, to: str, mode: Mode) -> None:
        request = self.requests.get(owned)
        if request is None:
            self.world.to_front(self.name, ("failed", move))
            return
        tokens = np.array(request.known, np.int32)
        self.carry(self.endpoint.start(move, to, tokens, NAMING, mode, 2, self.now))
        if move in self.endpoint.sender:
            request.move, request.mode = move, mode

    def drop(self, owned: MoveId, reason: str) -> None:
        request = self.requests.pop(owned, None)
        if request is None:
            return
        if request.move is not None:
            self.carry(self.endpoint.cancel(request.move, reason))
        if request.seq is not None:
            self.manager.close(request.seq)

    def preempt(self, request: str) -> None:
        """The request loses its blocks, and goes on later; a parked one does not."""
        for live in self.requests.values():
            if live.id.request == request and live.seq is not None and not live.parked:
                self.manager.close(live.seq)
                self.manager.evict(self.manager.num_blocks)
                live.seq = None

    def abandon(self, request: str) -> None:
        """The move of a request is given up; it goes on here."""
        for live in self.requests.values():
            if live.id.request == request and live.move is not None:
                self.carry(self.endpoint.cancel(live.move, "given up"))
                live.move, live.mode, live.parked = None, None, False

    def receive(self, source: str, frame: bytes) -> None:
        try:
            message = unpack(frame)
        except FrameError:
            return
        self.carry(self.endpoint.handle(source, message, self.now))
        self.pump()

    def carry(self, todo: list[do.Action]) -> None:
        now, world = self.now, self.world
        for action in todo:
            match action:
                case do.Send(to, message):
                    world.network.send(world, self.name, to, message)
                case do.SendData(to, data, blocks):
                    reference = f"{self.name} {data.move.owned_id} {data.number}".encode()
                    self.payloads[reference] = self.read(blocks).copy()
                    message = filled(action, self.payloads[reference], reference)
                    world.sent_tokens += data.stop - data.start
                    world.network.send(world, self.name, to, message)
                case do.Free(move, number):
                    mine = f"{self.name} {move.owned_id} ".encode()
                    for key in [k for k in self.payloads if k.startswith(mine)]:
                        if int(key.rsplit(b" ", 1)[1]) <= number:
                            del self.payloads[key]
                case do.Park(move, remaining):
                    self.remaining.append(remaining)
                    self._park(next(r for r in self.requests.values() if r.move == move))
                case do.Released(move):
                    request = next(r for r in self.requests.values() if r.move == move)
                    request.move = None
                    self.drop(request.id, "")
                case do.Reclaimed(move):
                    for request in self.requests.values():
                        if request.move == move:
                            request.parked, request.move, request.mode = False, None, None
                    world.to_front(self.name, ("failed", move))
                case do.Copy(copies):
                    for source, target, _ in copies:
                        self.kv[target] = self.kv[source]
                case do.Write():
                    theirs = self.endpoint.peer(action.worker)
                    payload = world.workers[action.worker].payloads.get(action.data.payload, b"")
                    blocks = as_blocks(action.data, theirs, payload)
                    bad = store(action, blocks, self.endpoint.ours, theirs, self)
                    self.carry(self.endpoint.written(action.move, bad, now))
                case do.Completed(move, counts, ended):
                    world.to_front(self.name, ("complete", move, counts, ended))
                case do.Resumed(move, commit):
                    prompt, output, limit = unpack_state(
                        commit.state, tuple[list[int], list[int], int]
                    )
                    self.enter(Live(move, prompt, output, limit, waits=2))
                case do.Abandoned(move):
                    world.to_front(self.name, ("failed", move))


def _args(naming: Naming) -> tuple[bytes | None, int, bytes | None]:
    return naming.namespace, naming.public, naming.extra


class World:
    """Workers by name and one front end. Everything happens in `tick`."""

    def __init__(
        self,
        hellos: Sequence[Hello],
        faults: Mapping[int, str] | None = None,
        limits: TransferLimits = LIMITS,
        chunk: int = 3,
        deaths_are_told: bool = True,
        front_delays: Mapping[str, int] | None = None,
    ) -> None:
        self.ticks = 0
        self.network = Network(faults or {})
        self.limits, self.chunk, self.deaths_are_told = limits, chunk, deaths_are_told
        self.workers = {ours.worker: Worker(self, ours, limits, chunk) for ours in hellos}
        self.fence = Fence()
        self.front_alive = True
        self.front_delays = front_delays or {}
        self.up: list[tuple[int, int, str, tuple[Any, ...]]] = []
        self.down: deque[tuple[str, tuple[Any, ...]]] = deque()
        self.serial = 0
        self.delivered: dict[str, list[int]] = {}
        self.prompts: dict[str, list[int]] = {}
        self.limits_of: dict[str, int] = {}
        self.ended: set[str] = set()
        self.resumed: list[str] = []  # requests that were computed again from what was delivered
        self.raised: list[str] = []
        self.failed: list[MoveId] = []
        self.dying: list[str] = []
        self.states_at_death: set[str] = set()
        self.sent_tokens = 0  # whose K/V was sent, again counted again
        self.clocks: dict[str, float] = {}  # seconds by which a worker's clock is ahead

    @property
    def now(self) -> float:
        return self.ticks * TICK

    # ---- the front end ------------------------------------------------------------------------

    def submit(self, request: str, worker: str, prompt: list[int], limit: int) -> None:
        self.delivered[request], self.prompts[request] = [], prompt
        self.limits_of[request] = limit
        owned = self.fence.open(request, worker)
        self.down.append((worker, ("enter", Live(owned, prompt, [], limit))))

    def move(self, request: str, to: str, mode: Mode) -> MoveId:
        owner = self.fence.owner(request)
        assert owner is not None
        move = self.fence.begin_move(request, to)
        owned = MoveId(request, owner.epoch)
        self.down.append((owner.worker, ("move", owned, move, to, mode)))
        return move

    def to_front(self, worker: str, report: tuple[Any, ...]) -> None:
        self.serial += 1
        due = self.ticks + self.front_delays.get(worker, 1)
        heapq.heappush(self.up, (due, self.serial, worker, report))

    def _hear(self, worker: str, report: tuple[Any, ...]) -> None:
        match report:
            case ("delta", move, index, token, ended):
                tokens, end, verdicts = self.fence.deliver(move, 0, (token,), ended, index)
                self.delivered[move.request] += tokens
                self.judge(verdicts)
                if end:
                    self.ended.add(move.request)
                    self.judge(self.fence.close(move.request))
            case ("complete", move, counts, ended):
                self.judge(self.fence.complete(move, counts, ended))
            case ("failed", move):
                self.failed.append(move)
                self.judge(self.fence.move_failed(move, worker))

    def judge(self, verdicts: Sequence[Any]) -> None:
        for verdict in verdicts:
            match verdict:
                case Raised(request, old, new):
                    self.raised.append(request)
                    self.down.append((new.worker, ("own", MoveId(request, new.epoch))))
                    self.down.append((old.worker, ("drop", MoveId(request, old.epoch))))
                case Disowned(request, owner):
                    self.down.append((owner.worker, ("drop", MoveId(request, owner.epoch))))
                case Orphaned(request, tokens, _):
                    living = [name for name, worker in self.workers.items() if worker.alive]
                    owned = self.fence.resume(request, living[0])
                    self.resumed.append(request)
                    state = (self.prompts[request], list(tokens[0]), self.limits_of[request])
                    self.down.append((living[0], ("enter", Live(owned, *state))))

    def _obey(self, worker: Worker, order: tuple[Any, ...]) -> None:
        match order:
            case ("enter", request):
                worker.enter(request)
            case ("move", owned, move, to, mode):
                worker.move(owned, move, to, mode)
            case ("own", move):
                worker.carry(worker.endpoint.own(move, worker.now))
            case ("drop", owned):
                worker.carry(worker.endpoint.disown(owned, "the front end says so", worker.now))
                worker.drop(owned, "the front end says so")

    # ---- time ---------------------------------------------------------------------------------

    def kill(self, name: str) -> None:
        worker = self.workers[name]
        if not worker.alive:
            return
        worker.alive = False
        worker.payloads.clear()
        if self.front_alive:
            # What it had sent to the front end arrives; then the link is seen to be down.
            self.up = [
                (self.ticks + 1, *rest) if rest[1] == name else (due, *rest)
                for due, *rest in self.up
            ]
            heapq.heapify(self.up)
            self.serial += 1
            heapq.heappush(self.up, (self.ticks + 2, self.serial, name, ("lost",)))

    def note_states(self, move: MoveId) -> None:
        """Remembers the state of both sides of a move, for tests that somebody dies in each."""
        for worker in self.workers.values():
            for side in (worker.endpoint.sender, worker.endpoint.receiver):
                self.states_at_death.add(side.state(move) if move in side else "none")

    def restart(self, name: str) -> None:
        """Kills a worker; another one of its name is there at once, with empty stores."""
        old = self.workers[name]
        facts = {f: getattr(old.endpoint.ours, f) for f in old.endpoint.ours.__struct_fields__}
        self.kill(name)
        self.up = [entry for entry in self.up if entry[3] != ("lost",) or entry[2] != name]
        heapq.heapify(self.up)
        self._let_go(old)
        self.workers[name] = Worker(
            self, Hello(**facts | {"boot": facts["boot"] + 1}), self.limits, self.chunk
        )
        self.judge(self.fence.worker_lost(name))

    def tick(self) -> None:
        self.ticks += 1
        for source, to, frame in self.network.due(self.ticks):
            if self.workers[to].alive:
                self.workers[to].receive(source, frame)
        while self.front_alive and self.up and self.up[0][0] <= self.ticks:
            _, _, name, report = heapq.heappop(self.up)
            if report == ("lost",):
                self.judge(self.fence.worker_lost(name))
                for other in self._living() if self.deaths_are_told else []:
                    other.carry(other.endpoint.peer_gone(name, other.now))
            else:
                self._hear(name, report)
        while self.front_alive and self.down:
            name, order = self.down.popleft()
            if self.workers[name].alive:
                self._obey(self.workers[name], order)
        for worker in self._living():
            worker.carry(worker.endpoint.tick(worker.now))
            worker.step()
        for name in self.dying:
            self.kill(name)
        self.dying.clear()
        self.check()

    def _living(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.alive]

    def check(self) -> None:
        """Every block is in one state, each open sequence has one holder, and an id one worker."""
        owned = [move for worker in self._living() for move in worker.requests]
        assert len(set(owned)) == len(owned)
        for worker in self._living():
            manager, endpoint = worker.manager, worker.endpoint
            manager.check()
            states = manager.num_free_blocks, manager.num_cached_blocks
            in_use = manager.num_held_blocks, manager.num_draining_blocks
            assert sum(states) + sum(in_use) == manager.num_blocks
            mine = sum(request.seq is not None for request in worker.requests.values())
            theirs = sum(
                endpoint.receiver.state(move) != "owned" for move in endpoint.receiver.moves
            )
            assert manager.num_open_sequences == mine + theirs

    def run(self, most: int = 600) -> None:
        """Until nothing is left to do; AssertionError, if that does not come."""
        for _ in range(most):
            self.tick()
            if self.idle:
                return
        raise AssertionError(f"not idle after {most} ticks: {self.network.kinds[-10:]}")

    @property
    def idle(self) -> bool:
        busy = any(
            w.requests or w.endpoint.sender.moves or w.endpoint.receiver.moves
            for w in self._living()
        )
        quiet = not self.front_alive or (not self.up and not self.down)
        return quiet and not busy and not self.network.queue

    def check_end(self) -> None:
        """All tokens are those of the undisturbed run; nothing is held, or waits to be read."""
        for request, prompt in self.prompts.items():
            expected = undisturbed(prompt, self.limits_of[request])
            if self.front_alive:
                assert self.delivered[request] == expected
                assert request in self.ended
            else:
                assert self.delivered[request] == expected[: len(self.delivered[request])]
        for worker in self._living():
            manager = worker.manager
            assert manager.num_held_blocks == manager.num_draining_blocks == 0
            assert not worker.payloads
        self.forget_the_dead()

    def forget_the_dead(self) -> None:
        """What a killed worker held dies with it."""
        for worker in self.workers.values():
            if not worker.alive:
                self._let_go(worker)

    def _let_go(self, worker: Worker) -> None:
        for lease in list(worker.manager.leases):
            worker.manager.end_lease(lease)
        for seq in worker.manager.table.seqs[worker.manager.table.seqs > 0].tolist():
            worker.manager.close(seq)
