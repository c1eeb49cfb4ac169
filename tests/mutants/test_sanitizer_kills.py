"""Which planted faults of the cache the sanitizer sees by itself, in random calls without a model.

Nothing compares the answers with a reference here, and no check of the tests looks on: what is
seen would be seen in an engine at work. `CAUGHT` may only grow.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import catalogue
import catalogue_eviction
import pytest
from kinds import Mutant

import pagedkv
from pagedkv.cache.errors import Misuse

SOURCE = Path(pagedkv.__file__).parent
FAULTS = {
    mutant.name: mutant
    for mutant in (*catalogue.MUTANTS, *catalogue_eviction.MUTANTS)
    if mutant.file.startswith("cache/")
}
SEEDS = 300

CAUGHT = {
    "close releases nothing": Misuse.LEAK,
    "commit keeps the copy source": Misuse.LEAK,
    "cancel keeps the copies": Misuse.LEAK,
    "commit keeps what it did not need": Misuse.WRONG_TABLE,
    "close frees the blocks of a sibling": Misuse.COUNT,
    "a block named twice in one release is released once": Misuse.COUNT,
    "the block that a duplicate moves to is not held": Misuse.COUNT,
    "the null block is handed out": Misuse.BROKEN_INVARIANT,
    "a row is taken before the rows are counted": Misuse.BROKEN_INVARIANT,
    "demand in whole blocks is rounded down": Misuse.BROKEN_INVARIANT,
    "a block too many at every edge": Misuse.BROKEN_INVARIANT,
    "copies are not part of the demand": Misuse.BROKEN_INVARIANT,
    "a holder that does not write is overwritten": Misuse.SHARED_WRITE,
    "a leased block is overwritten": Misuse.SHARED_WRITE,
    "a published block is written in place": Misuse.SHARED_WRITE,
    "the last filled slot is not copied": Misuse.WRONG_TABLE,
    "the copied tokens are forgotten": Misuse.WRONG_HIT,
    "blocks are published at reserve": Misuse.BROKEN_INVARIANT,
    "a block that is not full is published as full": Misuse.WRONG_HIT,
    "a tail is published while somebody may append": Misuse.BROKEN_INVARIANT,
    "a block is published without its parent": Misuse.WRONG_HIT,
    "the namespace is not in the name": Misuse.WRONG_HIT,
    "the extra bytes are not in the name": Misuse.WRONG_HIT,
    "the parts of a name are not framed": Misuse.WRONG_HIT,
    "a block that is public in part is public": Misuse.WRONG_HIT,
    "the next block of a chain is a hit unseen": Misuse.WRONG_HIT,
    "a recycled block is found under its old name": Misuse.BROKEN_INVARIANT,
    "the descendants of an evicted block keep their names": Misuse.WRONG_HIT,
    "a hit can still be evicted": Misuse.BROKEN_INVARIANT,
    "a whole prompt can be a hit": Misuse.WRONG_HIT,
    "blocks that are being copied out are available": Misuse.WRONG_TABLE,
    "a closed id means whoever has its row now": Misuse.FREED_READ,
    "a changed row is not reported": Misuse.FREED_READ,
    "a snapshot forgets pending copies": Misuse.BROKEN_INVARIANT,
    "a protected block that is hit can still be evicted": Misuse.BROKEN_INVARIANT,
}

# Every block is used as it should be: what is wrong is an answer or a choice.
OUT_OF_REACH = {
    "eviction before the refusal": "cached blocks are lost, none that is in use",
    "hits are free even if nobody holds them": "what `match` answers is used by nobody here",
    "a longer published tail is written over": "only its writer holds it: a name is lost",
    "the shortest of equal writers keeps the block": "each still reads what it should",
    "truncate leaves the public part": "needs another tenant with the same public tokens: see "
    "tests/cache/test_sanitizer.py",
    "the head of a chain is evicted first": "its descendants lose their names with it",
    "the greatest of equal partial matches is taken": "it matches as well",
    "a tail is never found": "computed again instead",
    "a lease is released twice": "the manager refuses the second end",
    "the end of a lease leaves the head to go first": "an order of eviction",
    "the last page of a full row is empty": "`csr` is not compared with what kernels are given",
    "tails of other rows are taken for a common prefix": "`shared_prefixes` is not compared either",
    "nothing is protected": "an order of eviction",
    "a hit is no second use": "an order of eviction",
    "what was evicted is forgotten at once": "an order of eviction",
    "the protected ring takes the whole pool": "an order of eviction",
    "evicted names are remembered for ever": "memory, not blocks",
    "a block is taken by its stale entry": "needs more releases than small pools see in few calls",
}

# One of each kind that shows within a second: for every run of the tests.
QUICK = (
    "close releases nothing",
    "close frees the blocks of a sibling",
    "a holder that does not write is overwritten",
    "the last filled slot is not copied",
    "the namespace is not in the name",
    "a closed id means whoever has its row now",
    "a hit can still be evicted",
)


def found(mutant: Mutant, folder: Path) -> str:
    """The kind of misuse that random calls on a changed copy of the cache lead to, or nothing."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(SOURCE / "cache", folder / "pagedkv" / "cache", ignore=ignore)
    for name in ("__init__.py", "errors.py"):
        shutil.copy(SOURCE / name, folder / "pagedkv")
    path = folder / "pagedkv" / mutant.file
    text = path.read_text()
    assert text.count(mutant.old) == 1
    path.write_text(text.replace(mutant.old, mutant.new))
    program = Path(__file__).parents[1] / "properties" / "sanitized_program.py"
    shutil.copy(program, folder)
    planted = (
        "from pathlib import Path; from planted import import_copy; "
        f"import_copy(Path({str(folder)!r}), ['pagedkv.cache', {mutant.module!r}]); "
        f"import sanitized_program; sanitized_program.main(0, {SEEDS})"
    )
    done = subprocess.run(
        [sys.executable, "-B", "-c", planted],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_fault_of_the_cache_is_in_one_of_the_lists() -> None:
    assert not CAUGHT.keys() & OUT_OF_REACH.keys()
    assert CAUGHT.keys() | OUT_OF_REACH.keys() == FAULTS.keys()


@pytest.mark.parametrize("name", QUICK)
def test_a_fault_is_seen_by_the_sanitizer(name: str, tmp_path: Path) -> None:
    assert found(FAULTS[name], tmp_path)


@pytest.mark.deep
@pytest.mark.parametrize("name", [*CAUGHT])
def test_a_fault_is_seen_by_the_sanitizer_as_what_it_is(name: str, tmp_path: Path) -> None:
    assert found(FAULTS[name], tmp_path) == CAUGHT[name]
