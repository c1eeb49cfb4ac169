"""Wrong calls are answered with an error that names the value, and change nothing."""

from collections.abc import Callable

import numpy as np
import pytest
from cache_helpers import close_all, refused, write

from pagedkv.cache import BlockManager, OutOfSequences, SanitizerError

BIG = 2**31


def manager() -> tuple[BlockManager, int, int]:
    """(manager, a sequence with an open reservation of 2, one of five tokens without)"""
    m = BlockManager(8, 2, max_seqs=4, max_blocks_per_seq=4)
    busy, idle = write(m, [1, 2, 3]), write(m, [4, 5, 6, 7, 8])
    m.reserve([busy], [2])
    return m, busy, idle


Call = Callable[[BlockManager, int, int], object]

WRONG: dict[str, tuple[type[Exception], str, Call]] = {
    "unknown id": (KeyError, "12345", lambda m, b, i: m.length(12345)),
    "id 0": (KeyError, "sequence 0 ", lambda m, b, i: m.close(0)),
    "negative id": (KeyError, "-4", lambda m, b, i: m.block_table(-4)),
    "fraction as id": (ValueError, "1.5", lambda m, b, i: m.length(1.5)),
    "no id": (ValueError, "None", lambda m, b, i: m.tables([None])),
    "repeated id": (ValueError, "named twice", lambda m, b, i: m.reserve([i, i], [1, 1])),
    "repeated id in commit": (ValueError, "twice", lambda m, b, i: m.commit([b, b], [[1], [2]])),
    "repeated id in cancel": (ValueError, "twice", lambda m, b, i: m.cancel([b, b])),
    "repeated id in tables": (ValueError, "twice", lambda m, b, i: m.tables([b, i, b])),
    "negative count": (ValueError, "-3", lambda m, b, i: m.reserve([i], [-3])),
    "fractional count": (ValueError, "1.5", lambda m, b, i: m.reserve([i], [1.5])),
    "more counts than ids": (ValueError, "2 counts for 1", lambda m, b, i: m.reserve([i], [1, 1])),
    "past the longest": (ValueError, "max_blocks_per_seq=4", lambda m, b, i: m.reserve([i], [4])),
    "past int64": (ValueError, "max_blocks", lambda m, b, i: m.reserve([i], [2**63 - 1])),
    "past the longest, asked": (ValueError, r"5 \+ 4", lambda m, b, i: m.can_reserve([i], [4])),
    "second reserve": (ValueError, "open reservation", lambda m, b, i: m.reserve([i, b], [1, 1])),
    "second reserve of 0": (ValueError, "open reservation", lambda m, b, i: m.reserve([b], [0])),
    "commit of too many": (ValueError, "3 tokens", lambda m, b, i: m.commit([b], [[1, 2, 3]])),
    "commit without reserve": (
        ValueError,
        "no open reservation",
        lambda m, b, i: m.commit([b, i], [[1], []]),
    ),
    "fewer lists than ids": (
        ValueError,
        "2 token lists are wanted",
        lambda m, b, i: m.commit([b, i], [[]]),
    ),
    "a list that is not nested": (ValueError, r"\[9\]", lambda m, b, i: m.commit([b], [9])),
    "token past int32": (ValueError, str(BIG), lambda m, b, i: m.commit([b], [[1, BIG]])),
    "token below int32": (
        ValueError,
        str(-BIG - 1),
        lambda m, b, i: m.commit([b], [np.array([-BIG - 1])]),
    ),
    "fraction as token": (ValueError, "2.5", lambda m, b, i: m.commit([b], [[1, 2.5]])),
    "float tokens": (ValueError, "float64", lambda m, b, i: m.open(np.array([1.0, 2.0]))),
    "a number as tokens": (ValueError, "7", lambda m, b, i: m.match(7)),
    "a number as ids": (ValueError, "ids", lambda m, b, i: m.reserve(i, [1])),
    "a number as counts": (ValueError, "counts", lambda m, b, i: m.reserve([i], 1)),
    "bytes as counts": (ValueError, "counts", lambda m, b, i: m.reserve([i], bytes(8))),
    "a number as token lists": (ValueError, "7", lambda m, b, i: m.commit([b], 7)),
    "a number as blocks": (ValueError, "blocks|block ids", lambda m, b, i: m.lease(3)),
    "no stamp": (ValueError, "None", lambda m, b, i: m.changed_rows(None)),
    "no snapshot": (ValueError, "NoneType", lambda m, b, i: m.restore(None)),
    "text as tokens": (ValueError, "got str", lambda m, b, i: m.open("abc")),
    "bytes as tokens": (ValueError, "got bytes", lambda m, b, i: m.open(b"abcd")),
    "none among tokens": (ValueError, "None", lambda m, b, i: m.match([1, None])),
    "unsigned past int32": (
        ValueError,
        str(BIG),
        lambda m, b, i: m.open(np.array([BIG], np.uint32)),
    ),
    "two axes of tokens": (ValueError, r"\(1, 2\)", lambda m, b, i: m.open(np.array([[1, 2]]))),
    "cancel without reserve": (ValueError, "no open", lambda m, b, i: m.cancel([b, i])),
    "fork of a reservation": (ValueError, "open reservation", lambda m, b, i: m.fork(b)),
    "negative forks": (ValueError, "n=-1", lambda m, b, i: m.fork(i, -1)),
    "fractional forks": (ValueError, "n=1.5", lambda m, b, i: m.fork(i, 1.5)),
    "too many forks": (OutOfSequences, "3 more", lambda m, b, i: m.fork(i, 3)),
    "truncate past the end": (ValueError, "5 tokens to 6", lambda m, b, i: m.truncate(i, 6)),
    "truncate below 0": (ValueError, "-1", lambda m, b, i: m.truncate(b, -1)),
    "truncate to a truth": (ValueError, "True", lambda m, b, i: m.truncate(i, True)),
    "truncate to a fraction": (ValueError, "2.5", lambda m, b, i: m.truncate(b, 2.5)),
    "public below 0": (ValueError, "public=-1", lambda m, b, i: m.open([1], public=-1)),
    "public past the tokens": (ValueError, "public=2", lambda m, b, i: m.open([1], public=2)),
    "public as a fraction": (ValueError, "0.5", lambda m, b, i: m.match([1], public=0.5)),
    "namespace as a number": (ValueError, "7", lambda m, b, i: m.open([1], namespace=7)),
    "extra as text": (ValueError, "'x'", lambda m, b, i: m.open([1], extra="x")),
    "open of too many": (ValueError, "9 tokens", lambda m, b, i: m.open(range(9))),
    "evict below 0": (ValueError, "k=-1", lambda m, b, i: m.evict(-1)),
    "evict a fraction": (ValueError, "k=0.5", lambda m, b, i: m.evict(0.5)),
    "lease of a free block": (ValueError, "block 8 is free", lambda m, b, i: m.lease([1, 8])),
    "lease of the null block": (ValueError, "block 0", lambda m, b, i: m.lease([0])),
    "lease past the pool": (ValueError, "block 9", lambda m, b, i: m.lease([9])),
    "lease of a fraction": (ValueError, "1.5", lambda m, b, i: m.lease([1.5])),
    "lease of one block twice": (ValueError, "twice", lambda m, b, i: m.lease([1, 1])),
    "unknown lease": (KeyError, "77", lambda m, b, i: m.end_lease(77)),
    "count of the null block": (ValueError, "block 0", lambda m, b, i: m.refcount(0)),
}


