"""Every planted fault is seen by the tests that are named for it, and by no import error."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from catalogue import KINDS, MUTANTS, Mutant

import pagedkv

TESTS = Path(__file__).parents[1]
SOURCE = Path(pagedkv.__file__).parent
CONTROLS = tuple(dict.fromkeys(test for mutant in MUTANTS for test in mutant.tests))


def plant(mutant: Mutant, package: Path) -> None:
    path = package / mutant.file
    text = path.read_text()
    assert text.count(mutant.old) == 1, f"{mutant.file} has {text.count(mutant.old)} such places"
    path.write_text(text.replace(mutant.old, mutant.new))


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package, to be changed."""
    ignore = shutil.ignore_patterns("__pycache__")
    return Path(shutil.copytree(SOURCE, tmp_path / "copy" / "pagedkv", ignore=ignore))


def outcomes(package: Path, *arguments: str, timeout: float) -> dict[str, list[str]]:
    """Runs pytest in tests/ on the copy. Fails if the copy does not import."""
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("planted.py"), package.parent, *arguments],
        cwd=TESTS.parent,
        # Loading plugins takes longer than the tests.
        env={
            **os.environ,
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return result


def functions(tests: Iterable[str]) -> list[str]:
    """Names without parameters, as the run reports them."""
    return sorted({"tests/" + test.partition("[")[0] for test in tests})


def test_there_is_a_fault_for_every_kind() -> None:
    assert len(MUTANTS) >= 30
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert {kind for mutant in MUTANTS for kind in mutant.kinds} == set(KINDS)
    assert all(mutant.tests for mutant in MUTANTS)


def test_control_the_named_tests_pass_on_an_unchanged_copy(package: Path) -> None:
    result = outcomes(package, *(f"tests/{test}" for test in CONTROLS), timeout=120)
    assert result["passed"] == functions(CONTROLS)
    assert not result["failed"] and not result["errors"]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_planted_fault_is_killed_by_each_named_test(mutant: Mutant, package: Path) -> None:
    plant(mutant, package)
    result = outcomes(package, *(f"tests/{test}" for test in mutant.tests), timeout=120)
    assert not result["errors"], "killed by a collection error only"
    assert result["failed"] == functions(mutant.tests), f"survived {result['passed']}"
