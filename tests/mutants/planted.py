"""Runs tests against a changed copy of the package, in a process of its own.

    python planted.py ROOT PYTEST-ARGUMENT...

ROOT holds the copy, `pagedkv`. Prints as the last line a JSON object: tests that passed, tests that
failed, and collection errors. Exits with 3 if the copy does not import.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any


class Outcomes:
    """Sorts the tests by their whole outcome, without the parameters in brackets."""

    def __init__(self) -> None:
        self.passed: set[str] = set()
        self.failed: set[str] = set()
        self.errors: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = report.nodeid.partition("[")[0]
        if report.failed:
            self.failed.add(name)
        elif report.when == "call" and report.passed:
            self.passed.add(name)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.errors.append(report.nodeid)


def import_copy(root: Path) -> None:
    """Imports every module of the copy's tensor-free rooms; an editable install stands aside."""
    sys.meta_path = [f for f in sys.meta_path if "ScikitBuild" not in type(f).__name__]
    sys.path.insert(0, str(root))
    for room in ("cache", "scheduling", "simulation"):
        for path in sorted((root / "pagedkv" / room).rglob("*.py")):
            importlib.import_module(".".join(path.relative_to(root).with_suffix("").parts))
    for name in ("pagedkv.engine.core", "pagedkv.engine.stops"):
        importlib.import_module(name)
    found = Path(sys.modules["pagedkv"].__file__ or "").parent
    if found != root / "pagedkv":
        raise ImportError(f"pagedkv is {found}, not the copy in {root}")


def main(root: Path, options: list[str]) -> int:
    try:
        import_copy(root)
    except Exception as error:
        print(f"the copy does not import: {error!r}")
        return 3
    import pytest

    outcomes = Outcomes()
    pytest.main(["-q", "-p", "no:cacheprovider", "--tb=line", *options], [outcomes])
    print(
        json.dumps(
            {
                "passed": sorted(outcomes.passed - outcomes.failed),
                "failed": sorted(outcomes.failed),
                "errors": outcomes.errors,
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
