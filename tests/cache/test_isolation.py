"""The cache stands alone: numpy and the standard library only, no state shared in a process."""

import subprocess
import sys

from cache_helpers import close_all, remember, write

from pagedkv.cache import BlockManager

BLOCKED = ("torch", "transformers", "tokenizers", "safetensors", "gguf", "typer", "rich")

PROGRAM = f"""
import sys
for name in {BLOCKED}:
    sys.modules[name] = None
before = set(sys.modules)
import pagedkv.cache
m = pagedkv.cache.BlockManager(4, 2)
s = m.open([1, 2, 3]); m.reserve([s], [3]); m.commit([s], [[1, 2, 3]]); m.close(s)
roots = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print(sorted(roots - sys.stdlib_module_names))
print(sorted(n for n in sys.modules if n.startswith("pagedkv") and ".cache" not in n))
"""


def test_import_needs_numpy_and_nothing_else() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines() == ["['numpy', 'pagedkv']", "['pagedkv', 'pagedkv.errors']"]


def test_two_managers_of_one_process_share_nothing() -> None:
    one, other = BlockManager(4, 2), BlockManager(4, 2)
    untouched = other.snapshot()
    remember(one, [1, 2, 3, 4])
    seq = write(one, [1, 2, 9])
    lease = one.lease([1])
    assert other.snapshot() == untouched
    assert other.match([1, 2, 3, 4]).cached_tokens == 0
    lease.release()
    close_all(one, seq)


def test_the_modules_keep_no_mutable_state() -> None:
    import pagedkv.cache

    for name, module in list(sys.modules.items()):
        if name.startswith("pagedkv.cache"):
            for key, value in vars(module).items():
                if not key.startswith("__"):
                    assert not isinstance(value, dict | set | bytearray), f"{name}.{key}"
    assert pagedkv.cache.BlockManager is BlockManager
