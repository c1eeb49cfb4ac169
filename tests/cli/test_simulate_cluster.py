"""`pagedkv simulate cluster`: what it prints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagedkv.cli.main import run

ASKED = ["--requests", "40", "--rate", "20", "--prompt-tokens", "60", "--output-tokens", "12"]
SPLIT = ["--prefill-workers", "1", "--decode-workers", "2"]


def test_a_split_cluster_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for _ in range(2):
        assert run(["simulate", "cluster", *SPLIT, *ASKED, "--json"]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    facts = json.loads(outputs[0])
    assert (facts["requests"], facts["failed"], facts["shed"]) == (40, 0, 0)
    assert facts["moves"]["received"] > 30
    assert facts["moves"]["blocks_sent"] > 100
    assert facts["network"]["bytes"] > 0
    assert facts["decisions"] == 40
    assert [worker["role"] for worker in facts["workers"]] == ["prefill", "decode", "decode"]
    assert facts["borne"] is (facts["attainment"] >= 0.9)
    assert 0 < facts["goodput"] < 20 / 3


def test_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "cluster", "--workers", "2", *ASKED]) == 0
    words = " ".join(capsys.readouterr().out.split())
    for fact in ("requests 40, 0 can never run", "a load that is borne", "router 40 decisions"):
        assert fact in words


def test_what_comes_too_late_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    hurry = ["--rate", "400", "--ttft", "0.2", "--shed"]
    assert run(["simulate", "cluster", "--workers", "1", *ASKED, *hurry, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["shed"] > 0
    assert run(["simulate", "cluster", "--workers", "1", *ASKED, *hurry]) == 0
    assert "refused" in capsys.readouterr().out


def test_a_trace_at_another_speed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "requests.csv"
    rows = "".join(f"{i},64,5,0-3\n" for i in range(10))
    path.write_text("arrival_s,prompt_tokens,output_tokens,block16_ids\n" + rows)
    asked = ["--trace", str(path), "--speed", "2", "--json"]
    assert run(["simulate", "cluster", *SPLIT, *asked]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert 4.5 < facts["seconds"] < 5.5
    assert facts["moves"]["tokens_there"] > 0


@pytest.mark.plants_faults  # what the dead worker had
def test_workers_that_are_drained_die_and_change_their_role(
    capsys: pytest.CaptureFixture[str],
) -> None:
    happens = ["--drain", "worker-1@0.5", "--kill", "worker-2@1", "--output-tokens", "60"]
    assert run(["simulate", "cluster", "--workers", "3", *ASKED, *happens, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["failed"], facts["flips"]) == (0, 0)
    assert facts["moves"]["received"] > 0
    assert facts["resumed"] > 0
    assert run(["simulate", "cluster", "--workers", "3", *ASKED, *happens]) == 0
    assert "resumed where their worker died" in " ".join(capsys.readouterr().out.split())
    late = ["--kill", "worker-1@50000", "--kill", "worker-2@1"]
    assert run(["simulate", "cluster", "--workers", "3", *ASKED, *late]) == 0
    out = capsys.readouterr().out
    assert "nothing happened to worker-1 at 50000 s" in out and "worker-2 at" not in out
    starving = ["--prefill-workers", "1", "--decode-workers", "3", "--flip-after", "0.2"]
    prompts = ["--requests", "200", "--prompt-tokens", "500", "--output-tokens", "2"]
    assert run(["simulate", "cluster", *starving, *prompts, "--rate", "40", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["flips"] > 0


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["--workers", "2", "--drain", "worker-1"], "--drain 'worker-1': give a worker and"),
        (["--workers", "2", "--kill", "nobody@1"], "there is no worker 'nobody'"),
        (["--workers", "1", "--kill", "worker-0@1"], "would be left for 'both'"),
        (["--workers", "2", "--flip-after", "0"], "flip_after=0.0"),
        (["--workers", "2", "--flip-after", "5"], "--flip-after=5.0: --workers have one role"),
        ([], "--prefill-workers=0 and --decode-workers=0 need each other"),
        (["--prefill-workers", "1"], "--prefill-workers=1 and --decode-workers=0 need each other"),
        (["--workers", "2", "--decode-workers", "1"], "--workers=2 does both"),
        (["--workers", "1", "--ttft", "0"], "ttft=0.0"),
        (["--workers", "1", "--network-gb", "0"], "--network-gb=0.0: give more than 0"),
        (["--workers", "1", "--network-gb", "1e-9"], "bytes_per_second=1.0: give at least 1000"),
        (["--workers", "1", "--network-us", "1e10"], "latency=10000.0: give at most 1000"),
        (["--workers", "1", "--piece-us", "nan"], "per_piece=nan"),
        (["--workers", "1", "--token-bytes", "0"], "token_bytes=0"),
        (["--workers", "1", "--token-bytes", str(2**63)], f"token_bytes={2**63}"),
        (["--workers", str(10**9)], "workers=1000000000 must be an integer from 0 to 100000"),
        (["--workers", "-1"], "workers=-1"),
        (["--workers", "1", "--blocks", "0"], "num_blocks=0"),
    ],
)
def test_what_is_refused(args: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "cluster", *args, *ASKED]) == 2
    assert why.replace("num_blocks", "").lstrip("=") in capsys.readouterr().err
