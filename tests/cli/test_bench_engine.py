"""`pagedkv bench throughput` and `latency` with a tiny model: fields and counts, no times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagedkv.cli.main import run

pytestmark = pytest.mark.usefixtures("quick_machine")

SMALL = ["--input-len", "20", "--output-len", "5", "--num-blocks", "64"]


def facts_of(args: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert run(["bench", *args, "--json"]) == 0
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert facts["limits"] == {"read_gb_per_s": 30.0, "matrix_gflop_per_s": 400.0}
    assert facts["calibration"] == {"python_loop_ns": 40.0, "copy_gb_per_s": 12.0}
    return facts


def test_throughput_counts_every_token(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    facts = facts_of(["throughput", "--model", model, *SMALL, "--num-prompts", "6"], capsys)
    assert facts["num_requests"] == 6
    assert (facts["prompt_tokens"], facts["output_tokens"]) == (6 * 20, 6 * 5)
    assert facts["total_num_tokens"] == 6 * 25
    assert facts["cached_tokens"] == 0
    assert facts["steps"] >= 5
    assert facts["requests_per_second"] == pytest.approx(6 / facts["elapsed_time"])
    assert facts["output_tokens_per_second"] == pytest.approx(30 / facts["elapsed_time"])
    assert facts["tokens_per_second"] == pytest.approx(150 / facts["elapsed_time"])
    assert facts["ttft"]["p50_ms"] <= facts["ttft"]["p99_ms"] <= facts["elapsed_time"] * 1e3
    assert facts["peak_rss_bytes"] > 2**24
    assert facts["cores_used"] > 0
    assert facts["dtype"] == "float32"


def test_a_common_prefix_is_found_unless_caching_is_off(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["throughput", "--model", model, *SMALL, "--num-prompts", "3"]
    args += ["--random-prefix-len", "32", "--max-num-batched-tokens", "60"]
    facts = facts_of(args, capsys)
    assert facts["prompt_tokens"] == 3 * 52
    assert facts["cached_tokens"] >= 2 * 32
    assert facts_of([*args, "--no-prefix-caching"], capsys)["cached_tokens"] == 0


def test_prompts_of_a_text(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("A block table maps positions to blocks.")
    args = ["throughput", "--model", model, *SMALL, "--num-prompts", "2", "--text", str(text)]
    facts = facts_of([*args, "--random-range-ratio", "0.5"], capsys)
    assert 2 * 10 <= facts["prompt_tokens"] <= 2 * 30
    text.write_text("")
    assert run(["bench", *args]) == 2
    assert "holds no token" in capsys.readouterr().err


def test_latency_of_every_batch(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["latency", "--model", model, *SMALL, "--batch-size", "2"]
    facts = facts_of([*args, "--num-iters", "3", "--num-iters-warmup", "0"], capsys)
    assert (facts["batch_size"], facts["input_len"], facts["output_len"]) == (2, 20, 5)
    assert len(facts["latencies"]) == facts["num_iters"] == 3
    assert facts["avg_latency"] == pytest.approx(sum(facts["latencies"]) / 3)
    assert facts["itl"]["p50_ms"] <= facts["itl"]["p90_ms"] <= facts["itl"]["p99_ms"]
    assert facts["prefill_tokens_per_second"] > 0
    assert facts["decode_tokens_per_second"] > 0


def test_one_token_has_no_decode(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["latency", "--model", model, "--output-len", "1", "--num-iters", "1"]
    facts = facts_of([*args, "--num-blocks", "64"], capsys)
    assert facts["itl"] is None
    assert facts["decode_tokens_per_second"] is None


@pytest.mark.parametrize("command", ["throughput", "latency"])
def test_it_fits_on_a_screen(command: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    count = {"throughput": "--num-prompts", "latency": "--batch-size"}[command]
    assert run(["bench", command, "--model", model, *SMALL, count, "1"]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) <= 24
    assert "calibration:" in out
    assert "GFLOP/s" in out


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["throughput", "--num-prompts", "0"], "--num-prompts=0"),
        (["throughput", "--input-len", "0"], "--input-len=0"),
        (["throughput", "--random-range-ratio", "1"], "--random-range-ratio=1.0"),
        (["throughput", "--random-prefix-len", "-1"], "--random-prefix-len"),
        (["throughput", "--text", "nowhere"], "--text='nowhere' cannot be read"),
        (["throughput", "--seed", "-1"], "--seed=-1"),
        (["throughput", "--dtype", "int8"], "--dtype='int8'"),
        (["throughput", "--backend", "none"], "--backend='none'"),
        (["latency", "--num-iters", "0"], "--num-iters=0"),
        (["latency", "--num-iters-warmup", "-1"], "--num-iters-warmup=-1"),
        (["latency", "--batch-size", "0"], "--batch-size=0"),
        (["latency", "--kv-memory", "much"], "--kv-memory"),
    ],
)
def test_what_is_refused(args: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", *args]) == 2
    assert why in capsys.readouterr().err


def test_a_pool_that_is_too_small_is_said(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["throughput", "--model", model, "--input-len", "40", "--output-len", "90"]
    assert run(["bench", *args, "--num-blocks", "4", "--num-prompts", "1"]) == 2
    assert "of 90 tokens" in capsys.readouterr().err
