"""`docs/structure.md` names every module, and no module that is not there; tests have one name."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "structure.md").read_text()


def modules() -> set[str]:
    """Paths as the page has them: under src/pagedkv or the root."""
    package = ROOT / "src" / "pagedkv"
    python = {str(p.relative_to(package)) for p in package.rglob("*.py*") if "__" not in str(p)}
    native = {f"native/{p.name}" for p in (ROOT / "native").iterdir() if p.suffix != ".md"}
    return {path for path in python | native if not path.endswith((".pyc", ".typed"))}


def listed() -> set[str]:
    found: set[str] = set()
    for section in re.split(r"^### ", PAGE, flags=re.M)[1:]:
        room = re.match(r"`(.*?)`", section)
        assert room is not None, section[:40]
        prefix = "" if room[1] == "pagedkv/" else room[1]
        for line in re.findall(r"^\* (.*?) —", section, re.M):
            found |= {prefix + name for name in re.findall(r"`(.*?)`", line)}
    return found


def test_every_module_is_listed_and_every_listed_module_exists() -> None:
    assert listed() == modules()


def test_no_two_test_modules_have_one_name() -> None:
    names = Counter(path.name for path in (ROOT / "tests").rglob("*.py"))
    assert {name for name, count in names.items() if count > 1} <= {"conftest.py"}
