"""What is imported is asked for, and who lacks it is told which extra has it."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from pagedkv import extras
from pagedkv.errors import MissingExtraError

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# What is imported and is a part of what is asked for, at its version.
PARTS = {"starlette": "fastapi", "h11": "uvicorn", "pydantic-core": "pydantic"}
# Its absence is told where plots are drawn.
TOLD_ELSEWHERE = {"matplotlib"}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def names_of(requirements: list[str]) -> set[str]:
    return {canonical(re.split(r"[^\w.-]", requirement)[0]) for requirement in requirements}


def imported() -> set[str]:
    """Packages of others that any module of ours imports, anywhere in it."""
    found = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                found.add(str(node.module).partition(".")[0])
    return found - sys.stdlib_module_names - {"pagedkv"}


def extra_of(module: str) -> str | None:
    """The extra that has it; None: every installation does."""
    for distribution in packages_distributions()[module]:
        name = canonical(distribution)
        name = PARTS.get(name, name)
        if name in names_of(PROJECT["dependencies"]):
            return None
        for extra, requirements in PROJECT["optional-dependencies"].items():
            if extra != "dev" and name in names_of(requirements):
                return extra
    raise AssertionError(f"{module} is imported, and no extra has it")


@pytest.mark.parametrize("module", sorted(imported() - TOLD_ELSEWHERE))
def test_who_lacks_a_package_is_told_its_extra(module: str) -> None:
    extra = extra_of(module)
    if extra is None:
        assert module == "numpy"
        return
    with pytest.raises(MissingExtraError, match=rf'pip install "pagedkv\[{extra}\]"'), extras():
        raise ModuleNotFoundError(name=module)
