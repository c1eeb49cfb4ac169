"""State keys: the same for the same state under any ids, another for another state."""

from __future__ import annotations

import pytest
from cache_program import CacheProgram

from pagedkv.cache import BlockManager


class KeyedProgram(CacheProgram):
    """Notes the state key and the model's canonical state after every call."""

    def __init__(self, *shape: int, used: bool) -> None:
        super().__init__(*shape)
        self.keys: list[tuple[bytes, tuple]] = []
        if used:
            wear(self.real)

    def compare(self) -> None:
        super().compare()
        self.keys.append((self.real.state_key(), self.canonical()))


def wear(m: BlockManager) -> None:
    """Uses up ids, rows, stamps and generations, and mixes the free blocks; leaves m empty."""
    seqs = [m.open() for _ in range(3)]
    for i, seq in enumerate(seqs):
        k = min(m.num_free_blocks, 2) * m.block_size
        m.reserve([seq], [k])
        m.commit([seq], [[i] * k])
    for seq in (seqs[1], seqs[0], seqs[2]):
        m.close(seq)
    m.lease([]).release()
    m.reset_cache()


@pytest.mark.parametrize("block_size", [1, 2, 3])
@pytest.mark.parametrize("num_blocks", [1, 3, 6])
def test_keys_tell_states_apart_and_nothing_else(num_blocks: int, block_size: int) -> None:
    keys: dict[tuple, bytes] = {}
    for seed in range(2):
        programs = [KeyedProgram(seed, num_blocks, block_size, used=used) for used in (False, True)]
        for program in programs:
            program.run(60, restarts=False)
        assert [k for k, _ in programs[0].keys] == [k for k, _ in programs[1].keys]
        shape = tuple(programs[0].shape.values())
        for key, state in programs[0].keys:
            assert keys.setdefault((shape, state), key) == key, f"two keys for {state}"
    assert len(set(keys.values())) == len(keys), "two states have the same key"
