"""`pagedkv bench attention` and `pagedkv bench cache`: fields and counts. Times are not judged."""

from __future__ import annotations

import json

import pytest

from pagedkv.cli.main import run

pytestmark = pytest.mark.usefixtures("quick_machine")

ATTENTION = ["bench", "attention", "--batch-size", "3", "--context-len", "40", "--num-layers", "2"]
CACHE = ["bench", "cache", "--num-seqs", "2", "--num-blocks", "400", "--prompt-len", "40"]


def test_attention_counts_and_relates(capsys: pytest.CaptureFixture[str]) -> None:
    args = [*ATTENTION, "--shared-prefix-len", "32", "--seconds", "0.01", "--json"]
    assert run(args) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["layer_bytes"] == 2 * (32 + 3 * 8) * 3 * 64 * 2
    assert facts["layer_operations"] == 4 * 64 * 9 * 3 * 40
    assert facts["shape"]["batch_size"] == 3
    assert facts["rounds"] >= 3
    for name in ("ordered", "shuffled"):
        times = facts[name]
        assert times["gb_per_s"] == pytest.approx(facts["layer_bytes"] / times["seconds"] / 1e9)
        assert times["bandwidth_share"] == pytest.approx(
            times["gb_per_s"] / facts["limits"]["read_gb_per_s"]
        )
        assert times["floor_share"] == pytest.approx(
            max(times["bandwidth_share"], times["matrix_share"])
        )
    assert facts["calibration"]["python_loop_ns"] > 0


def test_attention_fits_on_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*ATTENTION, "--seconds", "0.01", "--dtype", "float32"]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) <= 24
    assert "shuffled" in out
    assert "calibration:" in out


def test_cache_finds_the_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*CACHE, "--rounds", "3", "--block-size", "4", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["num_seqs"], facts["num_blocks"], facts["block_size"]) == (2, 400, 4)
    assert facts["cached_tokens"] == 39
    assert all(facts[name] > 0 for name in ("decode_us", "open_us", "close_us", "fork_us"))
    assert run([*CACHE, "--rounds", "1"]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) <= 24
    assert "open, 39 of 40 cached" in out


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["attention", "--batch-size", "0"], "--batch-size=0"),
        (["attention", "--query-len", "5", "--context-len", "4"], "--query-len=5"),
        (["attention", "--shared-prefix-len", "8"], "--shared-prefix-len=8 must be whole blocks"),
        (["attention", "--num-heads", "4"], "--num-heads=4 must be a multiple"),
        (["attention", "--dtype", "int8"], "--dtype='int8'"),
        (["attention", "--backend", "none"], "--backend='none'"),
        (["attention", "--seconds", "nan"], "--seconds=nan"),
        (["attention", "--context-len", "1g"], "--context-len=1000000000"),
        (["cache", "--num-seqs", "0"], "--num-seqs=0"),
        (["cache", "--num-blocks", "10"], "--num-blocks=10: 256 sequences"),
        (["cache", "--rounds", "0"], "--rounds=0"),
        (["cache", "--prompt-len", "1"], "--prompt-len=1: give at least 2"),
    ],
)
def test_what_is_refused(args: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", *args]) == 2
    assert why in capsys.readouterr().err
