"""Sizes as people write them."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from pagedkv.cli.prompts import read_prompts
from pagedkv.engine.sizes import parse_bytes
from pagedkv.errors import ConfigError, RequestError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("536870912", 536870912),
        ("512MiB", 512 * 2**20),
        ("512 mib", 512 * 2**20),
        ("1Ki", 1024),
        ("2GB", 2 * 10**9),
        ("2g", 2 * 10**9),
        ("1.5GiB", 3 * 2**29),
        ("1TiB", 2**40),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text, "--kv-memory") == size


@pytest.mark.parametrize("text", ["", "much", "-1", "5x", "1iB", "1.2.3G", "GiB"])
def test_what_is_no_size_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="--kv-memory"):
        parse_bytes(text, "--kv-memory")


def test_only_a_line_feed_parts_prompts(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_bytes("a\x0cb\u2028c\x85d\r\n\n e".encode())
    prompts = read_prompts([], file, None)
    assert [prompt.text for prompt in prompts] == ["a\x0cb\u2028c\x85d", " e"]
    assert [prompt.place for prompt in prompts] == [f"line 1 of {file}", f"line 3 of {file}"]


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text("\ufeffa\n\ufeffb")
    assert [prompt.text for prompt in read_prompts([], file, None)] == ["a", "\ufeffb"]
    for given, name in (["-"], None), ([], None), ([], Path("-")):
        (prompt,) = read_prompts(given, name, io.StringIO("\ufeffa\n"))
        assert prompt.text == "a"


def test_closed_stdin_is_no_prompt() -> None:
    with pytest.raises(RequestError, match="no prompt"):
        read_prompts([], None, None)
