"""Costs from published tables, against the formulas worked out by hand."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from pagedkv.errors import ConfigError
from pagedkv.scheduling.step import Step
from pagedkv.simulation.perf_tables import DistServeCost, SplitwiseCost, read_cost

DISTSERVE = """model,tp,phase,c0,c1,c2,large_small_bs_threshold
m,1,prefill,18,0.1,0.001,3
m,1,decoding_smallbs,20,0.01,0.5,3
m,1,decoding_largebs,7,0.02,1,3
m,2,prefill,9,0.05,0.0005,3
m,2,decoding_smallbs,10,0.005,0.25,3
m,2,decoding_largebs,4,0.01,0.5,3
"""
SPLITWISE = """\
model,hardware,tensor_parallel,prompt_size,batch_size,token_size,prompt_ms_median,token_ms_median,n
m,a,2,100,1,128,50,40,5
m,a,2,200,1,128,90,42,5
m,a,2,100,2,128,110,44,5
m,a,2,100,4,128,300,50,5
m,b,2,100,1,128,5,4,5
other,a,8,100,1,128,7,6,5
"""


def step(*rows: tuple[int, int]) -> Step:
    """Rows of (new tokens, context before them)."""
    counts = np.array([count for count, _ in rows], np.int32)
    total = int(counts.sum())
    none = np.zeros(0, np.int32)
    return Step(
        index=0,
        seqs=np.arange(len(rows)),
        table_rows=np.arange(len(rows), dtype=np.int32),
        query_lens=counts,
        context_lens=counts + np.array([prior for _, prior in rows], np.int32),
        tokens=np.zeros(total, np.int32),
        positions=np.zeros(total, np.int32),
        slots=np.zeros(total, np.int64),
        copies=np.zeros((0, 3), np.int32),
        changed_rows=none,
        changed_tables=np.zeros((0, 0), np.int32),
    )


@pytest.fixture
def distserve(tmp_path: Path) -> Path:
    path = tmp_path / "distserve.csv"
    path.write_text(DISTSERVE)
    return path


@pytest.fixture
def splitwise(tmp_path: Path) -> Path:
    path = tmp_path / "splitwise.csv"
    path.write_text(SPLITWISE)
    return path


@pytest.mark.parametrize(
    ("rows", "milliseconds"),
    [
        ([(10, 0), (20, 0)], 18 + 0.1 * 30 + 0.001 * (100 + 400)),
        ([(1, 99), (1, 49)], 20 + 0.01 * (100 + 50) + 0.5 * 2),  # below the threshold
        ([(1, 99)] * 3, 7 + 0.02 * 300 + 1 * 3),  # from it on
        ([(10, 0), (1, 99)], 20 + 0.1 * 10 + 0.001 * 100 + 0.01 * 100 + 0.5),  # one constant
        ([(10, 0), *[(1, 9)] * 3], 18 + 0.1 * 10 + 0.001 * 100 + 0.02 * 30 + 1 * 3),
    ],
)
def test_the_fits_of_distserve(
    distserve: Path, rows: list[tuple[int, int]], milliseconds: float
) -> None:
    cost = read_cost(distserve, "m", tensor_parallel=1)
    assert cost.seconds(step(*rows)) == pytest.approx(milliseconds / 1e3)


def test_chunks_of_a_prompt_add_up_to_the_whole(distserve: Path) -> None:
    cost = read_cost(distserve, "m", tensor_parallel=2)
    assert isinstance(cost, DistServeCost)
    chunks = cost.seconds(step((30, 0))) + cost.seconds(step((50, 30)))
    assert chunks - cost.prefill[0] == pytest.approx(cost.seconds(step((80, 0))))


@pytest.mark.parametrize(
    ("rows", "milliseconds"),
    [
        ([(100, 0)], 50),
        ([(150, 0)], 50 + (100 - 50) / 2),  # 200 tokens: the median of 90 and 110
        ([(50, 0), (250, 0)], 200),  # half way to 400
        ([(1, 7)], 41),  # batch 1: the median of 40 and 42
        ([(1, 7)] * 3, 47),
        ([(2, 0)], 50),  # below the smallest
        ([(800, 0)], 600),  # beyond the largest: at its rate
        ([(1, 7)] * 8, 100),
        ([(100, 0), *[(1, 7)] * 4], 50 + 50 - 41),  # mixed
        ([(100, 0), (1, 7)], 50),
        ([(100, 0), *[(1, 7)] * 40], 50 + 500 - 41),
    ],
)
def test_the_points_of_splitwise(
    splitwise: Path, rows: list[tuple[int, int]], milliseconds: float
) -> None:
    cost = read_cost(splitwise, "m", "a")
    assert cost.seconds(step(*rows)) == pytest.approx(milliseconds / 1e3)


def test_steps_outside_of_the_points_are_counted(splitwise: Path) -> None:
    cost = read_cost(splitwise, "m", "a", 2)
    assert isinstance(cost, SplitwiseCost)
    for rows in ([(100, 0)], [(400, 0)], [(1, 5)] * 4):
        cost.seconds(step(*rows))
    assert cost.steps_outside == 0
    for rows in ([(99, 0)], [(401, 0)], [(1, 5)] * 5, [(401, 0), *[(1, 5)] * 5]):
        cost.seconds(step(*rows))
    assert cost.steps_outside == 4


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (("x",), "model='x' is no entry of .*: give model, tp of m 1; m 2"),
        (("m",), "model='m' is more than one entry of .* m 1; m 2"),
        (("m", None, 4), "model='m', tp=4 is no entry"),
        (("m", "a100"), "hardware='a100': .* does not say which"),
    ],
)
def test_what_distserve_has_not(
    distserve: Path, args: tuple[str, str | None, int | None], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        read_cost(distserve, *args)


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (
            ("m",),
            "is more than one entry of .*: give model, hardware, tensor_parallel of m a 2; m b 2",
        ),
        (("m", "c"), "model='m', hardware='c' is no entry of .* m a 2; m b 2; other a 8"),
        (("m", "a", 8), "tensor_parallel=8 is no entry"),
    ],
)
def test_what_splitwise_has_not(
    splitwise: Path, args: tuple[str, str | None, int | None], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        read_cost(splitwise, *args)
    assert read_cost(splitwise, "other").seconds(step((100, 0))) == pytest.approx(0.007)


@pytest.mark.parametrize(
    ("table", "old", "new", "why"),
    [
        (DISTSERVE, "m,1,prefill,18", "m,1,prefill,x", "line 2: c0='x' is no number"),
        (DISTSERVE, "m,1,prefill,18", "m,1,prefill,-1", "line 2: c0='-1' must be finite"),
        (DISTSERVE, "m,1,prefill", "m,1,prefil", "line 2: phase='prefil' must be one of"),
        (DISTSERVE, "m,1,decoding_smallbs", "m,1,prefill", "line 3: phase='prefill' must be one"),
        (DISTSERVE, "m,1,prefill", "m,3,prefill", "no row of phase 'prefill'"),
        (DISTSERVE, ",c2,", ",c3,", "has no column 'c2'"),
    ],
)
def test_a_wrong_row_of_distserve_is_named(
    tmp_path: Path, table: str, old: str, new: str, why: str
) -> None:
    path = tmp_path / "table.csv"
    path.write_text(table.replace(old, new))
    with pytest.raises(ConfigError, match=why):
        read_cost(path, "m", tensor_parallel=1)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("m,a,2,200,1", "m,a,2,200,0", "line 3: batch_size='0' must be a whole number from 1"),
        ("m,a,2,200,1,128,90", "m,a,2,200,1,128,nan", "line 3: prompt_ms_median='nan'"),
        ("batch_size", "batch", "has no column 'batch_size'"),
    ],
)
def test_a_wrong_row_of_splitwise_is_named(tmp_path: Path, old: str, new: str, why: str) -> None:
    path = tmp_path / "table.csv"
    path.write_text(SPLITWISE.replace(old, new))
    with pytest.raises(ConfigError, match=why):
        read_cost(path, "m", "a")


TRACES = os.environ.get("PAGEDKV_TRACES")


@pytest.mark.skipif(TRACES is None, reason="no traces: set PAGEDKV_TRACES")
def test_the_published_tables() -> None:
    folder = Path(str(TRACES))
    opt = read_cost(folder / "perf_distserve_a100.csv", "facebook/opt-13b", tensor_parallel=1)
    assert opt.seconds(step((512, 0))) == pytest.approx(
        (18.102546 + 0.10191226 * 512 + 7.1222643e-06 * 512**2) / 1e3
    )
    llama = read_cost(folder / "perf_splitwise.csv", "llama2-70b", "a100-80gb", 4)
    assert llama.seconds(step((128, 0))) == pytest.approx(0.063654)
    assert llama.seconds(step(*[(1, 600)] * 64)) == pytest.approx(0.072947)
