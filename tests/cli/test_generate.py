"""`pagedkv generate`: what stands on stdout, what on stderr, and the exit status."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagedkv import LLM, SamplingParams, __version__
from pagedkv.cli.main import run

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def pagedkv(model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs `pagedkv generate` on the tiny model: (exit status, stdout, stderr)."""

    def go(*args: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        given = list(args)
        if "--model" not in given:
            given += ["--model", model]
        if not any(a.startswith(("--num-blocks", "--kv-memory")) for a in given):
            given += ["--num-blocks", "64"]
        status = run(["generate", *given])
        out, err = capsys.readouterr()
        return status, out, err

    return go


def reference(model: str, prompt: str, **params: int) -> str:
    llm = LLM(model, num_blocks=64)
    return llm.generate(prompt, SamplingParams(temperature=0, **params))[0].outputs[0].text


def test_text_on_stdout_figures_on_stderr(pagedkv: Run, model: str) -> None:
    status, out, err = pagedkv("hello", "--max-tokens", "9", "--no-chat")
    assert status == 0
    assert out == reference(model, "hello", max_tokens=9) + "\n"
    for part in (
        "bytes a token",
        "64 blocks of 16",
        "prompt tokens",
        "generated tokens",
        "tokens/s",
    ):
        assert part in err
    for part in ("TTFT", "blocks held at peak", "KV waste, paged", "256 slots reserved"):
        assert part in err


def test_stream_and_no_stream_print_the_same(pagedkv: Run) -> None:
    args = ("hello", "--max-tokens", "9")
    assert pagedkv(*args)[1] == pagedkv(*args, "--no-stream")[1]


def test_chat_template_is_the_default_where_there_is_one(pagedkv: Run, model: str) -> None:
    want = reference(model, "[user]hello[assistant]", max_tokens=9) + "\n"
    assert pagedkv("hello", "--max-tokens", "9")[1] == want
    assert pagedkv("hello", "--max-tokens", "9", "--chat")[1] == want
    assert pagedkv("hello", "--max-tokens", "9", "--no-chat")[1] != want


def test_several_prompts_and_samples_are_named(pagedkv: Run, model: str) -> None:
    _, out, _ = pagedkv("one", "two", "--max-tokens", "4", "--no-chat")
    texts = [reference(model, p, max_tokens=4) for p in ("one", "two")]
    assert out == f"==> one\n{texts[0]}\n==> two\n{texts[1]}\n"
    _, out, _ = pagedkv("one", "-n", "2", "--temperature", "1", "--max-tokens", "4")
    assert "==> one [0]\n" in out and "==> one [1]\n" in out


def test_prompts_from_stdin_and_file(pagedkv: Run, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\ntwo\n")
    from_file = pagedkv("--file", str(file), "--max-tokens", "4")
    assert from_file[:2] == pagedkv("one", "two", "--max-tokens", "4")[:2]
    from_stdin = pagedkv("--max-tokens", "4", stdin="line one\nline two\n")
    assert from_stdin[:2] == pagedkv("line one\nline two", "--max-tokens", "4")[:2]


def test_seed_reproduces_and_sample_i_is_seed_plus_i(pagedkv: Run) -> None:
    def texts(*args: str) -> list[str]:
        _, out, _ = pagedkv("x", "--temperature", "1", "--max-tokens", "6", "--json", *args)
        return [sample["text"] for sample in json.loads(out)["results"][0]["outputs"]]

    pair = texts("--seed", "5", "-n", "2")
    assert pair == texts("--seed", "5") + texts("--seed", "6")
    assert pair[0] != pair[1]


def test_json_is_all_there_is_and_counts_are_right(pagedkv: Run) -> None:
    args = ("one", "three", "-n", "2", "--max-tokens", "5", "--json", "--no-chat")
    status, out, err = pagedkv(*args)
    assert status == 0 and err == ""
    data = json.loads(out)
    assert out.count("\n") == 1
    assert [r["prompt"] for r in data["results"]] == ["one", "three"]
    assert [r["prompt_tokens"] for r in data["results"]] == [3, 5]
    assert [r["completion_tokens"] for r in data["results"]] == [10, 10]
    assert data["results"][0]["outputs"][1]["index"] == 1
    usage = data["usage"]
    assert (usage["prompt_tokens"], usage["generated_tokens"], usage["requests"]) == (8, 20, 2)
    assert 0 < usage["blocks_peak"] <= usage["num_blocks"] == 64
    assert 0 < usage["waste_paged"] < usage["waste_contiguous"] < 1
    assert data["engine"]["block_size"] == 16


def test_blocks_are_counted_while_the_only_step_runs(pagedkv: Run) -> None:
    _, out, _ = pagedkv("x" * 40, "--max-tokens", "1", "--no-chat", "--json")
    assert json.loads(out)["usage"]["blocks_peak"] == 3


def generated(data: dict[str, Any]) -> object:
    return [sample["token_ids"] for sample in data["results"][0]["outputs"]]


# Each flag with a value, and figures of a run with it that differ from a run without.
FLAGS: dict[str, Callable[[dict[str, Any]], object]] = {
    "--kv-memory 64KiB": lambda data: data["engine"]["num_blocks"],
    "--num-blocks 7": lambda data: data["engine"]["num_blocks"],
    "--dtype bfloat16": lambda data: data["engine"]["bytes_per_token"],
    "--backend gather": lambda data: data["engine"]["backend"],
    "--max-model-len 9": lambda data: data["results"][0]["completion_tokens"],
    "--block-size 2": lambda data: data["usage"]["blocks_peak"],
    "--max-tokens 3": lambda data: data["results"][0]["completion_tokens"],
    "--chat": lambda data: data["results"][0]["prompt_tokens"],
    "--temperature 0": generated,
    "--top-p 0.000001": generated,
    "--top-k 1": generated,
    "--seed 3": generated,
    "-n 2": generated,
}


@pytest.mark.parametrize("flag", FLAGS)
def test_ignored_setting_every_flag_changes_what_it_says(pagedkv: Run, flag: str) -> None:
    """mlx-lm#1390, PR#1392: a limit was parsed and never used."""

    def figures(*args: str) -> object:
        given = ["--no-chat", "--temperature", "5", "--max-tokens", "6", "--json"]
        status, out, err = pagedkv("hello", *given, *args)
        assert (status, err) == (0, "")
        return FLAGS[flag](json.loads(out))

    assert figures(*flag.split()) != figures()


@pytest.mark.parametrize("flag", ["--temperature 0", "--top-p 0.000001", "--top-k 1"])
def test_ignored_setting_filters_that_leave_one_token_give_the_greedy_text(
    pagedkv: Run, model: str, flag: str
) -> None:
    """mlx-lm#1390, PR#1392: a limit was parsed and never used."""
    args = ("hello", "--no-chat", "--temperature", "5", "--max-tokens", "6", *flag.split())
    assert pagedkv(*args)[1] == reference(model, "hello", max_tokens=6) + "\n"


def test_ignored_setting_the_memory_flag_gives_the_blocks_that_fit(pagedkv: Run) -> None:
    """vllm.cpp#357: the limit was ignored. One block less than fits: the null block."""
    _, out, _ = pagedkv("hello", "--max-tokens", "1", "--kv-memory", "64KiB", "--json")
    engine = json.loads(out)["engine"]
    assert engine["num_blocks"] == 64 * 1024 // engine["block_bytes"] - 1


def test_silent_choice_json_says_that_gather_took_over_and_stderr_stays_empty(
    pagedkv: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise ImportError("no kernels here")

    monkeypatch.setattr("pagedkv.attention.backends.import_native", missing)
    for name in (None, "pagedkv"):  # as in a process without pytest
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
    status, out, err = pagedkv("hello", "--max-tokens", "1", "--json")
    assert (status, err) == (0, "")
    assert "no kernels here" in json.loads(out)["engine"]["backend_reason"]


def test_ignored_setting_stream_is_honoured_or_refused(pagedkv: Run) -> None:
    status, out, _ = pagedkv("hello", "--max-tokens", "4", "--stream")
    assert status == 0 and out == pagedkv("hello", "--max-tokens", "4", "--no-stream")[1]
    for args in (("a", "b"), ("a", "-n", "2"), ("a", "--json")):
        assert pagedkv(*args, "--max-tokens", "2", "--no-stream")[0] == 0


BAD: dict[str, tuple[tuple[str, ...], str]] = {
    "empty prompt": (("",), "empty"),
    "empty among good": (("a", "", "b"), "prompt 1 is empty"),
    "no prompt": ((), "stdin is empty"),
    "prompt too long": (("x" * 300,), "max_model_len=256"),
    "prompt longer than the pool": (("x" * 100, "--num-blocks", "2"), "pool has 2"),
    "negative max_tokens": (("a", "--max-tokens", "-5"), "max_tokens=-5"),
    "max_tokens no number": (("a", "--max-tokens", "many"), "--max-tokens"),
    "negative temperature": (("a", "--temperature", "-1"), "temperature=-1"),
    "top_p out of range": (("a", "--top-p", "2"), "top_p=2"),
    "n of zero": (("a", "-n", "0"), "n=0"),
    "unknown model": (("a", "--model", "nowhere"), "'nowhere' is unknown"),
    "unreadable file": (("--file", "/nowhere/x"), "cannot read /nowhere/x"),
    "a folder as file": (("--file", "/"), "cannot read /"),
    "two sources": (("a", "--file", "/nowhere/x"), "use one"),
    "pool larger than memory": (("a", "--num-blocks", "999999999999"), "are available"),
    "pool of bytes larger than memory": (("a", "--kv-memory", "900TiB"), "are available"),
    "pool too small": (("a", "--kv-memory", "10"), "kv_cache_memory=10"),
    "no size": (("a", "--kv-memory", "much"), "--kv-memory='much'"),
    "unknown backend": (("a", "--backend", "fast"), "attention_backend='fast'"),
    "unknown dtype": (("a", "--dtype", "int3"), "dtype='int3'"),
    "context longer than the model": (("a", "--max-model-len", "999"), "max_model_len=999"),
    "block size of zero": (("a", "--block-size", "0"), "block_size=0"),
    "streaming several prompts": (("a", "b", "--stream"), "--stream cannot show 2 prompts"),
    "streaming several samples": (("a", "--stream", "-n", "2"), "--stream cannot show"),
    "streaming JSON": (("a", "--stream", "--json"), "--stream cannot show"),
    "unknown option": (("a", "--fast"), "--fast"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_line_and_status_2(pagedkv: Run, case: str) -> None:
    args, named = BAD[case]
    status, out, err = pagedkv(*args)
    assert (status, out) == (2, "")
    assert err.startswith("pagedkv: ") and err.count("\n") == 1 and err.endswith("\n")
    assert named in err


def test_file_that_is_not_text(pagedkv: Run, tmp_path: Path) -> None:
    file = tmp_path / "binary"
    file.write_bytes(b"\xff\xfe\x00")
    status, _, err = pagedkv("--file", str(file))
    assert status == 2 and "not UTF-8" in err and err.count("\n") == 1
    file.write_text("\n\n")
    status, _, err = pagedkv("--file", str(file))
    assert status == 2 and "no prompt" in err


def test_request_that_outgrows_the_pool_says_so(pagedkv: Run) -> None:
    args = ("x" * 30, "--no-chat", "--num-blocks", "2", "--max-tokens", "50")
    status, _, err = pagedkv(*args)
    assert status == 0 and "cut short" in err


@pytest.mark.parametrize("args", [["nope"], ["--nope"], ["generate", "--nope"]])
def test_unknown_commands_and_options(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(args) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"pagedkv {__version__}\n"
    for args in ([], ["--help"], ["generate", "--help"]):
        assert run(args) == 0
        assert "generate" in capsys.readouterr().out


@pytest.mark.parametrize("missing", ["typer", "torch", "transformers"])
def test_missing_extra_is_named_in_one_line(missing: str, model: str) -> None:
    code = (
        f"import sys; sys.modules[{missing!r}] = None; "
        f"from pagedkv.cli.main import main; main(['generate', 'hi', '--model', {model!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == (f'pagedkv: {missing} is not installed: pip install "pagedkv[engine]"\n')


def test_interrupt_ends_with_130(
    pagedkv: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from pagedkv.engine.llm_engine import LLMEngine

    def interrupt(self: LLMEngine) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LLMEngine, "step", interrupt)
    status, _, err = pagedkv("a")
    assert status == 130 and err.splitlines()[-1] == "pagedkv: interrupted"


@pytest.mark.parametrize("option", ["--stream", "--json"])
def test_full_disk_is_one_clear_line(
    model: str, option: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        status = run(["generate", "a", "--model", model, "--num-blocks", "64", option])
    assert status == 1
    assert "cannot write the output: No space left on device\n" in capsys.readouterr().err


def test_closed_stdout_is_one_clear_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert run(["generate", "a"]) == 2
    assert "stdout is closed" in capsys.readouterr().err
