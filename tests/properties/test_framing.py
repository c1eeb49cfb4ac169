"""Names whose parts would run together without a frame around each."""

from __future__ import annotations

from pagedkv.cache import BlockManager


def test_parts_of_a_name_do_not_run_together() -> None:
    m = BlockManager(num_blocks=8, block_size=2)
    seq = m.open([1, 2, 3], namespace="a", extra=b"e\0")
    m.reserve([seq], [3])
    m.commit([seq], [[1, 2, 3]])
    m.close(seq)
    assert m.match([1, 2, 3], namespace="a", extra=b"e\0").cached_tokens == 2
    assert m.match([1, 2, 3], namespace="axe").cached_tokens == 0
