"""The picture of an engine says what the block manager and the scheduler say, block by block."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest
from harness import Run

from pagedkv.cache import BlockManager
from pagedkv.cache.survey import STATES
from pagedkv.engine import picture
from pagedkv.engine.picture import NO_OWNER, take_picture
from pagedkv.engine.wire import Answer, pack, unpack_from_core
from pagedkv.scheduling.decisions import DecisionLog


def states_one_by_one(manager: BlockManager) -> list[str]:
    """From the definitions, block by block."""
    found = []
    for block in range(1, manager.num_blocks + 1):
        pool = manager.pool
        if pool.counts[block] > 0:
            found.append("shared" if pool.counts[block] > 1 else "held")
        elif pool.leases[block]:
            found.append("draining")
        else:
            found.append("cached" if pool.extents[block] else "free")
    return found


def filled_one_by_one(run: Run) -> list[int]:
    manager = run.manager
    filled = manager.pool.extents.tolist()
    for seq in run.scheduler.sequences:
        left = manager.length(seq)
        for block in manager.block_table(seq).tolist():
            filled[block] = max(filled[block], min(max(left, 0), manager.block_size))
            left -= manager.block_size
    return filled[1:]


def check(run: Run) -> dict:
    """A picture, all of it compared with the objects."""
    seen = take_picture(run.core)
    pool, manager, size = seen["pool"], run.manager, run.manager.num_blocks
    states = [STATES[i] for i in pool["states"]]
    assert states == states_one_by_one(manager)
    assert pool["numbers"] == {name: states.count(name) for name in STATES}
    assert np.frombuffer(pool["counts"], "<u2").tolist() == manager.pool.counts[1:].tolist()
    assert np.frombuffer(pool["filled"], "<u2").tolist() == filled_one_by_one(run)
    tables = [manager.block_table(seq).tolist() for seq in run.scheduler.sequences]
    first = [
        next((i for i, t in enumerate(tables) if b in t), NO_OWNER) for b in range(1, size + 1)
    ]
    assert np.frombuffer(pool["owners"], "<u2").tolist() == first
    rows = [np.frombuffer(row["blocks"], "<i4").tolist() for row in seen["sequences"]]
    assert rows == tables
    assert [row["num_blocks"] for row in seen["sequences"]] == list(map(len, tables))
    assert sum(tenant["blocks"] for tenant in seen["tenants"]) == size - first.count(NO_OWNER)
    return seen


def test_a_picture_of_an_engine_that_has_done_nothing() -> None:
    run = Run(num_blocks=5)
    seen = check(run)
    assert seen["pool"]["numbers"]["free"] == 5
    assert seen["sequences"] == seen["tenants"] == seen["decisions"] == []
    assert seen["waiting"] == {"count": 0, "requests": []}


def test_every_step_of_a_run_with_groups_beams_and_preemptions() -> None:
    run = Run(num_blocks=24, block_size=4, budget=16, max_num_seqs=6)
    prompt = list(range(1, 15))
    run.add("a", prompt, tenant="x", max_tokens=12, ignore_eos=True)
    run.add("b", prompt[:9], tenant="y", n=3, temperature=1.0, max_tokens=14, ignore_eos=True)
    run.add("c", [*prompt[:6], 40, 41], max_tokens=20, ignore_eos=True)
    run.add("d", [7] * 11, tenant="x", max_tokens=25, ignore_eos=True)
    shared = waited = preempted = 0
    while run.core.has_unfinished():
        run.step()
        seen = check(run)
        shared += seen["pool"]["numbers"]["shared"]
        waited += seen["waiting"]["count"]
        preempted += sum(r["state"] == "preempted" for r in seen["waiting"]["requests"])
        running = {row["request"] for row in seen["sequences"]}
        assert running.isdisjoint(r["request"] for r in seen["waiting"]["requests"])
    assert shared and waited and preempted
    assert seen["pool"]["numbers"]["cached"] > 0
    words = "\n".join(entry["words"] for entry in seen["decisions"])
    assert "arrived (tenant x): 14 prompt tokens" in words
    assert "preempted in step" in words
    assert not [entry for entry in seen["decisions"] if entry["kind"] == "chunk"]


def test_rows_say_how_far_they_are() -> None:
    run = Run(block_size=4, budget=4)
    run.add("one", range(1, 11), tenant="x", max_tokens=3, ignore_eos=True)
    rows = []
    while run.core.has_unfinished():
        run.step()
        rows += check(run)["sequences"]
    told = [(row["state"], row["tokens"], row["output_tokens"]) for row in rows]
    assert told == [
        ("prefill", 4, 0),
        ("prefill", 8, 0),
        ("decode", 10, 1),
        ("decode", 11, 2),
    ]
    assert {(row["request"], row["tenant"], row["prompt_tokens"]) for row in rows} == {
        ("one", "x", 10)
    }


def test_a_block_that_one_holds_in_part_and_another_whole_is_full() -> None:
    manager = BlockManager(8, 4, prefix_caching=False)
    one = manager.open()
    manager.reserve([one], [4])
    manager.commit([one], [[1, 2, 3, 4]])
    (two,) = manager.fork(one)
    manager.truncate(two, 2)
    seen = picture.survey(manager, [two, one])
    assert seen.filled.tolist()[:2] == [4, 0]
    assert seen.owners.tolist()[0] == 0
    manager.close(one)
    assert picture.survey(manager, [two]).filled.tolist()[0] == 2
    manager.close(two)


def test_reserved_slots_hold_no_token_yet_and_leased_blocks_drain() -> None:
    manager = BlockManager(8, 4)
    seq = manager.open()
    manager.reserve([seq], [6])
    assert picture.survey(manager, [seq]).filled.tolist() == [0] * 8
    manager.commit([seq], [[1, 2, 3, 4, 5, 6]])
    seen = picture.survey(manager, [seq])
    assert seen.filled.tolist()[:3] == [4, 2, 0]
    with manager.lease(manager.block_table(seq)[:1].copy()):
        manager.close(seq)
        states = [STATES[i] for i in picture.survey(manager, []).states]
        assert states[:3] == ["draining", "cached", "free"]


def test_it_travels_to_a_front_and_on_as_json() -> None:
    run = Run()
    run.add("a", range(1, 13), tenant="x", max_tokens=6, ignore_eos=True)
    run.step()
    seen = take_picture(run.core)
    assert unpack_from_core(pack(Answer(1, seen))) == Answer(1, seen)
    assert json.loads(msgspec.json.encode(seen))["pool"]["num_blocks"] == 64
    run.abort("a")
    run.step()


def test_a_picture_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids of shared blocks in all rows together, requests that wait, decisions."""
    monkeypatch.setattr(picture, "FEWEST_IDS", 20)
    monkeypatch.setattr(picture, "MOST_WAITING", 3)
    monkeypatch.setattr(picture, "MOST_DECISIONS", 5)
    run = Run(num_blocks=40, block_size=1, budget=40, max_num_seqs=8, max_model_len=35)
    run.add("group", range(1, 25), n=8, temperature=1.0, max_tokens=4, ignore_eos=True)
    for i in range(9):
        run.add(f"w{i}", [1, 2, 3], tenant=f"t{i % 2}", max_tokens=2)
    run.step()
    run.step()
    seen = take_picture(run.core)
    rows = [len(row["blocks"]) // 4 for row in seen["sequences"]]
    assert len(rows) == 8 and sum(rows) <= 40 < sum(r["num_blocks"] for r in seen["sequences"])
    assert rows == [5] * 8
    assert seen["waiting"]["count"] == 9
    assert [r["request"] for r in seen["waiting"]["requests"]] == ["w0", "w2", "w1"]
    assert len(seen["decisions"]) == 5
    run.finish()


def test_decisions_stand_where_they_were_true_for_the_last_time() -> None:
    log = DecisionLog(10_000)
    log.at(1, 1.0)
    log.wait("a", "budget", budget=4, pending=9)
    log.at(2, 2.0)
    log.note("fail", message="gone")
    log.at(3, 3.0)
    log.wait("a", "budget", budget=4, pending=9)
    told = picture._decisions(log)
    assert [(entry["kind"], entry["now"]) for entry in told] == [("fail", 2.0), ("wait", 3.0)]
    for i in range(200):
        log.wait(f"w{i}", "budget", budget=4, pending=9)
    told = picture._decisions(log)
    assert [entry["kind"] for entry in told].count("wait") == picture.MOST_DECISIONS // 3
    assert "fail" in [entry["kind"] for entry in told]


@pytest.mark.parametrize(
    ("lengths", "total", "most"),
    [([], 5, 1), ([3, 4], 10, 4), ([1, 9, 9], 11, 5), ([9, 9], 1, 1), ([2, 3, 50], 20, 15)],
)
def test_tables_are_cut_evenly(lengths: list[int], total: int, most: int) -> None:
    assert picture._cut(lengths, total) == most
