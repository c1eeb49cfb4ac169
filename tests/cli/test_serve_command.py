"""`pagedkv serve` and `pagedkv key`: options, and what is printed without a model."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from pagedkv.cli.main import run
from pagedkv.server.keys import key_hash
from pagedkv.server.layers import flag, load_settings, scalar_names

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def pagedkv(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.delenv("PAGEDKV_TRACES", raising=False)

    def go(*args: str) -> tuple[int, str, str]:
        status = run(list(args))
        out, err = capsys.readouterr()
        return status, out, err

    return go


def test_the_settings_in_force_are_printed(
    pagedkv: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "serve.toml"
    file.write_text("[engine]\nblock_size = 32\n")
    monkeypatch.setenv("PAGEDKV_PORT", "9")
    status, out, err = pagedkv(
        *("serve", "my-model", "--print-config", "--config", str(file)),
        *("--max-num-seqs=4", "--no-prefix-caching", "--no-metrics", "--api-key", "a-secret"),
        *("--served-model-name", "one", "--served-model-name", "two"),
    )
    assert (status, err) == (0, "")
    for line in (
        f"block_size = 32  # {file}: engine.block_size",
        "port = 9  # PAGEDKV_PORT",
        "max_num_seqs = 4  # --max-num-seqs",
        'model = "my-model"  # --model',
        "enable_prefix_caching = false  # --no-prefix-caching",
        "metrics = false  # --no-metrics",
        'served_model_name = ["one", "two"]  # --served-model-name',
        "# api_key: 1 given by --api-key, not shown",
        "seed = 0  # default",
    ):
        assert line in out.splitlines()
    assert "secret" not in out
    assert tomllib.loads(out)["engine"]["model"] == "my-model"


def test_no_model_is_loaded_to_print_them() -> None:
    program = (
        "import sys; from pagedkv.cli.main import run; run(['serve', '--print-config']); "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_every_setting_has_an_option(pagedkv: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    status, out, _ = pagedkv("serve", "--help")
    assert status == 0
    for name in scalar_names():
        assert re.search(rf"{flag(name)}(?![\w-])", out), name


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--port", "x"], "--port='x' must be a valid integer"),
        (["--prot", "1"], "No such option: --prot"),
        (["--swap-space", "4"], "--swap-space is no setting here, .*: use --host-tier"),
        (
            ["--data-parallel-size", "4"],
            "--data-parallel-size is no setting here, .*: use --workers",
        ),
        (["--gpu-memory-utilization=0.9"], "--gpu-memory-utilization is .*: use --kv-memory"),
        (["--num-gpu-blocks-override", "4"], ".*: use --num-blocks"),
        (["a", "--model", "b"], "MODEL='a' and --model='b' differ"),
        (["--policy", "lifo"], "--policy='lifo': use one of fcfs"),
        (["--write-through"], "--write-through writes to the disk: set --disk-tier"),
        (["--config", "/no/such"], "the file '/no/such' cannot be read"),
    ],
)
def test_a_wrong_option_is_one_line(pagedkv: Run, args: list[str], message: str) -> None:
    status, out, err = pagedkv("serve", "--print-config", *args)
    assert (status, out) == (2, "")
    assert re.match(f"pagedkv: {message}", err), err
    assert err.count("\n") == 1


def test_other_names_of_an_option_work(pagedkv: Run) -> None:
    status, out, _ = pagedkv(
        *("serve", "--print-config", "--kv-cache-memory", "1MiB", "--attention-backend", "gather"),
        *("--scheduling-policy", "fair", "--no-enable-prefix-caching"),
    )
    assert status == 0
    engine = tomllib.loads(out)["engine"]
    assert engine["kv_cache_memory"] == 2**20
    assert engine["attention_backend"] == "gather"
    assert engine["policy"] == "fair"
    assert engine["enable_prefix_caching"] is False


def test_a_new_key_is_printed_once_with_the_lines_for_the_file(
    pagedkv: Run, tmp_path: Path
) -> None:
    status, out, _ = pagedkv("key", "new", 'Ann "A" Ä')
    assert status == 0
    key = out.splitlines()[0].rpartition(" ")[2]
    assert out.count(key) == 1
    file = tmp_path / "serve.toml"
    file.write_text(out)
    settings = load_settings(file, {}, {}).settings
    assert settings.tenants['Ann "A" Ä'].key_hashes == (key_hash(key),)
    assert pagedkv("key", "new", "a")[1] != pagedkv("key", "new", "a")[1]
    assert pagedkv("key", "new", "a\nb")[0] == 2
