"""`pagedkv bench block-size`: its shape and its exact columns. Times are never judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagedkv.cli.main import run

EXACT = ("tail_waste", "table_bytes", "copy_bytes", "hit_rate", "full_block_hit_rate")
MEASURED = ("cache_us_per_token", "cache_ratio", "attention_gb_per_s", "attention_ratio")


def test_every_block_size_has_every_column(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["bench", "block-size", "--requests", "20", "--block-sizes", "16,4,256,4"]
    assert run([*args, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert list(facts["block_sizes"]) == ["4", "16", "256"]
    assert all(tuple(row) == EXACT + MEASURED for row in facts["block_sizes"].values())
    assert all(row[name] > 0 for row in facts["block_sizes"].values() for name in MEASURED)
    assert facts["block_sizes"]["16"]["cache_ratio"] == 1.0
    assert facts["block_sizes"]["16"]["attention_ratio"] == 1.0
    assert facts["prompts_invented"] is True
    wastes = [row["tail_waste"] for row in facts["block_sizes"].values()]
    assert wastes == sorted(wastes)


def test_the_exact_columns_of_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.csv"
    path.write_text("prompt_tokens,output_tokens,block4_ids\n9,1,0-2\n9,1,0-1 3\n")
    args = ["bench", "block-size", "--trace", str(path), "--block-sizes", "4"]
    assert run([*args, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    row = {name: facts["block_sizes"]["4"][name] for name in EXACT}
    assert row == pytest.approx(
        {
            "tail_waste": 3 / 12,
            "table_bytes": 4 * 3,
            "copy_bytes": 2 * 30 * 3 * 64 * 4,  # one slot of SmolLM2-135M in float32
            "hit_rate": 8 / 18,
            "full_block_hit_rate": 8 / 18,
        }
    )
    assert (facts["requests"], facts["prompts"], facts["prompts_invented"]) == (2, 2, False)
    assert run(args) == 0
    assert "2 prompts, with partly shared blocks" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["--block-sizes", "a"], "--block-sizes='a' must be numbers"),
        (["--block-sizes", "16,0"], "block size 0: give 1 to 512"),
        (["--block-sizes", "1024"], "block size 1024: give 1 to 512"),
        (["--requests", "0"], "num_requests=0"),
        (["--trace", "none.csv"], "trace none.csv cannot be read"),
    ],
)
def test_what_is_not_measured(
    args: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "block-size", *args]) == 2
    assert why in capsys.readouterr().err
