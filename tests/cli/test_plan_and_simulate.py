"""`pagedkv plan` and `pagedkv simulate`: what they print, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagedkv.cli.main import run

SOURCE = ["--model-shape", "32,32,128", "--dtype", "float16", "--memory", "40GiB"]
LENGTHS = ["--reserve", "2048", "--mean-output", "200"]


def test_plan_prints_the_arithmetic(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *SOURCE, *LENGTHS]) == 0
    words = " ".join(capsys.readouterr().out.split())
    for fact in (
        "K/V a token 512 KiB",
        "a reservation of 2,048 tokens 1 GiB",
        "resident sequences, reserved 40",
        "resident sequences, paged 393",
    ):
        assert fact in words


def test_plan_as_json_with_a_link(capsys: pytest.CaptureFixture[str]) -> None:
    link = ["--link", "25GB", "--flops", "1.5e14", "--parameters", "7e9", "--json"]
    assert run(["plan", *SOURCE, *LENGTHS, *link]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["token_bytes"], facts["resident_paged"]) == (2**19, 393)
    first = facts["recovery"][0]
    assert first["swap_seconds"] == pytest.approx(128 * 2**19 / 25e9)


def test_plan_with_pieces(capsys: pytest.CaptureFixture[str]) -> None:
    link = ["--link", "25GB", "--flops", "1.5e14", "--parameters", "7e9", "--piece-us", "5"]
    assert run(["plan", *SOURCE, *link, "--json"]) == 0
    blocks = json.loads(capsys.readouterr().out)["recovery"][0]
    assert blocks["swap_seconds"] == pytest.approx(128 * 2**19 / 25e9 + 8 * 5e-6)
    assert run(["plan", *SOURCE, *link, "--piece", "1KiB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["recovery"][0]["crossover_bytes_per_second"] is None
    assert run(["plan", *SOURCE, *link, "--piece", "1KiB"]) == 0
    assert "never" in capsys.readouterr().out


def test_plan_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "hidden_size": 64,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert run(["plan", "--model", str(tmp_path), "--memory", "1MiB", "--json"]) == 0
    shape = json.loads(capsys.readouterr().out)["shape"]
    assert shape == {"layers": 2, "kv_heads": 2, "head_dim": 8, "dtype": "bfloat16"}


def test_plan_of_the_embedded_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--model", "smollm2-135m-instruct", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["token_bytes"] == 2 * 30 * 3 * 64 * 2


SWAP = ("--model-shape", "1,2,1", "--link", "1GB", "--flops", "1e14", "--parameters", "1e9")


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ([], "give either --model or --model-shape"),
        (["--model-shape", "1,2"], "--model-shape='1,2' must be layers,K/V heads,head dim"),
        (["--model-shape", "1,2,3", "--memory", "lots"], "--memory='lots' is not a size"),
        (["--model-shape", "1,2,3", "--link", "1GB"], "--flops is needed too"),
        (["--model-shape", "1,2,3", "--mean-output", "0"], "--mean-output=0"),
        (["--model-shape", "1,2,3", "--memory", "9" * 400], "is more than 2**63 bytes"),
        (["--model-shape", "1,2," + "9" * 400], "give at least 1 and less than"),
        (["--model-shape", "1,2,3", "--reserve", "9" * 400], "give at least 1 and less than"),
        (["--model-shape", "1,2,3", "--piece-us", "5"], "--piece and --piece-us are about copying"),
        ([*SWAP, "--piece-us", "-5"], "piece_seconds=-5e-06"),
        ([*SWAP, "--piece", "lots"], "--piece='lots' is not a size"),
        ([*SWAP, "--flops", "inf"], "flops=inf: give at least 1 and less than"),
        ([*SWAP, "--flops", "1e-320"], "flops=1e-320: give at least 1 and less than"),
        ([*SWAP, "--parameters", "inf"], "parameters=inf"),
        ([*SWAP, "--parameters", "0"], "parameters=0.0"),
        ([*SWAP, "--heads", "0"], "attention_width=0"),
        ([*SWAP, "--heads", "9" * 400], "attention_width=9"),
        (["--model", "no such model"], "is unknown: give"),
    ],
)
def test_plan_refuses(args: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *args]) == 2
    assert why in capsys.readouterr().err


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "t.csv"
    path.write_text("prompt_tokens,output_tokens,block4_ids\n9,2,0-1\n8,1,0-1\n5,3,0\n")
    return path


def test_simulate_cache(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "cache", "--trace", str(trace), "--block-size", "4", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["token_hit_rate"] == pytest.approx((8 + 4) / 22)
    assert run(["simulate", "cache", "--trace", str(trace), "--blocks", "1"]) == 0
    assert "prompts larger than the pool" in capsys.readouterr().out


def test_simulate_memory(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PAGEDKV_TRACES", str(trace.parent))
    assert run(["simulate", "memory", "--trace", "t.csv", "--block-sizes", "1,4", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert list(facts["utilisation"]) == ["paged", "max", "pow2", "oracle"]
    # Live tokens 9, 10, 8, 5, 6, 7 in blocks of 4: 12, 12, 8, 8, 8, 8 slots.
    assert facts["utilisation"]["paged"] == {"1": 1.0, "4": pytest.approx(45 / 56)}
    assert run(["simulate", "memory", "--trace", "t.csv", "--max-length", "10"]) == 0
    assert "1 requests have more tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["cache", "--trace", "none.csv"], "trace none.csv cannot be read"),
        (
            ["memory", "--trace", "none.csv", "--block-sizes", "a"],
            "--block-sizes='a' must be numbers",
        ),
    ],
)
def test_simulate_refuses(args: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", *args]) == 2
    assert why in capsys.readouterr().err


def test_simulate_serve(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "serve", "--trace", str(trace), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["requests"], facts["failed"], facts["prompt_tokens"]) == (3, 0, 22)
    assert run(["simulate", "serve", "--requests", "20", "--blocks", "64"]) == 0
    assert "empty slots of held blocks" in capsys.readouterr().out
    pressed = ["simulate", "serve", "--requests", "40", "--rate", "50", "--blocks", "64", "--json"]
    preemptions = []
    for mode in ("prompt", "max_tokens"):
        assert run([*pressed, "--admission", mode]) == 0
        preemptions.append(json.loads(capsys.readouterr().out)["preemptions"])
    assert preemptions[0] > preemptions[1] == 0
    for wrong, why in (
        (["--rate", "0"], "rate=0"),
        (["--requests", "0"], "requests=0"),
        (["--trace", str(trace), "--requests", "-1"], "requests=-1"),
        (["--trace", str(trace), "--seed", "0"], "--seed is for invented requests"),
    ):
        assert run(["simulate", "serve", *wrong]) == 2
        assert why in capsys.readouterr().err


def test_simulate_allocators(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["simulate", "allocators", "--trace", str(trace), "--slots", "64"]
    assert run([*args, "--json"]) == 0
    assert "oracle, compacting" in json.loads(capsys.readouterr().out)
    assert run(args) == 0
    assert "max, compacting" in capsys.readouterr().out
    page = trace.parent / "a.html"
    assert run([*args, "--token-bytes", "1024", "--report", str(page)]) == 0
    assert "0 bytes" in capsys.readouterr().out
    assert "Allocators side by side" in page.read_text()


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["memory", "--block-sizes", "9" * 30], "less than 2**31"),
        (["allocators", "--requests", "0"], "requests=0"),
        (["allocators", "--token-bytes", "0"], "--token-bytes=0"),
        (["allocators", "--report", "/"], "--report='/' cannot be written: it is a folder"),
        (["allocators", "--step-ms", "inf"], "step_seconds=inf"),
        (["serve", "--requests", "-1"], "requests=-1"),
        (["serve", "--step-ms", "-1"], "--step-ms=-1.0: give at least 0"),
        (["serve", "--admission", "all"], "'prompt', 'max_tokens', 'expected_peak'"),
        (["serve", "--watermark", "-0.1"], "watermark=-0.1 must be a number from 0 to 1"),
    ],
)
def test_a_trace_is_not_simulated_with(
    args: list[str], why: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["simulate", *args, "--trace", str(trace)]) == 2
    assert why in capsys.readouterr().err


def test_simulate_serve_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.html"
    assert run(["simulate", "serve", "--requests", "5", "--report", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 5
    assert path.read_text().count("<svg") == 6
    for wrong, why in (
        (tmp_path, "it is a folder"),
        (tmp_path / "none" / "run.html", "is no folder that can be written to"),
    ):
        # A rate that is refused too: the report is looked at first.
        assert run(["simulate", "serve", "--rate", "0", "--report", str(wrong)]) == 2
        assert why in capsys.readouterr().err


def test_simulate_serve_invents_requests(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["simulate", "serve", "--requests", "30", "--json"]
    assert run([*few, "--tenants", "a=1.5,b=3", "--arrivals", "bursts:5,5"]) == 0
    slow = json.loads(capsys.readouterr().out)
    assert slow["requests"] == 30
    assert run([*few, "--tenants", "a=1.5,b=3", "--arrivals", "bursts:5,5", "--speed", "4"]) == 0
    assert json.loads(capsys.readouterr().out)["seconds"] < slow["seconds"]
    assert run([*few, "--lengths", str(trace), "--arrivals", "gamma:2"]) == 0
    assert json.loads(capsys.readouterr().out)["prompt_tokens"] <= 30 * 9


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["--arrivals", "often"], "--arrivals='often' must be poisson, gamma:CV or bursts:ON,OFF"),
        (["--arrivals", "gamma"], "--arrivals='gamma' must be"),
        (["--arrivals", "gamma:a"], "--arrivals='gamma:a' must be"),
        (["--arrivals", "gamma:0"], "cv=0.0: give more than 0"),
        (["--arrivals", "poisson:1"], "--arrivals='poisson:1' must be"),
        (["--arrivals", "bursts:1"], "--arrivals='bursts:1' must be"),
        (["--tenants", "a"], "--tenants='a' must be NAME=RATE"),
        (["--tenants", "a=1,=2"], "--tenants='a=1,=2' must be NAME=RATE"),
        (["--tenants", "a=1,a=2"], "names 'a' twice"),
        (["--tenants", "a=-1"], "rate=-1.0 of tenant 'a'"),
        (["--tenants", "a=1", "--rate", "2"], "leave --rate out"),
        (["--policy", "fairest"], "policy='fairest' is unknown: choose one of"),
        (["--tenant-weights", "a"], "--tenant-weights='a' must be NAME=WEIGHT"),
        (["--tenant-weights", "a=1,b=-1"], "tenant 'b': weight=-1.0 must be above 0"),
        (["--lengths", "none.csv"], "trace none.csv cannot be read"),
        (["--lengths", "none.csv", "--prompt-tokens", "5"], "leave --prompt-tokens"),
        (["--speed", "0"], "speed=0.0: give more than 0"),
    ],
)
def test_requests_are_not_invented_with(
    args: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["simulate", "serve", *args]) == 2
    assert why in capsys.readouterr().err


@pytest.fixture
def perf_table(tmp_path: Path) -> Path:
    path = tmp_path / "perf.csv"
    path.write_text(
        "model,hardware,tensor_parallel,prompt_size,batch_size,prompt_ms_median,token_ms_median\n"
        "m,a,1,4,1,50,40\nm,a,1,8,1,100,40\n"
    )
    return path


def test_simulate_serve_with_a_table(
    trace: Path, perf_table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["simulate", "serve", "--trace", str(trace), "--perf-table", str(perf_table)]
    assert run([*args, "--model", "m", "--json"]) == 0
    captured = capsys.readouterr()
    # A step of 22 prompt tokens at the rate of the largest point; two decodes; one decode.
    assert json.loads(captured.out)["seconds"] == pytest.approx(0.1 * 22 / 8 + 0.08 + 0.04)
    assert "2 steps were outside" in " ".join(captured.err.split())


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["--model", "m"], "--model chooses from a table: give --perf-table too"),
        (["--tp", "2"], "--tp chooses from a table"),
        (["--perf-table", "PERF"], "--model is needed too"),
        (["--perf-table", "PERF", "--model", "x"], "is no entry of"),
        (["--perf-table", "PERF", "--model", "m", "--tp", "2"], "tensor_parallel=2 is no entry"),
        (["--perf-table", "PERF", "--model", "m", "--step-ms", "3"], "--step-ms and --perf-table"),
        (["--perf-table", "none.csv", "--model", "m"], "performance table none.csv cannot be read"),
    ],
)
def test_costs_that_are_refused(
    args: list[str], why: str, perf_table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(perf_table) if arg == "PERF" else arg for arg in args]
    assert run(["simulate", "serve", *given]) == 2
    assert why in " ".join(capsys.readouterr().err.split())


def test_simulate_serve_with_a_tier_below(capsys: pytest.CaptureFixture[str]) -> None:
    pressed = ["simulate", "serve", "--requests", "40", "--rate", "50", "--blocks", "64"]
    pressed += ["--host-blocks", "500", "--recovery", "swap"]
    assert run([*pressed, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["preemptions"] > 0 and facts["tiers"]["loaded"] > 0
    assert run(pressed) == 0
    assert "blocks below" in capsys.readouterr().out
    for wrong, why in (
        (["--host-blocks", "-1"], "--host-blocks=-1"),
        (["--host-blocks", "5", "--link-gb", "0"], "bytes_per_second=0"),
        (["--host-blocks", "5", "--token-bytes", "0"], "block_bytes=0"),
        (["--recovery", "magic"], "--recovery='magic'"),
    ):
        assert run(["simulate", "serve", *wrong]) == 2
        assert why in capsys.readouterr().err
