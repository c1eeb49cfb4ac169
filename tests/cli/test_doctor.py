"""`pagedkv doctor`: what is printed, the exit status, and that its figures are the engine's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagedkv import LLM
from pagedkv.cli.main import run
from pagedkv.engine.machine import MachineMemory
from pagedkv.engine.measure import Bandwidths

Doctor = Callable[..., tuple[int, dict[str, Any]]]
MEMORY = MachineMemory(2**30, 2**29)


@pytest.fixture
def doctor(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Doctor:
    """Runs it without measuring: the exit status, and the findings by topic."""
    monkeypatch.setenv("PAGEDKV_NUM_THREADS", "1")

    def go(*args: str) -> tuple[int, dict[str, Any]]:
        given = list(args)
        if not any(arg.startswith("--model") for arg in args):
            given += ["--model", model]
        status = run(["doctor", "--json", "--no-measure", *given])
        out, err = capsys.readouterr()
        assert not err
        report = json.loads(out)
        assert report["ok"] == (status == 0)
        return status, {finding["topic"]: finding for finding in report["findings"]}

    return go


def test_a_machine_that_is_well(doctor: Doctor, tmp_path: Path) -> None:
    status, found = doctor("--disk", str(tmp_path))
    assert status == 0
    assert list(found) == [
        "processor",
        "kernels",
        "OpenMP",
        "threads",
        "memory",
        "huge pages",
        "disk",
        "model",
        "packages",
    ]
    assert len(found["OpenMP"]["figures"]["files"]) == 1
    assert found["kernels"]["figures"]["attention"] == "native"
    assert found["packages"]["figures"]["pydantic"] is True


def test_what_fits_is_what_the_engine_makes_of_it(
    doctor: Doctor, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, found = doctor("--block-size", "8")
    figures = found["model"]["figures"]
    llm = LLM(model, block_size=8, num_blocks=16)
    assert figures["token_bytes"] == llm.report.bytes_per_token
    assert figures["dtype"] == llm.report.dtype
    assert min(figures["tokens"], llm.report.max_model_len) == figures["longest_context"]
    assert figures["weights"] > 0


def test_the_pool_is_that_of_the_memory(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagedkv.engine.checkup.machine_memory", lambda root: MEMORY)
    _, found = doctor("--model-shape", "2,2,16", "--parameters", "1e6", "--dtype", "float32")
    block = 2 * 2 * 2 * 16 * 16 * 4
    want = int((2**29 - 4 * 10**6) * 0.4) // block - 1
    assert found["model"]["figures"]["blocks"] == want


def test_something_wrong_is_exit_status_one(
    doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, found = doctor("--model-shape", "80,8,128", "--parameters", "1e15")
    assert (status, found["model"]["verdict"]) == (1, "wrong")
    assert "the weights take" in found["model"]["text"]
    status, found = doctor("--disk", str(tmp_path / "nowhere"))
    assert (status, found["disk"]["verdict"]) == (1, "wrong")
    status, found = doctor("--model", str(tmp_path))
    assert (status, found["model"]["verdict"]) == (1, "wrong")
    monkeypatch.setenv("PAGEDKV_NUM_THREADS", "100000")
    status, found = doctor()
    assert (status, found["threads"]["verdict"]) == (1, "wrong")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model-shape", "1,2"], "--model-shape='1,2' must be layers,K/V heads,head dim"),
        (["--model-shape", "1,0,4"], "--model-shape='1,0,4' must be"),
        (["--model", "m", "--model-shape", "1,2,3"], "give either --model or --model-shape"),
        (["--dtype", "int4"], "--dtype='int4': use one of auto"),
        (["--block-size", "0"], "Invalid value for '--block-size'"),
    ],
)
def test_wrong_options(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--no-measure", *args]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert message in err


def test_the_table_has_a_line_a_topic(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "pagedkv.engine.measure.measure_bandwidths",
        lambda num_bytes: Bandwidths(1.5e9, 2.5e9, 3.5e9, True),
    )
    monkeypatch.setenv("PAGEDKV_NUM_THREADS", "1")
    monkeypatch.setenv("COLUMNS", "300")
    assert run(["doctor", "--model", model]) == 0
    out = capsys.readouterr().out
    assert "1.5 GB/s read in small pages, 2.5 GB/s in huge pages, 3.5 GB/s copied" in out
    assert len(out.splitlines()) == 9


def test_without_the_embedded_model_the_machine_is_as_good(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagedkv.models.embedded.PACKAGE", "no_such_package")
    monkeypatch.setenv("PAGEDKV_NUM_THREADS", "1")
    assert run(["doctor", "--no-measure", "--json"]) == 0
    found = {one["topic"]: one for one in json.loads(capsys.readouterr().out)["findings"]}
    assert found["model"]["verdict"] == "note"
    assert "is not installed" in found["model"]["text"]


def test_a_part_of_a_package_that_is_missing_is_missing(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = {"json.decoder": "x", "json.no_such_part": "y", "no_such_package.part": "z"}
    monkeypatch.setattr("pagedkv.cli.doctor._PACKAGES", packages)
    _, found = doctor()
    assert list(found["packages"]["figures"].values()) == [True, False, False]


def test_a_forced_instruction_set_is_shown(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDKV_ISA", "scalar")
    status, found = doctor()
    assert status == 0
    kernels = found["kernels"]
    assert kernels["figures"]["linear"] == "native (scalar)"
    assert kernels["figures"]["forced"] == "scalar"
    assert "attention backend native (scalar)" in kernels["text"]
    if len(kernels["figures"]["isas"]) > 1:
        assert kernels["verdict"] == "note" and "unset it for" in kernels["text"]


def test_a_wrong_instruction_set_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PAGEDKV_ISA", "avx1024")
    assert run(["doctor", "--no-measure"]) != 0
    assert "PAGEDKV_ISA='avx1024': this machine and build have scalar" in capsys.readouterr().err
