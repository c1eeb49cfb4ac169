"""Counts and the four states of a block, and that one function changes a count."""

import ast
from pathlib import Path

import numpy as np
from cache_helpers import grow, remember, write

import pagedkv
from pagedkv.cache import BlockManager
from pagedkv.cache.pool import Pool


def states(m: BlockManager) -> tuple[int, int, int, int]:
    """(held, cached, draining, free)"""
    return m.num_held_blocks, m.num_cached_blocks, m.num_draining_blocks, m.num_free_blocks


def test_a_block_named_several_times_in_one_change_is_counted_as_often() -> None:
    pool = Pool(4)
    a, b = pool.allocate(2).tolist()
    pool.change(np.array([a, a, b], np.int32), +1)
    assert pool.counts[[a, b]].tolist() == [3, 2]
    pool.change(np.array([a, b, a, b, a], np.int32), -1)
    assert (pool.num_free, pool.num_held) == (4, 0)


def test_blocks_of_one_change_become_cached_in_the_order_of_their_last_mention() -> None:
    pool = Pool(3)
    blocks = pool.allocate(2)
    a, b = blocks.tolist()
    pool.change(np.array([a], np.int32), +1)
    pool.name(blocks, 4)
    pool.change(np.array([a, b, a], np.int32), -1)
    assert pool.eviction.order().tolist() == [b, a]


def test_a_fresh_pool_hands_out_adjacent_blocks() -> None:
    assert Pool(4).allocate(3).tolist() == [1, 2, 3]


def test_every_block_goes_through_the_four_states() -> None:
    m = BlockManager(4, 2)
    assert states(m) == (0, 0, 0, 4)
    seq = write(m, [1, 2, 3, 4])
    assert states(m) == (2, 0, 0, 2)
    lease = m.lease(m.block_table(seq))
    m.close(seq)
    assert states(m) == (0, 0, 2, 2)
    lease.release()
    assert states(m) == (0, 2, 0, 2)
    assert len(m.evict(4)) == 2
    assert states(m) == (0, 0, 0, 4)


def test_a_leased_block_without_a_name_becomes_free_only_at_the_end() -> None:
    m = BlockManager(2, 2, prefix_caching=False)
    seq = write(m, [1, 2])
    with m.lease(m.block_table(seq)):
        m.close(seq)
        assert states(m) == (0, 0, 1, 1)
    assert states(m) == (0, 0, 0, 2)


def test_two_leases_of_a_block_both_have_to_end() -> None:
    m = BlockManager(2, 2)
    seq = write(m, [1, 2])
    first, second = m.lease(m.block_table(seq)), m.lease(m.block_table(seq))
    m.close(seq)
    first.release()
    first.release()  # more than once is fine
    assert m.num_draining_blocks == 1
    second.release()
    assert states(m) == (0, 1, 0, 1)


def test_a_draining_block_can_be_hit_and_held_again() -> None:
    m = BlockManager(4, 2)
    seq = write(m, [1, 2, 3])
    lease = m.lease(m.block_table(seq)[:1])
    m.close(seq)
    again = m.open([1, 2, 9])
    assert m.length(again) == 2
    assert states(m) == (1, 1, 0, 2)
    lease.release()
    m.close(again)


def test_released_leases_leave_leaves_first_whatever_their_order() -> None:
    for reverse in (False, True):
        m = BlockManager(4, 2)
        seq = write(m, range(8))
        table = m.block_table(seq).tolist()
        lease = m.lease(table[::-1] if reverse else table)
        m.close(seq)
        lease.release()
        assert m.evict(1).tolist() == table[3:]
        assert m.match(list(range(8))).cached_tokens == 6


def test_a_tail_leased_longer_than_its_ancestors_is_still_evicted_first() -> None:
    m = BlockManager(4, 2)
    seq = write(m, range(6))
    table = m.block_table(seq).tolist()
    lease = m.lease(table[2:])
    m.close(seq)  # the ancestors are cached now, the tail only later
    lease.release()
    assert m.evict(9).tolist() == table[::-1]


def test_evicting_a_parent_frees_children_that_are_still_leased_later() -> None:
    m = BlockManager(3, 2)
    seq = write(m, range(4))
    lease = m.lease(m.block_table(seq)[1:])
    m.close(seq)
    assert len(m.evict(1)) == 1
    assert states(m) == (0, 0, 1, 2)
    lease.release()
    assert states(m) == (0, 0, 0, 3)
    assert m.match([0, 1, 2, 3]).cached_tokens == 0


def test_reset_withdraws_held_names_too() -> None:
    m = BlockManager(6, 2)
    remember(m, [7, 8, 9])
    seq = write(m, [1, 2, 3])
    m.reset_cache()
    assert states(m) == (2, 0, 0, 4)
    assert m.match([1, 2, 3]).cached_tokens == m.match([7, 8, 9]).cached_tokens == 0
    grow(m, seq, [4])  # its parent has no name any more: nothing is published
    m.close(seq)
    assert states(m) == (0, 0, 0, 6)


def test_one_function_changes_reference_counts() -> None:
    """Nobody but `Pool.change` (and `load`, which takes over saved ones) writes to `counts`."""
    root = Path(pagedkv.__file__).parent
    found = set()
    for path in root.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                for node in ast.walk(function):
                    if _writes_counts(node):
                        found.add((path.relative_to(root).as_posix(), function.name))
    assert found == {
        ("cache/pool.py", "__init__"),
        ("cache/pool.py", "change"),
        ("cache/pool.py", "load"),
    }


def _writes_counts(node: ast.AST) -> bool:
    """counts = ..., counts[...] = or +=, pool.counts likewise, and ufuncs that write in place."""
    if isinstance(node, ast.Call):
        in_place = isinstance(node.func, ast.Attribute) and node.func.attr == "at"
        outs = [k.value for k in node.keywords if k.arg == "out"] + node.args[: int(in_place)]
        return any(_is_counts(target) for target in outs)
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        targets = [node.target]
    return any(_is_counts(target) for target in targets)


def _is_counts(target: ast.expr) -> bool:
    while isinstance(target, ast.Subscript):
        target = target.value
    return isinstance(target, ast.Attribute) and target.attr in ("counts", "group_counts")


def test_stale_content_a_sequence_open_at_a_reset_publishes_nothing() -> None:
    """K/V of old weights found under new ones (vllm#9744): the first block was not full yet."""
    m = BlockManager(6, 4)
    seq, late = write(m, [1, 2, 3]), m.open()
    m.reset_cache()
    grow(m, seq, [4, 5])
    (twin,) = m.fork(seq)
    m.close(seq)
    m.close(twin)
    grow(m, late, [1, 2])  # nothing of it is from before the reset
    m.close(late)
    assert m.match([1, 2, 3, 4, 5]).cached_tokens == 2
