"""Groups that move: each sample's K/V go with it, what they have in common once."""

from __future__ import annotations

import itertools
import random

import pytest
from moving import VOCAB, Cluster, Worker, toy_worker
from test_moving_requests import EOS, alone, check, random_add, request

from pagedkv.engine.leaving import Held, Leaving
from pagedkv.scheduling.messages import Abort, Add
from pagedkv.scheduling.params import BeamSearchParams
from pagedkv.scheduling.request import Request
from pagedkv.transfer.limits import TransferLimits

MODES = ("prefilled", "live")
PROMPT = range(1, 24)


def pair(sizes: tuple[int, int] = (4, 4), **settings) -> tuple[Cluster, Worker, Worker]:
    shared: dict = {}
    p, d = (
        toy_worker(name, shared, 400 // size, size, **settings)
        for name, size in zip("pd", sizes, strict=True)
    )
    return Cluster(p, d), p, d


def decode(cluster: Cluster, worker: Worker, name: str, tokens: int) -> None:
    """Until each sample has drawn so many."""
    while min(map(len, cluster.tokens(name))) < tokens:
        cluster.turn(worker)


def beams(name: str, width: int, tokens: int) -> Add:
    search = BeamSearchParams(width, tokens)
    return Add(name, tuple(PROMPT), search.sampling, 0.0, 0, beam=search)


@pytest.mark.parametrize("sizes", [(4, 4), (4, 3), (2, 16), (16, 2)])
@pytest.mark.parametrize("mode", MODES)
def test_samples_that_have_parted_are_not_computed_again(sizes: tuple[int, int], mode: str) -> None:
    cluster, p, d = pair(sizes)
    cluster.add(request("a", PROMPT, n=3, max_tokens=40, temperature=1.0), "p")
    decode(cluster, p, "a", 18)
    assert len(set(cluster.tokens("a"))) == 3
    assert cluster.move("a", "d", mode)
    cluster.run()
    check(cluster, ())
    assert cluster.moved == ["a"] and not cluster.failed
    assert d.core.scheduler.counters.recomputed_tokens == 0
    assert d.manager.num_evicted_blocks == 0
    # What is common once; of each sample its own, and at most a block that began in the prompt.
    own = 3 * (40 - 1)
    assert 23 + 3 * 17 <= dict(d.core.scheduler.counters.moved_tokens)["sent"] <= 23 + own


def test_what_the_receiver_has_of_a_sample_is_not_sent() -> None:
    """To the other worker and back: the second move brings what was drawn meanwhile."""
    cluster, p, d = pair()
    cluster.add(request("a", PROMPT, n=2, max_tokens=60, temperature=1.0), "p")
    decode(cluster, p, "a", 20)
    cluster.move("a", "d", "live")
    while not cluster.moved:
        for worker in (p, d):
            cluster.turn(worker)
    at_return = min(map(len, cluster.tokens("a")))
    decode(cluster, d, "a", at_return + 6)
    assert cluster.move("a", "p", "live")
    cluster.run()
    check(cluster, ())
    assert cluster.moved == ["a", "a"] and not cluster.failed
    # Less than the common part and the first twenty tokens of each.
    came = dict(p.core.scheduler.counters.moved_tokens)
    assert 0 < came["sent"] < 2 * 20
    assert came["cached"] >= 23 + 2 * 19  # of all lines, what is common once
    for worker in (p, d):
        assert worker.core.scheduler.counters.recomputed_tokens == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 6, 9, 13])
def test_beams_go_with_their_tree(steps: int, mode: str) -> None:
    """They take each other's places while they run: their own follow when they stand still."""
    cluster, p, d = pair((4, 3), budget=8)
    cluster.add(beams("b", 3, 20), "p")
    for _ in range(steps):
        cluster.turn(p)
    assert cluster.move("b", "d", mode)
    cluster.run()
    check(cluster, ())
    assert cluster.moved == ["b"] and not cluster.failed
    assert d.core.scheduler.counters.recomputed_tokens == 0


def test_a_sample_that_ends_on_the_way_is_left_out() -> None:
    """One of three is ended by the front end between two rounds of a live move."""
    cluster, p, d = pair()
    cluster.add(request("a", PROMPT, n=3, max_tokens=60, temperature=1.0), "p")
    decode(cluster, p, "a", 30)
    cluster.move("a", "d", "live")
    while not any(it.parted for it in d.moves.endpoint.receiver._moves.values()):
        for worker in (p, d):
            cluster.turn(worker)
    p.core.send(Abort("a@0", 1))
    cluster.run()
    assert cluster.moved == ["a"]
    reasons = [d.finish_reason for d in cluster.deltas["a"] if d.finish_reason]
    assert sorted(reasons) == ["abort", "length", "length"]
    assert d.core.scheduler.counters.recomputed_tokens == 0
    cluster.check_idle()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("turns", range(6))
