"""The log of what the prefix cache publishes and withdraws: a mirror of it equals the index."""

from __future__ import annotations

import numpy as np
import pytest

from pagedkv.cache import BlockManager, EventGap
from pagedkv.cache.events import Cleared, Event, Published, Withdrawn
from pagedkv.cache.index import make_frames, tokens_of

BLOCK = 2


def remember(m: BlockManager, tokens: list[int], **names: object) -> None:
    """Computes a prompt and lets it stay in the cache."""
    seq = m.open(tokens, **names)
    rest = tokens[m.length(seq) :]
    m.reserve([seq], [len(rest)])
    m.commit([seq], [rest])
    m.close(seq)


class Mirror:
    """What a reader believes to be in the index: serials, and what each stands for."""

    def __init__(self, m: BlockManager) -> None:
        self.log = m.listen()
        self.at, published = self.log.picture()
        self.nodes: dict[int, Published] = {}
        self.take(list(published))

    def take(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case Published(serial, parent):
                    assert parent == 0 or parent in self.nodes, "a parent that was never reported"
                    assert serial not in self.nodes
                    self.nodes[serial] = event
                case Withdrawn(serial):
                    del self.nodes[serial]
                case Cleared():
                    self.nodes.clear()

    def follow(self) -> None:
        events = self.log.since(self.at)
        self.at += len(events)
        self.take(events)

    def prompts(self) -> set[tuple[bytes, tuple[int, ...]]]:
        """(frame, all tokens of its prefix) of each node."""

        def tokens(serial: int) -> tuple[int, ...]:
            node = self.nodes[serial]
            before = tokens(node.parent) if node.parent else ()
            return before + tuple(tokens_of(node.tokens).tolist())

        return {(self.nodes[serial].frame, tokens(serial)) for serial in self.nodes}


def test_parent_a_hit_is_named_as_the_parent_of_what_follows_it() -> None:
    m = BlockManager(8, BLOCK)
    mirror = Mirror(m)
    remember(m, [1, 2, 3, 4])
    mirror.follow()
    at = mirror.at
    remember(m, [1, 2, 3, 4, 5, 6])
    (event,) = m.listen().since(at)
    assert isinstance(event, Published)
    assert tokens_of(event.tokens).tolist() == [5, 6]
    assert mirror.nodes[event.parent].tokens == mirror.log.picture().published[1].tokens


def test_nothing_is_logged_before_somebody_listens() -> None:
    m = BlockManager(8, BLOCK)
    remember(m, [1, 2, 3, 4])
    log = m.listen()
    assert log.next_seq == 0
    assert log.picture().next_seq == 0
    assert len(log.picture().published) == 2
    assert m.listen() is log


def test_a_tail_is_told_with_what_is_filled_and_withdrawn_before_it_is_written() -> None:
    m = BlockManager(8, 4)
    mirror = Mirror(m)
    remember(m, [1, 2, 3, 4, 5, 6])
    mirror.follow()
    frame = make_frames(None, None).private
    assert mirror.prompts() == {(frame, (1, 2, 3, 4)), (frame, (1, 2, 3, 4, 5, 6))}
    seq = m.open([1, 2, 3, 4, 5, 6, 7])
    m.reserve([seq], [1])
    mirror.follow()
    assert mirror.prompts() == {(frame, (1, 2, 3, 4))}
    m.close(seq)


def test_a_reset_is_one_event() -> None:
    m = BlockManager(8, BLOCK)
    log = m.listen()
    remember(m, [1, 2, 3, 4])
    m.reset_cache()
    assert [type(event) for event in log.since(0)] == [Published, Published, Cleared]


def test_gap_a_reader_that_waited_too_long_is_told_and_starts_again() -> None:
    m = BlockManager(64, BLOCK)
    log = m.listen(capacity=8)
    for i in range(40):
        remember(m, [i, i])
    with pytest.raises(EventGap) as info:
        log.since(0)
    assert info.value.first > 0
    assert len(log.since(info.value.first)) >= 8
    at, published = log.picture()
    assert at == log.next_seq
    assert len(published) == 40
    assert log.since(at) == []
    with pytest.raises(ValueError, match="seq=41"):
        log.since(41)


@pytest.mark.parametrize("seed", range(4))
def test_mirror_whatever_happens_a_mirror_equals_the_index(seed: int) -> None:
    rng = np.random.default_rng(seed)
    m = BlockManager(24, BLOCK, max_seqs=8)
    mirror = Mirror(m)
    open_: list[int] = []
    for _ in range(300):
        act = rng.integers(8)
        if act < 4 and len(open_) < 6:
            tokens = rng.integers(0, 2, rng.integers(1, 12)).tolist()
            tenant = "ab"[rng.integers(2)]
            seq = m.open(tokens, namespace=tenant, public=int(rng.integers(len(tokens) + 1)))
            rest = tokens[m.length(seq) :]
            if m.can_reserve([seq], [len(rest)]):
                m.reserve([seq], [len(rest)])
                m.commit([seq], [rest])
                open_.append(seq)
            else:
                m.close(seq)
        elif act < 6 and open_:
            m.close(open_.pop(int(rng.integers(len(open_)))))
        elif act == 6:
            m.evict(int(rng.integers(4)))
        elif rng.integers(10) == 0:
            m.reset_cache()
        mirror.follow()
        assert set(mirror.nodes) == {serial for serial in m.index.serials if serial}
        assert mirror.nodes == {p.serial: p for p in mirror.log.picture().published}
    for seq in open_:
        m.close(seq)
