"""Replay logs: the calls that led to an error lead to it again, without whoever made them."""

from __future__ import annotations

import base64
import itertools
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cache_helpers import remember, write

from pagedkv.cache import BlockManager, SeqId
from pagedkv.cache.errors import SanitizerError
from pagedkv.cache.sanitizer.recording import FORMAT, from_json
from pagedkv.cache.sanitizer.replay import replay
from pagedkv.errors import ConfigError

pytestmark = pytest.mark.plants_faults
Patch = pytest.MonkeyPatch
Scenario = Callable[[BlockManager, Patch], None]


def recorded(m: BlockManager, path: Path, max_bytes: int = 2**20) -> None:
    assert m.sanitizer is not None
    m.sanitizer.record(path, max_bytes)


def stale_table(m: BlockManager, _: Patch) -> None:
    s = write(m, [1, 2, 3, 4], namespace="tenant ☃", extra=b"\x00\xff")
    padded = m.tables([s]).padded()
    m.truncate(s, 1)
    other = write(m, [7])
    m.reserve([s], [2])
    assert m.sanitizer is not None
    m.sanitizer.check_reads([s], [3], padded)
    m.close(other)


def wrong_slots(m: BlockManager, _: Patch) -> None:
    s = m.open(range(5), namespace=b"t")
    r = m.reserve(np.array([s]), np.array([3]))
    assert m.sanitizer is not None
    m.sanitizer.check_writes(np.array([s]), np.array([3], np.int32), r.slots[::-1])


def lost_decrement(m: BlockManager, patch: Patch) -> None:
    s = write(m, np.arange(5, dtype=np.int16))
    (t,) = m.fork(s)
    m.reserve([t], [1])
    patch.setattr("pagedkv.cache.manager.end_copies", lambda *_: None)
    m.commit([t], [[9]])


def foreign_hit(m: BlockManager, patch: Patch) -> None:
    patch.setattr("pagedkv.cache.index._framed", lambda _: b"")
    remember(m, [1, 2, 3], namespace="a")
    remember(m, [1, 2, 3], namespace="b")


def imported(m: BlockManager, _: Patch) -> None:
    s = write(m, [1, 2, 3])
    done = m.import_sequence(m.export_sequence(s))
    assert m.sanitizer is not None
    m.sanitizer.check_writes([done.seq], [len(done.tokens)], done.reservation.slots + 1)


