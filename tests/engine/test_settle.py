"""What was there is not looked through any more; what comes after is."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import gc
from pagedkv.engine.settle import settle

class Node: pass

kept = [Node() for _ in range(1000)]
settle()
assert gc.get_freeze_count() >= 1000
assert not any(type(one) is Node for one in gc.get_objects())
later = Node()
later.itself = later
del later
assert gc.collect() >= 1
"""


def test_what_was_loaded_is_left_alone_and_later_garbage_is_collected() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True)
