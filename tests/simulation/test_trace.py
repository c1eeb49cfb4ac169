"""Traces are read as they are written, and a wrong line is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagedkv.errors import ConfigError
from pagedkv.simulation.trace import read_trace


def write(folder: Path, text: str, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_columns_of_a_csv(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "arrival_ms,tenant,prompt_tokens,output_tokens,block16_ids,other\n"
        "2500,b,33,4,0-1,x\n1000,a,20,0,5,y\n2500,a,70,7,0-2 9,z\n",
    )
    trace = read_trace(path)
    assert trace.arrivals is not None
    assert trace.arrivals.tolist() == [1.0, 2.5, 2.5]
    assert trace.prompt_tokens.tolist() == [20, 33, 70]  # equal arrivals keep their order
    assert trace.output_tokens.tolist() == [0, 4, 7]
    assert trace.tenants == ("a", "b", "a")
    assert trace.block_size == 16
    assert trace.block_ids is not None
    assert [ids.tolist() for ids in trace.block_ids] == [[5], [0, 1], [0, 1, 2, 9]]
    assert len(trace) == 3


def test_the_same_as_json_lines(tmp_path: Path) -> None:
    rows = [
        {"arrival_s": 0.5, "prompt_tokens": 20, "output_tokens": 1, "block16_ids": [5]},
        {"arrival_s": 0.25, "prompt_tokens": 40, "output_tokens": 2, "block16_ids": "0-1"},
    ]
    trace = read_trace(write(tmp_path, "\n".join(map(json.dumps, rows)) + "\n\n", "t.jsonl"))
    assert trace.prompt_tokens.tolist() == [40, 20]
    assert trace.block_ids is not None
    assert [ids.tolist() for ids in trace.block_ids] == [[0, 1], [5]]
    assert trace.tenants is None


def test_without_arrivals_the_order_of_the_file_stands(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, "prompt_tokens,output_tokens\n5,1\n3,2\n"))
    assert trace.arrivals is None
    assert trace.prompt_tokens.tolist() == [5, 3]
    assert trace.block_ids is None


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("1.0,x,1,0", r"line 3: prompt_tokens='x' is no number"),
        ("1.0,0,1,0", r"line 3: prompt_tokens='0' must be a whole number from 1"),
        ("1.0,2.5,1,0", r"line 3: prompt_tokens='2.5' must be a whole number"),
        ("1.0,2,-1,0", r"line 3: output_tokens='-1' must be finite"),
        ("nan,2,1,0", r"line 3: arrival_s='nan' must be finite"),
        ("-1,2,1,0", r"line 3: arrival_s='-1' must be finite and at least 0"),
        ("1.0,2,1,3-1", r"line 3: block ids '3-1' are neither n nor a-b"),
        ("1.0,2,1,a", r"line 3: block ids 'a' are neither"),
        ("1.0,2,1", r"line 3: block16_ids is missing"),
        ("1.0,2,1,0-2147483646", r"line 3: block ids '0-2147483646' are neither"),
        ("1.0,2,1," + "9" * 5000, r"line 3: block ids '9+' are neither"),
        ("1e300,2,1,0", r"line 3: arrival_s='1e300' must be finite and at least 0, less than"),
        ("1.0,99999999999,1,0", r"line 3: prompt_tokens='99999999999' must be a whole number"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, why: str) -> None:
    text = f"arrival_s,prompt_tokens,output_tokens,block16_ids\n0,1,1,\n{line}\n"
    with pytest.raises(ConfigError, match=why):
        read_trace(write(tmp_path, text))


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("a.csv", "", "has no rows"),
        ("a.csv", "prompt_tokens,output_tokens\n", "has no rows"),
        (
            "a.csv",
            "prompt,output\n1,2\n",
            r"no column 'prompt_tokens': it has \['prompt', 'output'\]",
        ),
        ("a.jsonl", "{\n", "line 1: no JSON"),
        ("a.jsonl", "[1]\n", "line 1: .* is no object"),
        ("a.jsonl", "[" * 100_000, "line 1: no JSON"),
        (
            "a.jsonl",
            '{"prompt_tokens": 1' + "0" * 400 + ', "output_tokens": 1}',
            "line 1: prompt_tokens=10+ is no number",
        ),
        ("a.csv", "prompt_tokens,output_tokens,block0_ids\n1,2,0\n", "column 'block0_ids'"),
        ("a.csv", f"prompt_tokens,output_tokens,block{'9' * 5000}_ids\n1,2,0\n", "column 'block9"),
        (
            "a.csv",
            "prompt_tokens,prompt_tokens,output_tokens\n1,2,3\n",
            r"columns \['prompt_tokens'\] are there twice",
        ),
        ("a.jsonl", '{"prompt_tokens": 1, "output_tokens": true}', None),
    ],
)
def test_a_file_that_is_no_trace(tmp_path: Path, name: str, text: str, why: str | None) -> None:
    path = write(tmp_path, text, name)
    if why is None:
        assert read_trace(path).output_tokens.tolist() == [1]
        return
    with pytest.raises(ConfigError, match=why):
        read_trace(path)


def test_a_file_that_is_not_there_or_binary(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_trace(tmp_path / "none.csv")
    (tmp_path / "b.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is no CSV text"):
        read_trace(tmp_path / "b.csv")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "arrival_s,prompt_tokens,output_tokens\r\n2.5,3,1\r\n"),
        ("a.jsonl", '{"arrival_s": 2.5, "prompt_tokens": 3, "output_tokens": 1}\n'),
    ],
)
def test_a_byte_order_mark_hides_no_column(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_bytes(("\ufeff" + text).encode())
    trace = read_trace(tmp_path / name)
    assert trace.arrivals is not None
    assert trace.arrivals.tolist() == [2.5]


def test_a_run_of_ids_ends_with_the_prompt(tmp_path: Path) -> None:
    text = "prompt_tokens,output_tokens,block16_ids\n33,1,0-1073741823 9\n"
    ids = read_trace(write(tmp_path, text)).block_ids
    assert ids is not None
    assert ids[0].tolist() == [0, 1, 2]