@pytest.mark.parametrize(
    ("scenario", "max_bytes"),
    [
        *itertools.product((stale_table, wrong_slots, lost_decrement, imported), (2**20, 700, 0)),
        # In which namespace a cached block was computed is not in a saved state.
        (foreign_hit, 2**20),
        (foreign_hit, 1000),
    ],
)
def test_the_error_comes_again(
    scenario: Scenario, max_bytes: int, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Also when the state was saved anew in between, before every call at worst."""
    m = BlockManager(12, 2, sanitize=True)
    remember(m, [1, 2, 3])
    path = tmp_path / "log"
    recorded(m, path, max_bytes)
    assert m.sanitizer is not None
    m.sanitizer.begin_step(4)
    with pytest.raises(SanitizerError) as info:
        scenario(m, monkeypatch)
    assert f"are in {path}: pagedkv replay {path}" in str(info.value)
    outcome = replay(path)
    again = outcome.error
    assert again is not None and outcome.reproduced
    facts = [(e.kind, e.block, e.seq, e.step) for e in (info.value, again)]
    assert facts[0] == facts[1]
    assert str(again).splitlines()[0] == str(info.value).splitlines()[0]
    # The report as it was, with the call sites of then: all but the line that names the log.
    assert outcome.recorded == str(info.value).rpartition("\n")[0]
    assert __file__ in outcome.recorded


def test_a_state_saved_in_the_middle_of_a_step(tmp_path: Path) -> None:
    """Copies and writes that were reported before are known again."""
    for calls_before in range(3):
        m = BlockManager(12, 2, sanitize=True)
        s = write(m, [1, 2, 3])
        (t,) = m.fork(s)
        r = m.reserve([s, t], [1, 1])
        w = m.sanitizer
        assert w is not None
        w.begin_step(7)
        reports = [
            lambda w=w, r=r: w.check_copies(r.copies),
            lambda w=w, r=r, ids=(s, t): w.check_writes(ids, [1, 1], r.slots),
        ]
        for report in reports[:calls_before]:
            report()
        recorded(m, tmp_path / "log")
        for report in reports[calls_before:]:
            report()
        m.commit([s, t], [[4], [5]])
        with pytest.raises(SanitizerError) as info:
            w.check_reads([s], [9], m.tables([s]).padded())
        outcome = replay(tmp_path / "log")
        assert outcome.reproduced and outcome.error is not None
        assert outcome.error.step == info.value.step == 7


def test_refused_calls_are_refused_again(tmp_path: Path) -> None:
    m = BlockManager(2, 2, sanitize=True)
    recorded(m, tmp_path / "log")
    s = write(m, [1, 2, 3])
    refusals: list[Callable[[], Any]] = [
        lambda: m.reserve([s], [2]),  # no blocks
        lambda: m.reserve([s], [-1]),
        lambda: m.close(SeqId(99)),
        lambda: m.open([1.5]),
        lambda: m.open("text"),
        lambda: m.open([1], namespace=object()),
        lambda: m.open([1], extra="text"),
        lambda: m.open(np.array([[1, 2]])),
        lambda: m.open(np.array([1], object)),
        lambda: m.open({"hex": "zz"}),
        lambda: m.open(nothing=1),
        lambda: m.import_sequence(b"damaged"),
        lambda: m.fork(s, n=np.int64(1000)),
    ]
    for refusal in refusals:
        with pytest.raises(Exception, match=r".") as info:
            refusal()
        assert not isinstance(info.value, SanitizerError)
    m.pool.counts[1] += 1
    with pytest.raises(SanitizerError):
        m.evict(0)
    outcome = replay(tmp_path / "log")
    assert outcome.error is None  # nothing in the calls: somebody wrote to the counts
    assert outcome.num_calls == 3 + len(refusals) + 1
    assert outcome.recorded is not None and not outcome.reproduced


def test_arguments_are_kept_as_they_were(tmp_path: Path) -> None:
    """What the caller changes after the call does not reach the log."""
    m = BlockManager(4, 2, sanitize=True)
    recorded(m, tmp_path / "log")
    tokens = np.array([1, 2, 3], np.int32)
    s = write(m, [])
    m.reserve([s], [3])
    lists = [[1, 2, 3]]
    m.commit([s], lists)
    lists[0][:] = [0, 0, 0]
    t = m.open(tokens)
    tokens[:] = 9
    assert m.sanitizer is not None
    with pytest.raises(SanitizerError):
        m.sanitizer.check_reads([t], [99], np.zeros((1, 1), np.int32))
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    calls = [(line["call"], from_json(line["args"])) for line in lines if "call" in line]
    commit = next(args for name, args in calls[2:] if name == "commit" and args[1][0])
    assert commit == [[s], [[1, 2, 3]]]
    assert calls[-2][1][0].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    "strange",
    [
        np.zeros(1, np.longdouble),
        np.zeros(1, [("a", "i4")]),
        np.array(["x"], object),
        np.longdouble(1),
        np.complex64(1),
        [np.datetime64("2020-01-01")],
    ],
)
def test_an_argument_that_cannot_be_written_down_hides_no_error(
    strange: Any, tmp_path: Path
) -> None:
    """The call was refused, and is again."""
    m = BlockManager(4, 2, sanitize=True)
    recorded(m, tmp_path / "log")
    with pytest.raises(ValueError, match="token"):
        m.open(strange)
    assert m.sanitizer is not None
    with pytest.raises(SanitizerError):
        m.sanitizer.check_blocks(np.array([1], np.int32))
    assert replay(tmp_path / "log").reproduced


def test_many_calls_keep_the_log_small(tmp_path: Path) -> None:
    m = BlockManager(8, 2, sanitize=True)
    path = tmp_path / "log"
    recorded(m, path, max_bytes=20_000)
    for i in range(300):
        remember(m, [i, i + 1, i + 2])
    assert m.sanitizer is not None
    with pytest.raises(SanitizerError):
        m.sanitizer.check_blocks(np.array([7], np.int32))
    assert replay(path).reproduced
    calls = len(path.read_text().splitlines())
    assert 20_000 / 300 < calls < 300


# ---- bad input


@pytest.fixture
def log(tmp_path: Path) -> Path:
    m = BlockManager(4, 2, sanitize=True)
    recorded(m, tmp_path / "log")
    remember(m, [1, 2, 3])
    assert m.sanitizer is not None
    with pytest.raises(SanitizerError):
        m.sanitizer.check_blocks(np.array([3], np.int32))
    assert replay(tmp_path / "log").reproduced
    return tmp_path / "log"


def rewrite(log: Path, header: dict[str, Any], calls: list[Any]) -> None:
    """Changes the log and makes its checksum right."""
    first = json.loads(log.read_text().splitlines()[0])
    body = "".join(json.dumps(call) + "\n" for call in calls)
    log.write_text(
        json.dumps(first | {"checksum": zlib.crc32(body.encode())} | header) + "\n" + body
    )


def test_a_log_cut_anywhere_is_refused(log: Path) -> None:
    text = log.read_text()
    for end in range(0, len(text), 7):
        log.write_text(text[:end])
        with pytest.raises(ConfigError, match=r"damaged|cut off|is no 'pagedkv"):
            replay(log)
    line_ends = [i + 1 for i, c in enumerate(text) if c == "\n"]
    for end in line_ends[:-1]:
        log.write_text(text[:end])
        with pytest.raises(ConfigError, match="cut off"):
            replay(log)


def test_a_log_with_a_changed_byte_is_refused(log: Path) -> None:
    data = log.read_bytes()
    for place in range(0, len(data), 11):
        log.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(ConfigError):
            replay(log)


@pytest.mark.parametrize(
    ("header", "match"),
    [
        ({"format": "pagedkv replay log 99"}, "its format is 'pagedkv replay log 99'"),
        ({"format": None}, "its format is None"),
        ({"snapshot": "*"}, "its snapshot cannot be restored"),
        ({"snapshot": 5}, "its snapshot cannot be restored"),
        ({"snapshot": base64.b64encode(b"pkvsnap0").decode()}, "its snapshot cannot be restored"),
    ],
)
def test_another_version(header: dict[str, Any], match: str, log: Path) -> None:
    rewrite(log, header, [])
    with pytest.raises(ConfigError, match=match):
        replay(log)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        ({"call": "explode", "args": [], "kwargs": {}}, "line 3 calls 'explode'"),
        ({"call": "__init__", "args": [1, 1], "kwargs": {}}, "calls '__init__'"),
        ({"call": "_open", "args": [1], "kwargs": {}}, "calls '_open'"),
        ({"call": ["open"], "args": [1], "kwargs": {}}, "line 3 calls"),
        ({"call": "open", "args": 1, "kwargs": {}}, "not a call"),
        ({"call": "open"}, "not a call"),
        ([1], "not a call"),
        ({"call": "open", "args": [{"hex": "zz"}], "kwargs": {}}, "argument in line 3 is damaged"),
        (
            {"call": "open", "args": [{"array": "<i4", "values": [1]}], "kwargs": {}},
            "argument in line 3 is damaged",
        ),
        (
            {
                "call": "open",
                "args": [{"array": "<i8", "values": [10**30], "shape": [1]}],
                "kwargs": {},
            },
            "argument in line 3 is damaged",
        ),
        ({"error": "early", "call": "open"}, "line 3"),
    ],
)
def test_a_call_that_does_not_exist(call: Any, match: str, log: Path) -> None:
    """Refused before the first call is made."""
    right = {"call": "open", "args": [[1]], "kwargs": {}}
    rewrite(log, {}, [right, call, right])
    with pytest.raises(ConfigError, match=match):
        replay(log)


@pytest.mark.parametrize(
    ("call", "args"),
    [
        ("check_copies", [1]),
        ("check_copies", [{"array": "<i4", "values": [], "shape": [0, 0]}]),
        ("check_reads", [[], [], ["x"]]),
    ],
)
def test_a_report_that_no_engine_makes(call: str, args: list[Any], log: Path) -> None:
    rewrite(log, {}, [{"call": call, "args": args, "kwargs": {}}])
    with pytest.raises(ConfigError, match=f"call 1, {call}, is damaged"):
        replay(log)


@pytest.mark.parametrize(
    "content", ["[" * 100_000, "", "\n", "{}", "[]\n", "not json\n", '{"format": 1}\n']
)
def test_a_file_of_another_kind(content: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(content)
    with pytest.raises(ConfigError):
        replay(tmp_path / "log")


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(bytes(range(256)))
    with pytest.raises(ConfigError):
        replay(tmp_path / "log")


def test_a_file_that_is_not_there_or_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        replay(tmp_path / "none")
    with pytest.raises(IsADirectoryError):
        replay(tmp_path)
    m = BlockManager(4, 2, sanitize=True)
    with pytest.raises(FileNotFoundError):
        recorded(m, tmp_path / "none" / "log")
    with pytest.raises(IsADirectoryError):
        recorded(m, tmp_path)
    assert m.sanitizer is not None and m.sanitizer.report.recording is None


def test_a_log_that_can_no_longer_be_written_does_not_hide_the_error(tmp_path: Path) -> None:
    m = BlockManager(4, 2, sanitize=True)
    (tmp_path / "folder").mkdir()
    recorded(m, tmp_path / "folder" / "log")
    (tmp_path / "folder" / "log").unlink()
    (tmp_path / "folder").rmdir()
    assert m.sanitizer is not None
    with pytest.raises(SanitizerError, match="replay log could not be written") as info:
        m.sanitizer.check_blocks(np.array([1], np.int32))
    assert info.value.block == 1


def test_a_log_without_an_error_leads_to_none(tmp_path: Path) -> None:
    m = BlockManager(4, 2)
    remember(m, [1, 2, 3])
    m = BlockManager.restore(m.snapshot(), sanitize=True)
    recorded(m, tmp_path / "log")
    outcome = replay(tmp_path / "log")
    assert json.loads((tmp_path / "log").read_text().splitlines()[0])["format"] == FORMAT
    assert (outcome.num_calls, outcome.error, outcome.recorded) == (0, None, None)
