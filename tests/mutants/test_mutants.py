"""Every planted fault is seen by the tests that are named for it, and by no import error.

`make test` runs the named tests against each fault, `make test-deep` the whole suite.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import catalogue
import catalogue_attention
import catalogue_conduct
import catalogue_dashboard
import catalogue_deadlines
import catalogue_eviction
import catalogue_fairness
import catalogue_figures
import catalogue_grammar
import catalogue_keys
import catalogue_load
import catalogue_log
import catalogue_moves
import catalogue_openai
import catalogue_pressure
import catalogue_routing
import catalogue_serving
import catalogue_tiers
import catalogue_transfer
import pytest
from kinds import KINDS, Mutant

import pagedkv

TESTS = Path(__file__).parents[1]
SOURCE = Path(pagedkv.__file__).parent
MUTANTS: tuple[Mutant, ...] = (
    *catalogue.MUTANTS,
    *catalogue_eviction.MUTANTS,
    *catalogue_serving.MUTANTS,
    *catalogue_keys.MUTANTS,
    *catalogue_load.MUTANTS,
    *catalogue_log.MUTANTS,
    *catalogue_moves.MUTANTS,
    *catalogue_openai.MUTANTS,
    *catalogue_deadlines.MUTANTS,
    *catalogue_fairness.MUTANTS,
    *catalogue_figures.MUTANTS,
    *catalogue_pressure.MUTANTS,
    *catalogue_tiers.MUTANTS,
    *catalogue_transfer.MUTANTS,
    *catalogue_attention.MUTANTS,
    *catalogue_conduct.MUTANTS,
    *catalogue_dashboard.MUTANTS,
    *catalogue_grammar.MUTANTS,
    *catalogue_routing.MUTANTS,
)
CONTROLS = tuple(dict.fromkeys(test for mutant in MUTANTS for test in mutant.tests))
MODULES = tuple(dict.fromkeys(mutant.module for mutant in MUTANTS))

# The suite, rooms without a model first: most faults are seen there, and the first failure is
# enough. Tests of the wheel and of the documents do not look at the copy.
ROOMS = (
    "tiers",
    "transfer",
    "cache",
    "scheduling",
    "simulation",
    "engine",
    "server",
    "cluster",
    "loadtest",
    "bench",
    "attention",
    "properties",
    "models",
    "cli",
    "parity",
    "e2e",
)
ELSEWHERE = ("benchmarks", "docs", "mutants", "packaging")

each_mutant = pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)


def plant(mutant: Mutant, package: Path) -> None:
    path = package / mutant.file
    text = path.read_text()
    assert text.count(mutant.old) == 1, f"{mutant.file} has {text.count(mutant.old)} such places"
    path.write_text(text.replace(mutant.old, mutant.new))


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package, to be changed, with the extension that an editable install keeps."""
    ignore = shutil.ignore_patterns("__pycache__")
    copy = Path(shutil.copytree(SOURCE, tmp_path / "copy" / "pagedkv", ignore=ignore))
    extension = importlib.util.find_spec("pagedkv._native")
    assert extension is not None and extension.origin is not None, "build the native extension"
    shutil.copy(extension.origin, copy)
    return copy


def outcomes(
    package: Path, modules: Iterable[str], *arguments: str, timeout: float
) -> dict[str, list[str]]:
    """Runs pytest in tests/ on the copy. Fails if one of `modules` does not import there."""
    planted = Path(__file__).with_name("planted.py")
    done = subprocess.run(
        [sys.executable, planted, package.parent, ",".join(modules), *arguments],
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


def whole_suite(first: str = ROOMS[0]) -> list[str]:
    """The arguments that run the suite, one room before the others."""
    rooms = sorted(ROOMS, key=lambda room: room != first)
    return ["-m", "not deep", *(f"tests/{room}" for room in rooms)]


def functions(tests: Iterable[str]) -> list[str]:
    """Names without parameters, as the run reports them."""
    return sorted({"tests/" + test.partition("[")[0] for test in tests})


def test_there_is_a_fault_for_every_kind() -> None:
    assert len(MUTANTS) >= 30
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert {kind for mutant in MUTANTS for kind in mutant.kinds} == set(KINDS)
    assert all(mutant.tests for mutant in MUTANTS)


def test_the_whole_suite_leaves_no_room_out() -> None:
    rooms = {path.parent.relative_to(TESTS).parts[0] for path in TESTS.glob("*/**/test_*.py")}
    assert rooms == {*ROOMS, *ELSEWHERE}


def test_control_the_named_tests_pass_on_an_unchanged_copy(package: Path) -> None:
    result = outcomes(package, MODULES, *(f"tests/{test}" for test in CONTROLS), timeout=120)
    assert result["passed"] == functions(CONTROLS)
    assert not result["failed"] and not result["errors"]


@each_mutant
def test_planted_fault_is_killed_by_each_named_test(mutant: Mutant, package: Path) -> None:
    plant(mutant, package)
    tests = [f"tests/{test}" for test in mutant.tests]
    result = outcomes(package, [mutant.module], *tests, timeout=120)
    assert not result["errors"], "killed by an import error only"
    assert result["failed"] == functions(mutant.tests), f"survived {result['passed']}"


@pytest.mark.deep
def test_control_the_whole_suite_passes_on_an_unchanged_copy(package: Path) -> None:
    result = outcomes(package, MODULES, *whole_suite(), timeout=3600)
    assert len(result["passed"]) > 500
    assert not result["failed"] and not result["errors"]


@pytest.mark.deep
@each_mutant
def test_planted_fault_fails_the_whole_suite(mutant: Mutant, package: Path) -> None:
    """As far as the first failure, beginning in the fault's own room."""
    plant(mutant, package)
    suite = whole_suite(mutant.file.partition("/")[0])
    result = outcomes(package, [mutant.module], "-x", *suite, timeout=3600)
    assert not result["errors"], "killed by an import error only"
    assert result["failed"], "survived the whole suite"
