"""`pagedkv plan`: split or not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagedkv.cli.main import run

POOL = ["--model-shape", "40,40,128", "--memory", "40GiB"]


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "requests.csv"
    rows = "".join(f"{i},{200 + 37 * (i % 20)},{50 + 11 * (i % 13)}\n" for i in range(100))
    path.write_text("arrival_s,prompt_tokens,output_tokens\n" + rows)
    return str(path)


def test_measured_rates(capsys: pytest.CaptureFixture[str]) -> None:
    """The example of DistServe: 2 prefill + 1 decode give 3.3 requests/s a device against 1.6."""
    assert run(["plan", "--rates", "5.6,10,1.6", "--devices", "3"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "split: 2 prefill + 1 decode give 3.33 requests/s a device, against 1.60" in words
    assert run(["plan", "--rates", "5.6,10,1.6", "--devices", "3", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["split"] is True
    assert (facts["best"]["prefill"], facts["best"]["decode"]) == (2, 1)


def test_a_trace(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--ttft", "0.25", "--tpot", "0.03", "--trace", trace]
    assert run(["plan", *POOL, *asked, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)["disaggregation"]
    assert facts["trace_rate"] == pytest.approx(1.0)
    assert facts["split"] is (facts["best"]["goodput"] > facts["rates"]["colocated"])
    assert len(facts["splits"]) == 7
    assert run(["plan", *POOL, *asked]) == 0
    assert "split: " in capsys.readouterr().out
    assert run(["plan", *POOL, "--ttft", "9", "--tpot", "0.9", "--trace", trace]) == 0
    assert "do not split: " in capsys.readouterr().out
    assert run(["plan", *POOL, "--ttft", "0.001", "--tpot", "0.001", "--trace", trace]) == 0
    assert "neither way" in capsys.readouterr().out


def test_costs_of_a_table(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "table.csv"
    table.write_text(
        "model,hardware,tensor_parallel,prompt_size,batch_size,token_size,prompt_ms_median,"
        "token_ms_median,n\nm,a,1,100,1,10,10,5,1\nm,a,1,1000,1,10,100,5,1\nm,a,1,100,9,10,90,6,1\n"
    )
    asked = ["--ttft", "1", "--tpot", "0.1", "--trace", trace]
    table_of = ["--perf-table", str(table), "--model", "m"]
    assert run(["plan", *POOL, *asked, *table_of, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["disaggregation"]["rates"]["prefill"] > 5


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ([*POOL, "--ttft", "1"], "--tpot is needed too"),
        ([*POOL, "--step-ms", "1"], "--ttft is needed too"),
        ([*POOL, "--ttft", "1", "--tpot", "1"], "--trace is needed too"),
        (["--rates", "1,2"], "--rates='1,2' must be"),
        (["--rates", "1,2,3", "--devices", "1"], "devices=1"),
        (["--rates", "1,2,3", "--devices", str(10**9)], "devices=1000000000: give at most 1000"),
        ([*POOL, "--rates", "1,2,3"], "--rates need neither"),
    ],
)
def test_what_is_refused(args: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *args]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("bad", [["--network-gb", "0"], ["--share", "1"], ["--max-num-seqs", "0"]])
def test_what_no_device_can_be(
    bad: list[str], trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--ttft", "1", "--tpot", "1", "--trace", trace]
    assert run(["plan", *POOL, *asked, *bad]) == 2
    error = capsys.readouterr().err
    assert bad[0] in error or bad[0][2:] in error
