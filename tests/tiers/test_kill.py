"""A process that is killed at any moment leaves a folder in which nothing wrong is found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pagedkv.tiers.disk import DiskTier
from pagedkv.tiers.names import BlockName

BYTES, BLOCKS, NAMES = 1 << 16, 8, 40

WRITER = f"""
import sys
import numpy as np
from pagedkv.tiers.disk import DiskTier
folder, seed = sys.argv[1], int(sys.argv[2])
tier = DiskTier(folder, {BLOCKS} * {BYTES}, {BYTES}, b"model")
rng = np.random.default_rng(seed)
while True:
    i = int(rng.integers(0, {NAMES}))
    assert tier.put(i.to_bytes(16), b"%d" % i, np.full({BYTES}, i, np.uint8)), tier.off
    print(i, flush=True)
"""


def writer(folder: Path, seed: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), str(seed)], stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("writers", [1, 2])
def test_kill_at_any_moment(tmp_path: Path, writers: int) -> None:
    found = 0
    for round_ in range(4):
        running = [writer(tmp_path, 10 * round_ + i) for i in range(writers)]
        for process in running:
            assert process.stdout is not None
            for _ in range(7 * round_ + 3):  # so many blocks, then in the middle of something
                assert process.stdout.readline()
        for process in running:
            process.kill()
            process.communicate()
        tier = DiskTier(tmp_path, BLOCKS * BYTES, BYTES, b"model")
        assert tier.off is None
        out = np.zeros(BYTES, np.uint8)
        for i in range(NAMES):
            if tier.get(BlockName(i.to_bytes(16)), b"%d" % i, out):
                assert (out == i).all()
                found += 1
        assert tier.stats.damaged <= writers
        tier.close()
    assert found >= 4 * (BLOCKS - writers) // 2
