"""The size of the pool and the figures that a start-up prints."""

from __future__ import annotations

import pytest

from pagedkv.engine.machine import MachineMemory
from pagedkv.engine.memory import KV_SHARE, SMALL_PAGES, StartupReport, pool_blocks, show_bytes
from pagedkv.errors import ConfigError

BLOCK = 1000
MEMORY = MachineMemory(limit=200 * BLOCK, available=100 * BLOCK)


def test_default_is_the_stated_share_less_the_null_block() -> None:
    assert pool_blocks(BLOCK, MEMORY) == int(100 * KV_SHARE) - 1


def test_engines_of_one_machine_divide_the_share() -> None:
    assert pool_blocks(BLOCK, MEMORY, engines=4) == int(100 * KV_SHARE / 4) - 1
    assert pool_blocks(BLOCK, MEMORY, num_blocks=99, engines=4) == 99


def test_what_is_asked_for_is_given() -> None:
    assert pool_blocks(BLOCK, MEMORY, num_blocks=99) == 99
    assert pool_blocks(BLOCK, MEMORY, kv_cache_memory=100 * BLOCK) == 99
    assert pool_blocks(BLOCK, MEMORY, kv_cache_memory=10 * BLOCK + 999) == 9
    assert pool_blocks(BLOCK, MEMORY, kv_cache_memory=2 * BLOCK) == 1


@pytest.mark.parametrize("kwargs", [{"num_blocks": 100}, {"kv_cache_memory": 150 * BLOCK}])
def test_pool_larger_than_memory_is_refused_with_numbers(kwargs: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"97\.7 KiB of 195\.3 KiB are available.*num_blocks=99"):
        pool_blocks(BLOCK, MEMORY, **kwargs)


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        ({"num_blocks": 0}, "num_blocks=0"),
        ({"num_blocks": -3}, "num_blocks=-3"),
        ({"kv_cache_memory": 2 * BLOCK - 1}, "kv_cache_memory=1999 .* 2000 bytes"),
        ({"kv_cache_memory": -1}, "kv_cache_memory=-1"),
        ({"num_blocks": 4, "kv_cache_memory": 4000}, "twice"),
    ],
)
def test_settings_that_cannot_work_are_named(kwargs: dict[str, int], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        pool_blocks(BLOCK, MEMORY, **kwargs)


def test_no_memory_left_for_even_one_block() -> None:
    with pytest.raises(ConfigError, match="hold no pool"):
        pool_blocks(BLOCK, MachineMemory(limit=200 * BLOCK, available=BLOCK))


def report(
    num_blocks: int,
    max_model_len: int = 100,
    max_num_seqs: int = 256,
    huge_pages: str | None = "madvise",
) -> StartupReport:
    return StartupReport(
        model="m",
        dtype="float32",
        bytes_per_token=64,
        block_size=16,
        num_blocks=num_blocks,
        block_bytes=1024,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        memory=MEMORY,
        num_threads=2,
        backend="reference",
        backend_reason="attention backend reference: asked for",
        linear_kernels="torch",
        sanitize=False,
        huge_pages=huge_pages,
    )


@pytest.mark.parametrize(
    ("num_blocks", "max_num_seqs", "longest", "concurrency"),
    [(7, 256, 100, 1), (13, 256, 100, 1), (14, 256, 100, 2), (3, 256, 48, 1), (700, 9, 100, 9)],
)
def test_longest_context_times_concurrency(
    num_blocks: int, max_num_seqs: int, longest: int, concurrency: int
) -> None:
    figures = report(num_blocks, max_num_seqs=max_num_seqs)
    assert (figures.longest_context, figures.concurrency) == (longest, concurrency)


def test_report_says_what_was_chosen_and_why() -> None:
    text = "\n".join(report(14).lines())
    for part in ("64 bytes a token", "14 blocks of 16", "100 tokens x 2", "reference: asked for"):
        assert part in text


@pytest.mark.parametrize(("mode", "small"), [("always", False), ("never", True), (None, True)])
def test_report_says_where_huge_pages_are_refused(mode: str | None, small: bool) -> None:
    assert (SMALL_PAGES in report(14, huge_pages=mode).lines()) == small


def test_sizes_are_readable() -> None:
    assert [show_bytes(n) for n in (0, 1023, 1536, 3 * 1024**3)] == [
        "0 bytes",
        "1023 bytes",
        "1.5 KiB",
        "3.0 GiB",
    ]
