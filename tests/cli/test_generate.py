"""`pagedkv generate`: what stands on stdout, what on stderr, and the exit status."""

from __future__ import annotations

import io
import json
import logging
import re
import shutil
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
    assert re.search(r"^time of a step: .*\d+ steps", err, re.MULTILINE)


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


def test_seed_reproduces_whatever_the_number_of_samples(pagedkv: Run) -> None:
    def texts(*args: str) -> list[str]:
        _, out, _ = pagedkv("x", "--temperature", "1", "--max-tokens", "6", "--json", *args)
        return [sample["text"] for sample in json.loads(out)["results"][0]["outputs"]]

    pair = texts("--seed", "5", "-n", "2")
    assert pair == texts("--seed", "5", "-n", "2") != texts("--seed", "6", "-n", "2")
    assert pair[0] != pair[1] and pair[:1] == texts("--seed", "5")


def test_equal_samples_every_prompt_has_its_own_seed_and_it_is_reported(
    pagedkv: Run, model: str
) -> None:
    _, out, _ = pagedkv("x", "x", "-n", "2", "--temperature", "1", "--json", "--no-chat")
    first, second = json.loads(out)["results"]
    assert first["seed"] != second["seed"] and generated(first) != generated(second)
    params = SamplingParams(seed=second["seed"] + 1, max_tokens=128)
    (again,) = LLM(model, num_blocks=64).generate("x", params)
    assert list(again.outputs[0].token_ids) == second["outputs"][1]["token_ids"]


def test_json_is_all_there_is_and_counts_are_right(pagedkv: Run) -> None:
    args = (
        "one",
        "three",
        "-n",
        "2",
        "--temperature",
        "1",
        "--max-tokens",
        "5",
        "--json",
        "--no-chat",
    )
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
    assert data["cost"]["observations"] >= 5 and data["cost"]["ignored"] == 0


def test_blocks_are_counted_while_the_only_step_runs(pagedkv: Run) -> None:
    _, out, _ = pagedkv("x" * 40, "--max-tokens", "1", "--no-chat", "--json")
    assert json.loads(out)["usage"]["blocks_peak"] == 3


def generated(result: dict[str, Any]) -> object:
    return [sample["token_ids"] for sample in result["outputs"]]


def first(data: dict[str, Any]) -> object:
    return generated(data["results"][0])


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
    "--temperature 0": first,
    "--top-p 0.000001": first,
    "--top-k 1": first,
    "--seed 3": first,
    "-n 2": first,
    "--min-p 1": first,
    "--repetition-penalty 100": first,
    "--max-num-seqs 3": lambda data: data["engine"]["max_num_seqs"],
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
    for args in (("a", "b"), ("a", "-n", "2", "--temperature", "1"), ("a", "--json")):
        assert pagedkv(*args, "--max-tokens", "2", "--no-stream")[0] == 0


