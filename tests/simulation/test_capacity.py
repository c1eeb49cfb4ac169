"""The arithmetic of a pool, on the numbers of a 7-billion-parameter model in half precision."""

from __future__ import annotations

import pytest

from pagedkv.errors import ConfigError
from pagedkv.simulation.capacity import Capacity, ModelShape, Recovery

SHAPE = ModelShape(32, 32, 128, "float16")
POOL = Capacity(SHAPE, 40 * 2**30, 16, 2048, 200)


def test_reserved_against_paged() -> None:
    assert SHAPE.token_bytes == 512 * 1024
    assert POOL.reservation_bytes == 2**30
    assert POOL.num_blocks == 5120
    assert (POOL.resident_reserved, POOL.resident_paged) == (40, 393)
    assert POOL.reserved_waste == pytest.approx(1848 / 2048)


def test_tail_waste_is_the_mean_over_all_phases() -> None:
    assert POOL.tail_waste(1) == 0.0
    assert POOL.tail_waste(16) == pytest.approx(7.5 / 207.5)


def test_copying_beats_computing_above_the_crossover() -> None:
    tokens = 2048
    for ways in (1, 2):
        recovery = Recovery(SHAPE, 7e9, 4096, 1.5e14, 1e9, ways)
        link = recovery.crossover_link(tokens)
        at = Recovery(SHAPE, 7e9, 4096, 1.5e14, link, ways)
        assert at.swap_seconds(tokens) == pytest.approx(at.recompute_seconds(tokens))
        faster = Recovery(SHAPE, 7e9, 4096, 1.5e14, 2 * link, ways)
        assert faster.swap_seconds(tokens) < faster.recompute_seconds(tokens)


def test_small_pieces_make_copying_slow() -> None:
    # 2048 tokens of 512 KiB are 1 GiB: 128 blocks of 8 MiB, or 65,536 pieces of 16 KiB.
    plain = Recovery(SHAPE, 7e9, 4096, 1.5e14, 25e9)
    blocks = Recovery(SHAPE, 7e9, 4096, 1.5e14, 25e9, 1, 2**23, 5e-6)
    heads = Recovery(SHAPE, 7e9, 4096, 1.5e14, 25e9, 2, 2**14, 5e-6)
    seconds = plain.swap_seconds(2048)
    assert blocks.swap_seconds(2048) == pytest.approx(seconds + 128 * 5e-6)
    # 100 tokens of 512 KiB begin a seventh piece.
    assert blocks.swap_seconds(100) == pytest.approx(plain.swap_seconds(100) + 7 * 5e-6)
    assert heads.swap_seconds(2048) == pytest.approx(2 * (seconds + 65_536 * 5e-6))
    assert heads.crossover_link(2048) == float("inf")  # 0.33 s for the pieces of one direction
    at = Recovery(SHAPE, 7e9, 4096, 1.5e14, blocks.crossover_link(2048), 1, 2**23, 5e-6)
    assert at.swap_seconds(2048) == pytest.approx(at.recompute_seconds(2048))


def test_long_contexts_favour_copying() -> None:
    recovery = Recovery(SHAPE, 7e9, 4096, 1.5e14, 1e9)
    assert recovery.crossover_link(32_768) < recovery.crossover_link(128)
    # Computing n tokens: the matrices, and half of the n x n scores twice over (q k, then p v).
    assert recovery.recompute_seconds(10) == pytest.approx(
        10 * (14e9 + 2 * 32 * 4096 * 10) / 1.5e14
    )


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: ModelShape(0, 1, 1, "float16"), "layers=0"),
        (lambda: ModelShape(1, 1, 1, "int3"), "dtype='int3': use one of float32"),
        (lambda: Capacity(SHAPE, 2**20, 16, 2048, 200), "hold no block of 16 tokens"),
        (lambda: Capacity(SHAPE, 2**40, 16, 100, 200), "mean_tokens=200 pass the reservation"),
        (lambda: Capacity(SHAPE, 2**40, 0, 100, 20), "block_size=0"),
        (lambda: Recovery(SHAPE, 7e9, 4096, 0.0, 1e9), "flops=0.0"),
        (lambda: Recovery(SHAPE, float("nan"), 4096, 1.0, 1e9), "parameters=nan"),
        (lambda: Recovery(SHAPE, 7e9, 4096, 1.0, 1e9, 3), "ways=3"),
        (lambda: Recovery(SHAPE, 7e9, 4096, 1.0, 1e9, 1, 0.0), "piece_bytes=0.0"),
        (lambda: Recovery(SHAPE, 7e9, 4096, 1.0, 1e9, 1, 1.0, -1.0), "piece_seconds=-1.0"),
    ],
)
def test_impossible_numbers_are_refused(make: object, why: str) -> None:
    assert callable(make)
    with pytest.raises(ConfigError, match=why):
        make()
