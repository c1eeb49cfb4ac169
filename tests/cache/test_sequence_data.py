"""A sequence carried to another manager: by name, whatever its block size."""

import pytest
from cache_helpers import close_all, refused, remember, write

from pagedkv.cache import BlockManager, OutOfBlocks, OutOfSequences


def arrive(m: BlockManager, data: bytes) -> int:
    """Imports and commits what had to be transferred."""
    seq, reservation, tokens = m.import_sequence(data)
    assert len(reservation.slots) == len(tokens)
    m.commit([seq], [tokens])
    return seq


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 16])
def test_a_sequence_arrives_at_any_block_size(size: int) -> None:
    source, target = BlockManager(16, 4), BlockManager(32, size)
    sent = write(source, range(10), namespace=b"t\xff", extra=b"e", public=5)
    data = source.export_sequence(sent)
    seq = arrive(target, data)
    target.check()
    assert target.length(seq) == 10 and target.cached_tokens(seq) == 0
    target.close(seq)
    name = {"namespace": b"t\xff", "extra": b"e", "public": 5}
    assert target.match([*range(10), 99], **name).cached_tokens == 10
    assert target.match([*range(10), 99]).cached_tokens == 0
    source.close(sent)


def test_what_the_receiver_has_is_not_sent_again() -> None:
    source, target = BlockManager(8, 4), BlockManager(8, 4)
    sent = write(source, range(10))
    remember(target, range(6))
    seq, reservation, tokens = target.import_sequence(source.export_sequence(sent))
    assert tokens.tolist() == [6, 7, 8, 9]
    assert len(reservation.slots) == 4 and target.cached_tokens(seq) == 6
    target.cancel([seq])
    close_all(target, seq)
    source.close(sent)


def test_the_next_token_of_the_sender_is_published_under_the_same_name() -> None:
    """The public part may pass what was committed when the sequence left."""
    source, target = BlockManager(8, 4), BlockManager(8, 4)
    sent = source.open(list(range(12)), namespace="a", public=8)
    source.reserve([sent], [6])
    source.commit([sent], [list(range(6))])
    seq = arrive(target, source.export_sequence(sent))
    for m, s in ((source, sent), (target, seq)):
        m.reserve([s], [2])
        m.commit([s], [[6, 7]])
        assert m.match([*range(8), 99], namespace="b", public=8).cached_tokens == 8
        m.close(s)


def test_an_empty_sequence_travels_too() -> None:
    source, target = BlockManager(2, 4), BlockManager(2, 4)
    sent = source.open()
    seq = arrive(target, source.export_sequence(sent))
    assert target.length(seq) == 0
    source.close(sent)
    target.close(seq)


def test_a_receiver_without_room_refuses_and_keeps_its_state() -> None:
    source = BlockManager(8, 2, max_seqs=2)
    sent = write(source, range(9))
    data = source.export_sequence(sent)
    small = BlockManager(4, 2)
    with refused(small, OutOfBlocks, "5 blocks needed, 4 free"):
        small.import_sequence(data)
    narrow = BlockManager(8, 2, max_blocks_per_seq=4)
    with refused(narrow, ValueError, "max_blocks_per_seq=4"):
        narrow.import_sequence(data)
    full = BlockManager(8, 2, max_seqs=1)
    other = full.open()
    with refused(full, OutOfSequences, "max_seqs=1"):
        full.import_sequence(data)
    full.close(other)
    source.close(sent)


def test_damaged_or_foreign_data_is_refused() -> None:
    m = BlockManager(8, 2)
    seq = write(m, range(5))
    data = m.export_sequence(seq)
    for bad in (data[:-1], data[:20], b"", m.snapshot(), data[:-1] + b"\xff"):
        with refused(m, ValueError, "record"):
            m.import_sequence(bad)
    m.reserve([seq], [1])
    with refused(m, ValueError, "open reservation"):
        m.export_sequence(seq)
    m.close(seq)


def test_a_long_sequence_costs_its_ids_and_little_more() -> None:
    m = BlockManager(120, 16)
    seq = write(m, range(1900))
    assert len(m.export_sequence(seq)) < 4 * (1900 + 119) + 300
    m.close(seq)