def test_a_group_of_which_one_sample_is_left_goes_on_moving(turns: int, mode: str) -> None:
    """The other one is ended by the front end, such as at a stop string, while they stand still.

    A copy that does not know of that end is disowned: the request goes on where it was then.
    """
    cluster, p, d = pair()
    cluster.add(request("a", PROMPT, n=2, max_tokens=30, temperature=1.0), "p")
    assert cluster.move("a", "d", mode)
    decode(cluster, p, "a", 1)
    for _ in range(turns):
        for worker in (d, p):
            cluster.turn(worker)
    cluster.abort(cluster.fence.owner("a"), Abort("a", 1))
    cluster.aborts.append(Abort("a", 1))
    cluster.run(turns=80)
    assert bool(cluster.moved) != bool(cluster.failed)
    assert not any("cannot be read" in failure.reason for failure in cluster.failed)
    ends = {d.sample: d.finish_reason for d in cluster.deltas["a"] if d.finish_reason}
    assert ends == {0: "length", 1: "abort"}
    alone_too, _ = alone(cluster.adds["a"], ())
    assert cluster.tokens("a")[0] == alone_too[0]
    cluster.check_idle()


def test_a_parked_group_of_which_nothing_can_be_read_goes_on_where_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster, *_ = pair()
    held, looks = Leaving.held, itertools.count()

    def seldom(leaving: Leaving, request: Request) -> Held | None:
        return None if leaving.parked and next(looks) else held(leaving, request)

    monkeypatch.setattr(Leaving, "held", seldom)
    cluster.add(request("a", PROMPT, n=2, max_tokens=30, temperature=1.0), "p")
    assert cluster.move("a", "d")
    cluster.run(turns=80)
    reasons = {it.reason for it in cluster.failed}  # of both sides
    assert not cluster.moved
    assert reasons == {"K/V of the request that stands still cannot be read here"}
    check(cluster, ())


def test_rows_that_do_not_suffice_leave_the_samples_behind() -> None:
    """The prompt moves then, and the samples' own tokens are computed again."""
    cluster, p, d = pair(spare=2)
    cluster.add(request("a", PROMPT, n=3, max_tokens=30, temperature=1.0), "p")
    decode(cluster, p, "a", 10)
    cluster.move("a", "d", "live")
    cluster.run()
    check(cluster, ())
    assert cluster.moved == ["a"] and not cluster.failed
    assert dict(d.core.scheduler.counters.moved_tokens)["sent"] == 23
    assert d.core.scheduler.counters.recomputed_tokens > 20


@pytest.mark.parametrize("seed", range(12))
def test_random_moves_of_random_groups_under_pressure(seed: int) -> None:
    rng = random.Random(seed)
    shared: dict = {}
    losses = rng.choice((0.0, 0.1))
    limits = TransferLimits(piece_bytes=rng.choice((1, 4 << 20)))
    workers = [
        toy_worker(
            name,
            shared,
            num_blocks=120 // size,
            block_size=size,
            budget=rng.choice((8, 16)),
            eos=EOS,
            limits=limits,
            sanitize=seed % 3 == 0,
        )
        for name, size in zip("pd", rng.choices((1, 2, 3, 4, 8), k=2), strict=True)
    ]
    cluster = Cluster(*workers, lose=lambda: rng.random() < losses)
    adds = []
    for i in range(5):
        if rng.random() < 0.3:
            adds.append(random_add(rng, f"r{i}"))
        elif rng.random() < 0.5:
            adds.append(beams(f"r{i}", 2, rng.randint(2, 12)))
        else:
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 14))]
            n = rng.choice((2, 3))
            adds.append(
                request(f"r{i}", prompt, n=n, temperature=1.0, max_tokens=rng.randint(4, 24))
            )

    def each() -> None:
        if adds and rng.random() < 0.4:
            cluster.add(adds.pop(), rng.choice("pd"))
        if rng.random() < 0.4 and cluster.adds:
            name = rng.choice(sorted(cluster.adds))
            cluster.move(name, rng.choice("pd"), rng.choice(("live", "live", "prefilled")))

    each()
    while adds:
        cluster.run(each=each)
    cluster.run(each=each)
    check(cluster)
