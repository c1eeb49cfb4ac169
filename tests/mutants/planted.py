"""Runs tests against a changed copy of the package, in a process of its own.

    python planted.py ROOT MODULE,... PYTEST-ARGUMENT...

ROOT holds the copy, `pagedkv`, and beside its modules the compiled extension. The modules named are
imported before any test. Prints as the last line a JSON object: tests that passed, tests that
failed, and errors of collecting or importing. Exits with 3 if the copy does not import.
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

    def pytest_exception_interact(self, node: Any, call: Any) -> None:
        """A test that ends with an import or a syntax error has not looked at what was changed."""
        if isinstance(call.excinfo.value, ImportError | SyntaxError):
            self.errors.append(node.nodeid)


def import_copy(root: Path, modules: list[str]) -> None:
    """Imports modules of the copy; the finder of an editable install stands aside."""
    sys.meta_path = [f for f in sys.meta_path if "ScikitBuild" not in type(f).__name__]
    sys.path.insert(0, str(root))
    for name in ("pagedkv", *modules):
        found = Path(importlib.import_module(name).__file__ or "")
        if not found.is_relative_to(root / "pagedkv"):
            raise ImportError(f"{name} is {found}, not the copy in {root}")


def main(root: Path, modules: list[str], options: list[str]) -> int:
    try:
        import_copy(root, modules)
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
    sys.exit(main(Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3:]))
