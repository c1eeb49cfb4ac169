"""The comparison with other engines: what is drawn, the least time, who is measured when."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pagedkv.bench.limits import Limits
from peers.catalogue import Place, catalogue
from peers.compare import Comparison, Run, alike, compare, slow
from peers.curve import curve_table
from peers.engines import BENCHMARKS, EngineDied, EngineProcess, Setting
from peers.floor import Shape, floor_seconds
from peers.tables import settings_tables, speed_table
from peers.workloads import Workload, make_workloads, marked

IDS = range(100, 240)
SMALL = {"W1": Workload("W1", "small", (([1, 2, 3], 2), ([1, 2], 1)))}

FAKE = """
import sys
from pathlib import Path
from peers.protocol import Engine, serve

class Fake(Engine):
    def __init__(self, options):
        self.log, self.name, self.dies = Path(options["log"]), options["name"], options["dies"]
        self.info = {"version": "1"}
        self.runs = 0

    def generate(self, workload, requests):
        print("noise that is no answer")
        self.runs += 1
        if self.runs == self.dies:
            sys.exit("out of luck")
        with self.log.open("a") as log:
            print(self.name, requests[0][0][0], file=log)
        return [[7] * output for _, output in requests]

serve(Fake)
"""


def fake(folder: Path, name: str, dies: int = 0) -> Setting:
    (folder / "fake_engine.py").write_text(FAKE)
    options = {"log": str(folder / "log"), "name": name, "dies": dies}
    path = {"PYTHONPATH": f"{BENCHMARKS}:{folder}"}
    return Setting(name, "as it is", "fake_engine", sys.executable, options, path)


def test_a_seed_decides_the_draw() -> None:
    first, again, other = (make_workloads(IDS, seed) for seed in (1, 1, 2))
    assert first == again
    for name, workload in first.items():
        assert workload.requests != other[name].requests
        assert len(workload.requests) == len(other[name].requests)


def test_the_workloads_are_what_they_are_called() -> None:
    made = make_workloads(IDS)
    shapes = {name: [(len(p), n) for p, n in w.requests] for name, w in made.items()}
    assert shapes["W1"] == [(128, 128)]
    assert len(shapes["W2"]) == 32
    assert {min(p for p, _ in shapes["W2"]), max(p for p, _ in shapes["W2"])} == {16, 512}
    assert {min(n for _, n in shapes["W2"]), max(n for _, n in shapes["W2"])} == {8, 256}
    assert shapes["W3"] == [(544, 64)] * 16
    assert len({tuple(prompt[:512]) for prompt, _ in made["W3"].requests}) == 1
    assert len({prompt[512] for prompt, _ in made["W3"].requests}) == 16
    assert shapes["W4"] == [(1900, 64)] * 4
    assert shapes["W5"] == [(1900, 1)]


def test_no_run_begins_as_another_does() -> None:
    made = make_workloads(IDS)
    marks = [
        {prompt[0] for prompt, _ in marked(workload, turn * 5 + number)}
        for turn in range(6)
        for number, workload in enumerate(made.values())
    ]
    assert len(set().union(*marks)) == sum(map(len, marks))
    assert [len(m) for m in marks[:5]] == [1, 32, 1, 4, 1]  # W3 alone shares a prefix
    assert marked(made["W2"], 3)[0][0][1:] == made["W2"].requests[0][0][1:]


def test_the_floor_by_hand() -> None:
    shape = Shape(linear=100, head=50, kv=4, attention=10)
    workload = Workload("W", "", (([0] * 6, 3), ([0] * 5, 2)), shared=4)
    # Prefill: 6 new tokens, then 1 after 4 in common; two outputs.
    prefill = 2 * 100 * 7 + 2 * 2 * 50 + 10 * (6 * 6 / 2 + 4 * 1 + 1 / 2)
    both = 2 * 150 * 2 + 10 * (7 + 6)
    one = 2 * 150 + 10 * 8
    by_rate = floor_seconds(workload, shape, Limits(1e30, 10.0), itemsize=2)
    assert by_rate == pytest.approx((prefill + both + one) / 10)
    # All weights in each step, and the four tokens in common once.
    read = 150 + (150 + 4 * (7 + 6 - 4)) + (150 + 4 * 8)
    by_bandwidth = floor_seconds(workload, shape, Limits(10.0, 1e30), itemsize=2)
    assert by_bandwidth == pytest.approx(2 * read / 10)


def test_the_shape_of_a_llama() -> None:
    config = {
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "intermediate_size": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 2,
        "vocab_size": 10,
    }
    layer = 8 * 8 + 8 * 4 + 8 * 4 + 8 * 8 + 3 * 8 * 16  # q, k, v, output, gate and up and down
    assert Shape.of(config) == Shape(linear=2 * layer, head=80, kv=2 * 2 * 4, attention=4 * 2 * 8)


def test_engines_take_turns_on_the_same_requests(tmp_path: Path) -> None:
    with (
        EngineProcess(fake(tmp_path, "a")) as a,
        EngineProcess(fake(tmp_path, "b")) as b,
    ):
        result = compare([a, b], SMALL, 2, lambda _: None, settle=0)
    lines = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    rounds = [lines[0:2], lines[2:4], lines[4:6]]
    assert len(lines) == 6
    assert [[name for name, _ in turn] for turn in rounds] == [["a", "b"], ["b", "a"], ["b", "a"]]
    assert [len({mark for _, mark in turn}) for turn in rounds] == [1, 1, 1]
    assert len({turn[0][1] for turn in rounds}) == 3
    for setting in (a.setting, b.setting):
        runs = result.runs["W1"][setting]
        assert len(runs) == 2
        assert all(run.peak_bytes > 2**20 and run.alike == 1.0 for run in runs)


def test_an_engine_that_dies_is_left_out(tmp_path: Path) -> None:
    with (
        EngineProcess(fake(tmp_path, "a")) as a,
        EngineProcess(fake(tmp_path, "b", dies=2)) as b,
    ):
        result = compare([a, b], SMALL, 2, lambda _: None, settle=0)
    assert list(result.failed) == [b.setting]
    assert "out of luck" in result.failed[b.setting]
    assert result.best("W1", "a") is a.setting
    assert result.best("W1", "b") is None


def test_an_engine_that_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(EngineDied, match="no_such_module"):
        EngineProcess(Setting("x", "y", "no_such_module", sys.executable))


def test_an_output_of_another_length_is_refused(tmp_path: Path) -> None:
    text = FAKE.replace("[7] * output", "[7]")
    setting = fake(tmp_path, "a")
    (tmp_path / "fake_engine.py").write_text(text)
    with EngineProcess(setting) as engine, pytest.raises(ValueError, match=r"\[1, 1\]"):
        engine.run("W1", list(SMALL["W1"].requests))


def test_the_table_has_the_best_setting_and_its_ratio() -> None:
    ours, plain, tuned = (
        Setting(engine, name, "", "")
        for engine, name in (("ours", "default"), ("peer", "plain"), ("peer", "tuned"))
    )
    # The machine is twice as fast in the second round: the ratio is one of each round.
    runs = {
        ours: [1.0, 0.5, 1.0],
        plain: [3.0, 1.5, 3.0],
        tuned: [2.0, 1.0, 2.0],
    }
    result = Comparison(
        {
            "W1": {
                s: [Run(t, int(t * 2**21), t, 0.0, 1.0) for t in times] for s, times in runs.items()
            }
        }
    )
    head, line = speed_table(result, SMALL, {"W1": 0.5}, "ours")
    assert head.split()[:3] == ["unit", "ours", "peer"]
    # 3 tokens in 1 s and 2 s; a floor of half a second.
    assert " ".join(line.split()) == "W1 small tokens/s 3.0 1.5 peer 2.00 1.30 6.0 50%"
    assert any("*2.00 (1.00-2.00)" in text for text in settings_tables(result, SMALL))
    # The most of all rounds counts: 2 MiB of ours, 6 and 4 of the peer's settings.
    memory = [text.split()[-1] for text in settings_tables(result, SMALL)[6:9]]
    assert memory == ["*2", "6", "4"]
    (_, missed) = speed_table(result, SMALL, {"W1": 0.5}, "peer")
    assert "0.50!" in missed.split()


def test_without_a_peer_there_is_a_table_without_a_ratio() -> None:
    ours = Setting("ours", "default", "", "")
    result = Comparison({"W1": {ours: [Run(1.0, 0, 0.0, 0.0, None)]}})
    _, line = speed_table(result, SMALL, {"W1": 0.5}, "ours")
    assert " ".join(line.split()) == "W1 small tokens/s 3.0 - - 1.30 6.0 50%"


def test_peers_that_are_not_there_are_named_with_a_remedy(tmp_path: Path) -> None:
    settings, missing = catalogue(Place(tmp_path, "bfloat16"))
    assert [setting.engine for setting in settings] == ["pagedkv"]
    named = " ".join(lack.what for lack in missing)
    assert all(peer in named for peer in ("llama.cpp", "vLLM", "OpenVINO"))
    assert all("install.sh" in lack.remedy for lack in missing)


def test_ours_is_also_tried_with_no_more_memory_than_the_requests_need(tmp_path: Path) -> None:
    mixed = Workload("W2", "", ((list(range(16)), 1), (list(range(3)), 2)))
    settings, _ = catalogue(Place(tmp_path, "bfloat16"), mixed=mixed)
    assert [setting.options.get("num_blocks") for setting in settings] == [None, 2 + 1]
    assert [setting.runs("W1") for setting in settings] == [True, False]


def test_the_curve_of_decoding() -> None:
    both = {(1, 128): ([20.0, 10.0, 20.0], [10.0, 5.0, 10.0]), (8, 256): ([80.0], list[float]())}
    _, one, eight = curve_table(both)
    assert one.split() == ["1", "128", "20", "10", "2.00", "50.0"]
    assert eight.split() == ["8", "256", "80", "-", "-", "100.0"]


def test_hopeless_settings_are_measured_against_their_own_engine() -> None:
    fast, late, other = (Setting(e, n, "", "") for e, n in (("a", "1"), ("a", "2"), ("b", "1")))
    assert slow({fast: 1.0, late: 1.6, other: 9.0}) == [late]


def test_outputs_are_alike_up_to_their_first_difference() -> None:
    assert alike([[1, 2, 3], [4]], [[1, 9, 3], [4]]) == 0.5
