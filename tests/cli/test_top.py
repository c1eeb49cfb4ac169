"""`pagedkv top`: a running server in a terminal."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

import httpx
import msgspec
import pytest
from rich.console import Console
from serving import http_server, settings, toy_core

from pagedkv.cli.main import BAD_INPUT, run
from pagedkv.cli.top_frame import View, curve, frame, plain, ranges
from pagedkv.engine.core import EngineCore
from pagedkv.engine.facts import Facts
from pagedkv.engine.picture import take_picture
from pagedkv.engine.status import WorkerLoad, core_status
from pagedkv.engine.wire import Batch
from pagedkv.scheduling.messages import Abort, Add
from pagedkv.scheduling.params import SamplingParams
from pagedkv.server.app import create_app
from pagedkv.server.dashboard.history import History
from pagedkv.server.settings import DEFAULT_TENANT


def data_of(
    core: EngineCore, num_blocks: int, taken: float = 4.9, workers: Sequence[WorkerLoad] = ()
) -> dict:
    """As a server would answer."""
    history = History(Facts(core.scheduler.config, num_blocks, 4, num_blocks), lambda: 5.0)
    picture = take_picture(core)
    history.take(Batch((), None, 0, core_status(core)))
    values = {
        "run": "r",
        "now": 5.0,
        "taken": taken,
        "server": {"model": "toy", "draining": False},
        "picture": {**picture, "pool": {**picture["pool"], "tag": "t"}},
        "history": history.columns(-1),
        "recent": history.recent(),
        "tenants": history.tenants(picture["tenants"]),
        "workers": workers,
    }
    return json.loads(msgspec.json.encode(values))


@pytest.fixture
def core() -> Iterator[EngineCore]:
    core = toy_core(40)
    core.send(Add("a#0", tuple(range(22)), SamplingParams(max_tokens=9, n=2), 0.0, 1, tenant="t"))
    core.send(Add("b\x1b[31mred#1", (5,) * 9, SamplingParams(max_tokens=20), 0.0, 1, tenant="\x07"))
    for _ in range(4):
        core.step(1.0)
    yield core
    for name in ("a#0", "b\x1b[31mred#1"):
        core.send(Abort(name))
    core.step(2.0)


def shown(view: View, width: int = 100, height: int | None = None) -> list[str]:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(frame(view, width, height))
    return capture.get().splitlines()


def test_a_frame_has_the_blocks_and_who_holds_them(core: EngineCore) -> None:
    view = View("http://here")
    view.take(data_of(core, 40))
    lines = shown(view)
    numbers = take_picture(core)["pool"]["numbers"]
    [pool] = [line for line in lines if line.startswith("█") or line.startswith("▓")]
    assert pool.count("▓") == numbers["shared"] > 0
    assert pool.count("█") == numbers["held"] > 0
    assert pool.count("·") == numbers["free"] > 0
    text = "\n".join(lines)
    assert "running 3" in text and "a [1]" in text and "Last decisions" in text
    table = core.scheduler.manager.block_table(core.scheduler.sequences[0]).tolist()
    assert ranges(table, 8) in text


def test_workers_and_requests_of_several_are_told_by_their_names(core: EngineCore) -> None:
    loads = [
        WorkerLoad(
            f"worker-{i}", "both", "ready", 1, 0, 4, running=2, waiting=3, blocks=40, blocks_held=7
        )
        for i in range(30)
    ]
    data = data_of(core, 40, workers=loads)
    name = "cmpl-" + 32 * "5"
    data["picture"]["decisions"][-1] |= {"request": name + "#7#3@1", "words": "worker-0: ended"}
    view = View("http://here")
    view.take(data)
    lines = shown(view, 80)
    assert any(re.match("worker-3 +both +ready +2 +3 +40 +7 +1", line) for line in lines)
    assert any(re.search("cmpl-55+…5+ worker-0: ended", line) for line in lines)
    assert len(shown(view, 80, 24)) <= 24


def test_an_old_picture_is_said_to_be_old(core: EngineCore) -> None:
    view = View("http://here")
    view.take(data_of(core, 40))
    assert "live" in shown(view)[0]
    view.take(data_of(core, 40, taken=2.0))
    assert "in a step; the blocks are of 3.00 s ago" in shown(view)[0]


def test_what_would_steer_the_terminal_is_not_printed(core: EngineCore) -> None:
    view = View("http://here")
    view.take(data_of(core, 40))
    text = "\n".join(shown(view, 160))
    assert "\x1b" not in text and "\x07" not in text
    assert "b�[31mred" in text
    assert plain("ok\r\n\u202e") == "ok���"


@pytest.mark.parametrize(("width", "height"), [(40, 12), (80, 24), (120, 50), (300, 90)])
def test_a_frame_keeps_within_the_terminal(core: EngineCore, width: int, height: int) -> None:
    view = View("http://here")
    view.take(data_of(core, 40))
    lines = shown(view, width, height)
    assert max(map(len, lines)) <= width
    assert len(lines) <= max(height, 14)  # the map and the figures are always there


def test_a_large_pool_is_condensed() -> None:
    core = toy_core(100_000)
    view = View("http://here")
    view.take(data_of(core, 100_000))
    rows = [line for line in shown(view, 100) if line.startswith("····")]
    assert len(rows) <= 8 and sum(map(len, rows)) <= 800
    assert "No request is running" in "\n".join(shown(view))


def test_answers_that_leave_out_what_is_known_are_put_together(core: EngineCore) -> None:
    view = View("http://here")
    first = data_of(core, 40)
    view.take(first)
    before = view.states.tolist()
    again = data_of(core, 40)
    for name in ("states", "counts", "filled", "owners"):
        del again["picture"]["pool"][name]
    seconds = len(first["history"]["columns"]["second"])
    view.take(again)
    assert view.states.tolist() == before
    assert len(view.columns["second"]) == seconds
    assert (view.tag, view.run) == ("t", "r")


def test_curves_and_ranges() -> None:
    assert curve([0.0, None, 2.0, 4.0]) == "▁ ▅█"
    assert curve([]) == "" and curve([None, 0.0]) == " ▁"
    assert ranges([4, 5, 6, 9, 1], 8) == "4-6, 9, 1"
    assert ranges([1, 3, 5], 2) == "1, 3, …"
    assert ranges([], 3) == ""


def test_one_look_at_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    with http_server() as url:
        assert run(["top", "--url", url, "--once"]) == 0
    printed = capsys.readouterr().out
    assert "64 blocks of 4" in printed and "toy" in printed


def test_a_key_is_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"operators-key": DEFAULT_TENANT}
    with http_server(make_app=lambda engine: create_app(engine, settings(keys))) as url:
        assert run(["top", "--url", url, "--once"]) == BAD_INPUT
        complaint = capsys.readouterr().err
        assert "--api-key" in complaint and "PAGEDKV_API_KEY" in complaint
        assert run(["top", "--url", url, "--once", "--api-key", "operators-key"]) == 0
        monkeypatch.setenv("PAGEDKV_API_KEY", "operators-key")
        assert run(["top", "--url", url, "--once"]) == 0


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://127.0.0.1:1", "pagedkv serve"),
        ("127.0.0.1:1", "http://"),
        ("http://[", "--url"),
    ],
)
def test_nobody_there(url: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["top", "--url", url, "--once"]) == BAD_INPUT
    complaint = capsys.readouterr().err
    assert complaint.startswith("pagedkv: ") and words in complaint
    assert "Traceback" not in complaint


def test_something_else_there(capsys: pytest.CaptureFixture[str]) -> None:
    with http_server() as url:
        assert run(["top", "--url", f"{url}/v1", "--once"]) == BAD_INPUT
    assert "no dashboard" in capsys.readouterr().err


def test_it_looks_again_until_it_is_interrupted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    naps: list[float] = []
    with http_server() as url:
        seen = httpx.get(f"{url}/dashboard/data")
    answers = [httpx.Response(200, content=seen.content)] * 2
    frames: list[str] = []

    def get(client: httpx.Client, path: str, **query: object) -> httpx.Response:
        if answers:
            return answers.pop()
        raise httpx.ConnectError("gone")

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        frames.append(capsys.readouterr().out)
        if len(naps) == 3:
            raise KeyboardInterrupt

    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("httpx.Client.get", get)
    monkeypatch.setattr("pagedkv.cli.top.time.sleep", sleep)
    assert run(["top", "--url", "http://127.0.0.1:1", "--every", "0.5"]) == 0
    assert naps == [0.5, 0.5, 0.5]
    assert "live" in frames[1] and "nobody answers" in frames[2]
