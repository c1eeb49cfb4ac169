"""The table of properties names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ROWS = re.findall(
    r"^\| (.*?) \| (`.*`) \|$", Path(__file__).with_name("README.md").read_text(), re.M
)


def test_every_row_was_read() -> None:
    assert len(ROWS) == 43
    assert len({what for what, _ in ROWS}) == len(ROWS)


@pytest.mark.parametrize(("what", "tests"), ROWS, ids=[what for what, _ in ROWS])
def test_each_named_test_exists(what: str, tests: str) -> None:
    named = re.findall(r"`(\S+?)::(test_\w+)`", tests)
    assert len(named) == tests.count("::")
    for file, name in named:
        tree = ast.parse((TESTS / file).read_text())
        functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert name in functions, f"{what}: no {name} in {file}"
