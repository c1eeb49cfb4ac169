"""Bad input is answered with the value that is wrong, before anything is written."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tables import Case, Rows, lay_out, spec_of

from pagedkv.attention import AttentionBatch, backends, choose_backend, make_backend
from pagedkv.errors import ConfigError

BACKENDS = ["reference", "gather", "native"]


@pytest.fixture
def case() -> Case:
    """Lengths 5 and 9 in blocks of 4, pool of 8, one new token and three."""
    return lay_out(Rows.random([5, 9], 4, 2, 8, torch.float32), [1, 3], 4)


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    ("change", "value"),
    [
        ({"query_lens": int32(0, 3)}, "query_lens[0]=0"),
        ({"query_lens": int32(1, -3)}, "query_lens[1]=-3"),
        ({"context_lens": int32(5, 2)}, "context_lens[1]=2"),
        ({"context_lens": int32(5, 21)}, "context_lens[1]=21"),  # wider than the table
        ({"context_lens": int32(5)}, "(1,)"),
        ({"slots": np.arange(3, dtype=np.int64)}, "(3,)"),
        ({"slots": np.array([4, 5, 6, 3])}, "slots[3]=3"),  # in the null block
        ({"slots": np.array([4, 5, 36, 6])}, "slots[2]=36"),  # one past the pool
        ({"tables": np.zeros(3, np.int32)}, "(3,)"),
        ({"slots": np.array([4.5, 5, 6, 7])}, "slots must be integers"),
        ({"context_lens": np.array([5, 2**32 + 9])}, "context_lens must be integers"),  # wraps to 9
    ],
)
def test_impossible_batch_is_refused(
    name: str, case: Case, change: dict[str, Any], value: str
) -> None:
    backend = make_backend(name, case.spec)
    with pytest.raises(ValueError) as refusal:
        backend.plan(replace(case.batch, **change))
    assert value in str(refusal.value)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("block", [0, -1, 9])
def test_block_id_outside_the_pool_is_refused_where_it_is_used(
    name: str, case: Case, block: int
) -> None:
    backend = make_backend(name, case.spec)
    tables = case.batch.tables.copy()
    tables[0, 1] = block
    with pytest.raises(ValueError, match=rf"tables\[0, 1\]={block}"):
        backend.plan(replace(case.batch, tables=tables))
    tables = case.batch.tables.copy()
    tables[0, 2:] = block  # beyond the row's two blocks: not read
    backend.plan(replace(case.batch, tables=tables))


@pytest.mark.parametrize("name", BACKENDS)
def test_context_longer_than_its_last_block_is_refused(name: str) -> None:
    """last_page_len > page_size is accepted silently (flashinfer#725, #320)."""
    case = lay_out(Rows.random([16], 2, 1, 8, torch.float32), [1], 16, extra_width=0)
    backend = make_backend(name, case.spec)
    with pytest.raises(ValueError, match=r"context_lens\[0\]=17 needs 2 blocks"):
        backend.plan(replace(case.batch, context_lens=int32(17)))


@pytest.mark.parametrize("name", BACKENDS)
def test_tensors_that_are_not_the_plans_are_refused(name: str, case: Case) -> None:
    backend = make_backend(name, case.spec)
    plan = backend.plan(case.batch)
    q, k, v = case.q, case.k, case.v
    wrong: list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor, str]] = [
        (1, q, k, v, "layer=1"),
        (-1, q, k, v, "layer=-1"),
        (0, q[:3], k, v, "q has shape"),
        (0, q, k[:, :1], v, "k has shape"),
        (0, q, k, v[..., :4], "v has shape"),
        (0, q.double(), k, v, "q is torch.float64"),
    ]
    for layer, q, k, v, message in wrong:
        with pytest.raises(ValueError) as refusal:
            backend.run(plan, layer, q, k, v)
        assert message in str(refusal.value)
    assert not backend.read_blocks(np.arange(1, 9, dtype=np.int32)).any()


@pytest.mark.parametrize(
    ("name", "other"), list(zip(BACKENDS, ["gather", "native", "reference"], strict=True))
)
def test_plan_of_another_backend_is_refused(name: str, other: str, case: Case) -> None:
    plan = make_backend(other, case.spec).plan(case.batch)
    with pytest.raises(ValueError, match="another backend"):
        make_backend(name, case.spec).run(plan, 0, case.q, case.k, case.v)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("head_dim", 257),
        ("head_dim", 0),
        ("block_size", 0),
        ("num_blocks", 0),
        ("num_heads", 3),
        ("dtype", torch.float16),
    ],
)
def test_store_that_cannot_be_is_refused(name: str, field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=str(value)):
        make_backend(name, replace(spec_of(heads=4, kv_heads=2), **{field: value}))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("scale", [0.0, -0.5, 1e-50, 1e50, float("nan"), float("inf")])
def test_a_scale_that_float32_lacks_or_that_turns_scores_round_is_refused(
    name: str, scale: float, case: Case
) -> None:
    with pytest.raises(ConfigError, match=f"scale={re.escape(repr(scale))}"):
        make_backend(name, case.spec, scale=scale)


def test_deterministic_gather_is_refused() -> None:
    with pytest.raises(ConfigError, match="deterministic=True needs the native backend"):
        make_backend("gather", spec_of(), deterministic=True)
    make_backend("native", spec_of(), deterministic=True)


def test_unknown_backend_and_unknown_isa_are_refused() -> None:
    with pytest.raises(ConfigError, match="'flash'"):
        make_backend("flash", spec_of())
    with pytest.raises(ConfigError, match="'sse9'"):
        make_backend("native", spec_of(), isa="sse9")
    with pytest.raises(ConfigError, match="native backend only"):
        make_backend("gather", spec_of(), isa="scalar")


def test_auto_says_which_backend_it_took_and_why() -> None:
    name, reason = choose_backend("auto")
    assert name == "native"
    assert "native" in reason and "\n" not in reason
    assert make_backend("auto", spec_of()).name == "native"


def test_missing_extension_is_never_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ImportError("No module named 'pagedkv._native'")

    monkeypatch.setattr(backends, "import_native", missing)
    name, reason = choose_backend("auto")
    assert name == "gather"
    assert "No module named" in reason and "\n" not in reason
    with pytest.raises(ConfigError, match=r"No module named .*compiler"):
        make_backend("native", spec_of())
    with pytest.raises(ConfigError, match="deterministic=True"):
        make_backend("auto", spec_of(), deterministic=True)


@pytest.mark.parametrize("name", BACKENDS)
def test_plan_of_another_pool_is_refused(name: str, case: Case) -> None:
    """Its block ids may lie outside this pool, and kernels check none."""
    larger = replace(case.spec, num_blocks=800)
    batch = AttentionBatch(int32(1), int32(1), int32(700)[None], np.array([2800]))
    plan = make_backend(name, larger).plan(batch)
    q = torch.zeros(1, larger.num_heads, larger.head_dim)
    kv = torch.zeros(1, larger.num_kv_heads, larger.head_dim)
    with pytest.raises(ValueError, match="another backend"):
        make_backend(name, case.spec).run(plan, 0, q, kv, kv)