BAD: dict[str, tuple[tuple[str, ...], str]] = {
    "empty prompt": (("",), "empty"),
    "empty among good": (("a", "", "b"), "prompt 2 is empty"),
    "white space": ((" \n",), "prompt 1 is empty"),
    "stdin twice": (("-", "-"), "give '-' once"),
    "equal samples": (("a", "-n", "3"), "give --temperature"),
    "second prompt too long": (("a", "x" * 300), "prompt 2: "),
    "no prompt": ((), "stdin is empty"),
    "prompt too long": (("x" * 300,), "--max-model-len=256"),
    "prompt longer than the pool": (("x" * 100, "--num-blocks", "2"), "pool has 2"),
    "negative max_tokens": (("a", "--max-tokens", "-5"), "--max-tokens=-5"),
    "max_tokens no number": (("a", "--max-tokens", "many"), "'many'"),
    "negative temperature": (("a", "--temperature", "-1"), "--temperature=-1"),
    "top_p out of range": (("a", "--top-p", "2"), "--top-p=2"),
    "n of zero": (("a", "-n", "0"), "-n=0"),
    "unknown model": (("a", "--model", "nowhere"), "'nowhere' is unknown"),
    "unreadable file": (("--file", "/nowhere/x"), "cannot read /nowhere/x"),
    "a folder as file": (("--file", "/"), "cannot read /"),
    "two sources": (("a", "--file", "/nowhere/x"), "use one"),
    "pool larger than memory": (("a", "--num-blocks", "999999999999"), "are available"),
    "pool of bytes larger than memory": (("a", "--kv-memory", "900TiB"), "are available"),
    "pool too small": (("a", "--kv-memory", "10"), "--kv-memory=10"),
    "no size": (("a", "--kv-memory", "much"), "--kv-memory='much'"),
    "unknown backend": (("a", "--backend", "fast"), "--backend='fast'"),
    "unknown dtype": (("a", "--dtype", "int3"), "--dtype='int3'"),
    "context longer than the model": (("a", "--max-model-len", "999"), "--max-model-len=999"),
    "block size of zero": (("a", "--block-size", "0"), "--block-size=0"),
    "streaming several prompts": (("a", "b", "--stream"), "--stream cannot show 2 prompts"),
    "streaming several samples": (("a", "--stream", "-n", "2"), "--stream cannot show"),
    "streaming JSON": (("a", "--stream", "--json"), "--stream cannot show"),
    "unknown option": (("a", "--fast"), "see pagedkv generate --help"),
    "two sizes": (("a", "--num-blocks", "3", "--kv-memory", "5"), "--num-blocks=3 and --kv-memory"),
    "bits of another backend": (("a", "--deterministic", "--backend", "gather"), "no --determ"),
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
    assert status == 0 and "prompt 1, sample 0: cut short" in err
    _, out, _ = pagedkv(*args, "--json")
    (sample,) = json.loads(out)["results"][0]["outputs"]
    assert sample["finish_reason"] == "length" and "cut short" in sample["error"]


def test_a_line_of_a_file_is_named_by_its_number(pagedkv: Run, tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text("one\n\n" + "x" * 300)
    status, _, err = pagedkv("--file", str(file))
    assert status == 2 and f"line 3 of {file}: the prompt has" in err


def test_a_dash_is_stdin(pagedkv: Run) -> None:
    args = ("--max-tokens", "4")
    lines = pagedkv("--file", "-", *args, stdin="one\ntwo\n")
    assert lines[:2] == pagedkv("one", "two", *args)[:2]
    assert pagedkv("one", "-", *args, stdin="two\n")[:2] == lines[:2]


def test_any_of_several_stop_strings_ends_the_text(pagedkv: Run) -> None:
    args = ("hello", "--no-chat", "--max-tokens", "9")
    text = pagedkv(*args)[1]
    _, out, _ = pagedkv(*args, "--stop", "no such text", "--stop", text[3])
    assert out == text[: text.index(text[3])] + "\n" != text


def test_prefix_caching_can_be_switched_off(pagedkv: Run) -> None:
    args = ("x" * 40, "x" * 40, "--json", "--max-num-seqs", "1", "--max-tokens", "1")
    cached = [
        json.loads(pagedkv(*args, *more)[1])["usage"]["cached_tokens"]
        for more in ((), ("--no-prefix-caching",))
    ]
    assert cached[0] > 0 == cached[1]


def test_model_without_tokenizer_or_template_says_what_to_do(
    pagedkv: Run, model: str, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(model, folder)
    for file in folder.glob("*.jinja"):
        file.unlink()
    status, out, err = pagedkv("a", "--chat", "--model", str(folder))
    assert (status, out) == (2, "") and "use --no-chat" in err
    for file in folder.glob("tokenizer*"):
        file.unlink()
    status, out, err = pagedkv("a", "--model", str(folder))
    assert (status, out) == (2, "")
    assert err == f"pagedkv: {folder} has no tokenizer: put tokenizer.json there\n"


@pytest.mark.parametrize("option", ["--stream", "--no-stream"])
def test_control_characters_do_not_reach_a_terminal(
    pagedkv: Run, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    args = ("hello", "--no-chat", "--temperature", "5", "--max-tokens", "60", option)
    piped = pagedkv(*args)[1]
    assert any(ord(c) < 32 and c not in "\n\t" for c in piped)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    shown = pagedkv(*args)[1]
    assert shown == "".join(
        c if (ord(c) >= 32 and not 127 <= ord(c) < 160) or c in "\n\t" else f"\\x{ord(c):02x}"
        for c in piped
    )


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
        shown = capsys.readouterr().out
        assert "generate" in shown
        assert ("--version" in shown) == (args != ["generate", "--help"])


@pytest.mark.parametrize(
    ("missing", "command"),
    [("typer", "--help"), ("torch", "generate"), ("transformers", "generate")],
)
def test_missing_extra_is_named_in_one_line(missing: str, command: str, model: str) -> None:
    args = [command, *(["hi", "--model", model] if command == "generate" else [])]
    code = (
        f"import sys; sys.modules[{missing!r}] = None; "
        f"from pagedkv.cli.main import main; main({args})"
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


def test_tiers_are_reported_and_a_damaged_folder_is_told(pagedkv: Run, tmp_path: Path) -> None:
    folder = tmp_path / "blocks"
    args = ["word " * 30, "--max-tokens", "4", "--disk-tier", str(folder)]
    status, _, err = pagedkv(*args)
    assert status == 0
    stored = re.search(r"tiers: (\d+) blocks stored, 0 loaded", err)
    assert stored is not None and int(stored[1]) > 0
    status, out, _ = pagedkv(*args, "--json")
    tiers = json.loads(out)["tiers"]
    assert tiers["loaded"] > 0 and tiers["off"] is None
    (folder / "index.db").write_bytes(b"no database at all" * 400)
    status, _, err = pagedkv(*args)
    assert status == 0
    assert "is off:" in err
    status, out, err = pagedkv(*args, "--json")
    assert status == 0 and "is off:" in json.loads(out)["tiers"]["off"] and err == ""


@pytest.mark.parametrize(
    ("args", "match"),
    [
        (["--host-tier", "lots"], "--host-tier"),
        (["--host-tier", "3"], "holds no block"),
        (["--write-through"], "no tier is asked for"),
        (["--disk-tier-size", "1MiB"], "give --disk-tier too"),
        (["--policy", "magic"], "--policy='magic'"),
        (["--admission", "magic"], "--admission='magic'"),
    ],
)
def test_bad_settings_of_pressure_are_one_clear_line(
    pagedkv: Run, args: list[str], match: str
) -> None:
    status, out, err = pagedkv("hello", *args)
    assert status == 2 and out == "" and match in err and len(err.splitlines()) == 1
