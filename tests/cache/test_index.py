"""Names: injective, ordered, and a partial match that always picks the same child."""

import itertools

import numpy as np
import pytest
from cache_helpers import remember, write
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.cache import BlockManager
from pagedkv.cache.index import PrefixIndex, make_frames, token_bytes

NAMESPACES = st.none() | st.text(max_size=3) | st.binary(max_size=3)
EXTRAS = st.none() | st.binary(max_size=6)
NAMES = st.tuples(NAMESPACES, EXTRAS, st.lists(st.integers(-3, 3), min_size=1, max_size=3))


@settings(derandomize=True, max_examples=300)
@given(NAMES, NAMES)
def test_different_facts_never_give_the_same_key_bytes(one: tuple, other: tuple) -> None:
    def keys(name: tuple) -> tuple[bytes, bytes]:
        namespace, extra, tokens = name
        frames = make_frames(namespace, extra)
        content = token_bytes(np.array(tokens, np.int32))
        return frames.public + content, frames.private + content

    assert not set(keys(one)) & set(keys(other)) or one[1:] == other[1:]
    assert (keys(one)[1] == keys(other)[1]) == (one == other and type(one[0]) is type(other[0]))
    assert keys(one)[0] != keys(other)[1]


@settings(derandomize=True, max_examples=200)
@given(st.lists(st.integers(-(2**31), 2**31 - 1)), st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_key_bytes_are_ordered_as_the_tokens_are(one: list[int], other: list[int]) -> None:
    a, b = (token_bytes(np.array(tokens, np.int32)) for tokens in (one, other))
    assert (a < b) == (one < other)


def test_partial_match_takes_the_longest_then_the_smallest() -> None:
    """Every set of up to four children over two tokens against a plain scan."""
    strings = [list(s) for n in (1, 2, 3) for s in itertools.product((-1, 2), repeat=n)]
    frame = make_frames(None, None).private
    for chosen in itertools.combinations(range(len(strings)), 3):
        index = PrefixIndex(np.zeros((9, 3), np.int32))
        for block, i in enumerate(chosen, 1):
            index.publish(block, 0, frame, token_bytes(np.array(strings[i], np.int32)))
        for wanted in strings:
            shared = {
                block: sum(
                    1
                    for _ in itertools.takewhile(
                        lambda p: p[0] == p[1], zip(strings[i], wanted, strict=False)
                    )
                )
                for block, i in enumerate(chosen, 1)
            }
            best = min(shared, key=lambda b: (-shared[b], strings[chosen[b - 1]]))
            expected = (best, shared[best]) if shared[best] else (0, 0)
            assert index.partial_hit(0, frame, np.array(wanted, np.int32)) == expected


def test_partial_match_stays_inside_namespace_and_extra() -> None:
    m = BlockManager(8, 4)
    remember(m, [1, 2, 3], namespace="a", extra=b"x")
    for name in ({}, {"namespace": "a"}, {"extra": b"x"}, {"namespace": b"a", "extra": b"x"}):
        assert m.match([1, 2, 3, 4], **name).cached_tokens == 0
    assert m.match([1, 2, 3, 4], namespace="a", extra=b"x").cached_tokens == 3


@pytest.mark.parametrize("public", range(11))
def test_the_public_part_is_shared_block_by_block(public: int) -> None:
    """Block i is public exactly if (i + 1) * B <= public; the tail of 10 tokens is block 2."""
    m = BlockManager(16, 4)
    remember(m, range(10), namespace="a", public=public)
    found = m.match([*range(10), 99], namespace="b", public=public).cached_tokens
    assert found == public // 4 * 4
    assert m.match([*range(10), 99], namespace="a", public=public).cached_tokens == 10


def test_readers_and_writers_with_different_public_parts_share_what_is_public_to_both() -> None:
    """Also where the newest child of a public block is private: it must not be followed."""
    for written, read in itertools.product(range(13), repeat=2):
        m = BlockManager(16, 4)
        remember(m, range(12), namespace="a", public=written)
        found = m.match([*range(12), 99], namespace="b", public=read).cached_tokens
        assert found == min(written // 4, read // 4) * 4, (written, read)


def test_a_public_tail_is_shared_when_its_whole_block_is_public() -> None:
    m = BlockManager(8, 4)
    seq = m.open(list(range(8)), namespace="a", public=8)
    m.reserve([seq], [6])
    m.commit([seq], [list(range(6))])
    m.close(seq)
    assert m.match(list(range(8)), namespace="b", public=8).cached_tokens == 6
    assert m.match(list(range(8)), namespace="b", public=7).cached_tokens == 4


def test_a_fork_has_the_same_public_part() -> None:
    m = BlockManager(8, 4)
    first = m.open(list(range(8)), namespace="a", public=8)
    (second,) = m.fork(first)
    m.close(first)
    m.reserve([second], [8])
    m.commit([second], [list(range(8))])
    m.close(second)
    assert m.match([*range(8), 9], namespace="b", public=8).cached_tokens == 8


def test_truncating_lowers_the_public_part() -> None:
    m = BlockManager(8, 4)
    seq = write(m, range(8), namespace="a", public=8)
    m.truncate(seq, 5)
    m.reserve([seq], [3])
    m.commit([seq], [[40, 41, 42]])  # private: its block starts below 5, ends above
    m.close(seq)
    secret = [0, 1, 2, 3, 4, 40, 41, 42, 9]
    assert m.match(secret, namespace="b", public=8).cached_tokens == 5
    assert m.match(secret, namespace="a", public=5).cached_tokens == 8


def test_an_evicted_parents_child_is_not_found_under_the_next_content_of_its_block() -> None:
    """B=2, P=2: the block of the parent is used again; its old child must not follow from it."""
    m = BlockManager(2, 2)
    remember(m, [1, 2, 3, 4])
    seq = write(m, [7, 8, 9, 9])
    m.close(seq)
    assert m.match([7, 8, 3, 4, 0]).cached_tokens == 2
    assert m.match([1, 2, 3, 4, 0]).cached_tokens == 0


def test_long_chains_are_followed_as_far_as_they_agree() -> None:
    m = BlockManager(400, 1)
    base = [i % 7 for i in range(300)]
    remember(m, base)
    for cut in (0, 1, 31, 32, 33, 34, 150, 299):
        assert m.match([*base[:cut], 99, 1, 2]).cached_tokens == cut
    remember(m, [*base[:40], *[8] * 60])  # the newest child of block 40 is now another one
    assert m.match([*base, 1]).cached_tokens == 300
    assert m.match([*base[:40], *[8] * 60, 1]).cached_tokens == 100