@pytest.mark.parametrize("what", WRONG)
def test_misuse_is_named_and_changes_nothing(what: str) -> None:
    error, message, call = WRONG[what]
    m, busy, idle = manager()
    with refused(m, error, message):
        call(m, busy, idle)
    m.check()
    close_all(m, busy, idle)


VERBS: dict[str, Callable[[BlockManager, int], object]] = {
    "length": lambda m, s: m.length(s),
    "cached_tokens": lambda m, s: m.cached_tokens(s),
    "block_table": lambda m, s: m.block_table(s),
    "rows": lambda m, s: m.rows([s]),
    "tables": lambda m, s: m.tables([s]),
    "reserve": lambda m, s: m.reserve([s], [1]),
    "can_reserve": lambda m, s: m.can_reserve([s], [1]),
    "demand": lambda m, s: m.demand([s], [1]),
    "commit": lambda m, s: m.commit([s], [[]]),
    "cancel": lambda m, s: m.cancel([s]),
    "fork": lambda m, s: m.fork(s),
    "truncate": lambda m, s: m.truncate(s, 0),
    "close": lambda m, s: m.close(s),
    "export_sequence": lambda m, s: m.export_sequence(s),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_closed_sequence_is_a_key_error_even_when_its_row_is_used_again(verb: str) -> None:
    m = BlockManager(4, 2, max_seqs=1)
    old = write(m, [1, 2, 3])
    m.close(old)
    new = m.open()
    assert new != old and m.rows([new]).tolist() == [0]
    with refused(m, KeyError, str(old)):
        VERBS[verb](m, old)
    m.close(new)


def test_opening_more_than_max_seqs_is_refused() -> None:
    m = BlockManager(4, 2, max_seqs=2)
    seqs = [m.open(), m.open()]
    with refused(m, OutOfSequences, "2 of max_seqs=2 are open"):
        m.open([1])
    close_all(m, *seqs)


@pytest.mark.parametrize(
    "shape",
    [(0, 4), (-1, 4), (4, 0), (4, 2.0), (True, 4), (4, 4, True, 0), (4, 4, True, 4, 0), (BIG, 4)],
)
def test_impossible_shapes_are_refused(shape: tuple) -> None:
    with pytest.raises(ValueError, match="must be an integer from 1"):
        BlockManager(*shape)


def test_any_integer_type_will_do_for_tokens_and_ids() -> None:
    m = BlockManager(8, 2)
    same = [
        [1, 2, 3],
        (1, 2, 3),
        range(1, 4),
        np.array([1, 2, 3], np.uint8),
        np.array([1, 0, 2, 0, 3])[::2],
        np.array([1, 2, 3], ">i4"),
        [np.int64(1), True + 1, 3],
    ]
    for tokens in same:
        seq = m.open(tokens)
        m.reserve(np.array([seq]), np.array([3 - m.length(seq)], np.int32))
        m.commit([seq], [tokens[m.length(seq) :]])
        m.close(seq)
        assert m.match([1, 2, 3, 4]).cached_tokens == 3
    assert m.num_cached_blocks == 2


def test_the_sanitizer_checks_after_every_change() -> None:
    m = BlockManager(4, 2, sanitize=True)
    seq = write(m, [1, 2, 3])
    m.pool.counts[1] += 1
    with pytest.raises(SanitizerError, match="block 1: count 2, but 1 holders"):
        m.reserve([seq], [1])
    m.pool.counts[1] -= 1
    m.close(seq)
