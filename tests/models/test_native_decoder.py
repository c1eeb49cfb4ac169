"""The native decoder against the same weights layer by layer in torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagedkv.attention import AttentionBackend, AttentionBatch, make_backend
from pagedkv.attention.native import import_native
from pagedkv.models import Decoder, DecoderWeights, LayerWeights, ModelConfig, RopeConfig
from pagedkv.models.native_decoder import NativeDecoder
from pagedkv.models.packed import PackedMatrix

NATIVE = import_native()
VOCAB, TOKENS, BLOCK = 45, 21, 4
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
# Sizes that fill no vector, no panel and no step, with and without biases and norms of heads.
CONFIG = ModelConfig(
    model_type="llama",
    vocab_size=VOCAB,
    hidden_size=27,
    intermediate_size=37,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=10,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    rope=RopeConfig(10000.0),
    tie_word_embeddings=False,
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
    qk_norm=True,
    dtype=torch.float32,
)


def plain_weights(dtype: torch.dtype) -> DecoderWeights:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        scale = 1.5 / shape[-1] ** 0.5 if len(shape) == 2 else 1.0
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    hidden, inner, dim = CONFIG.hidden_size, CONFIG.intermediate_size, CONFIG.head_dim
    q_size, all_heads = CONFIG.num_heads * dim, (CONFIG.num_heads + 2 * CONFIG.num_kv_heads) * dim
    layers = tuple(
        LayerWeights(
            input_norm=random(hidden),
            qkv=random(all_heads, hidden),
            output=random(hidden, q_size),
            post_norm=random(hidden),
            gate=random(inner, hidden),
            up=random(inner, hidden),
            down=random(hidden, inner),
            qkv_bias=random(all_heads),
            output_bias=random(hidden),
            gate_bias=random(inner),
            up_bias=random(inner),
            down_bias=random(hidden),
            q_norm=random(dim),
            k_norm=random(dim),
        )
        for _ in range(CONFIG.num_layers)
    )
    return DecoderWeights(random(VOCAB, hidden), layers, random(hidden), random(VOCAB, hidden))


def packed(weights: DecoderWeights) -> DecoderWeights:
    def pack(value: Any) -> Any:
        matrix = isinstance(value, torch.Tensor) and value.ndim == 2
        return PackedMatrix.of(NATIVE, value) if matrix else value

    layers = tuple(
        replace(layer, **{f.name: pack(getattr(layer, f.name)) for f in fields(layer)})
        for layer in weights.layers
    )
    return replace(weights, layers=layers, head=pack(weights.head))


def without(weights: DecoderWeights, *names: str) -> DecoderWeights:
    layers = tuple(replace(layer, **dict.fromkeys(names)) for layer in weights.layers)
    return replace(weights, layers=layers)


def logits_of(decoder: Decoder, tokens: list[int], name: str, chunk: int = TOKENS) -> torch.Tensor:
    """Logits of every token of one sequence, fed in chunks."""
    spec = decoder.config.kv_spec(-(-len(tokens) // BLOCK), BLOCK, decoder.dtype)
    backend: AttentionBackend = make_backend(name, spec)
    table = np.arange(1, spec.num_blocks + 1, dtype=np.int32)[None]
    parts = []
    best = torch.empty(len(tokens), dtype=torch.int64)
    for start in range(0, len(tokens), chunk):
        positions = np.arange(start, min(start + chunk, len(tokens)))
        batch = AttentionBatch(
            np.array([len(positions)], np.int32),
            np.array([positions[-1] + 1], np.int32),
            table,
            positions.astype(np.int64) + BLOCK,
        )
        parts.append(
            decoder.forward(
                torch.tensor(tokens)[positions],
                torch.from_numpy(positions),
                backend,
                backend.plan(batch),
                torch.arange(len(positions)),
                best=best[start:],
            )
        )
    logits = torch.cat(parts)
    assert best.tolist() == logits.numpy().argmax(axis=1).tolist()
    return logits


def some_tokens(count: int = TOKENS) -> list[int]:
    return np.random.default_rng(1).integers(0, VOCAB, count).tolist()


# As many as several threads are worth waking for.
MANY = 64


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "left_out",
    [(), ("qkv_bias", "gate_bias", "q_norm", "k_norm"), ("output_bias", "up_bias", "down_bias")],
)
def test_float32_equals_the_layers_in_torch(left_out: tuple[str, ...]) -> None:
    plain = without(plain_weights(torch.float32), *left_out)
    want = logits_of(Decoder(CONFIG, plain), some_tokens(), "reference")
    got = logits_of(Decoder(CONFIG, packed(plain)), some_tokens(), "native")
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_bfloat16_is_nearer_to_float32_than_the_layers_in_torch() -> None:
    plain = plain_weights(torch.bfloat16)
    exact = [
        replace(layer, **{f.name: getattr(layer, f.name).float() for f in fields(layer)})
        for layer in plain.layers
    ]
    wide = DecoderWeights(
        plain.embedding.float(), tuple(exact), plain.norm.float(), plain.head.float()
    )
    want = logits_of(Decoder(CONFIG, wide), some_tokens(), "reference")
    in_torch = logits_of(Decoder(CONFIG, plain), some_tokens(), "reference")
    got = logits_of(Decoder(CONFIG, packed(plain)), some_tokens(), "native")
    assert (got - want).pow(2).mean() < (in_torch - want).pow(2).mean()


@DTYPES
def test_bits_do_not_depend_on_the_chunks(dtype: torch.dtype) -> None:
    """1 to 4 tokens are normalised by every thread for itself, more of them in common."""
    decoder = Decoder(CONFIG, packed(plain_weights(dtype)))
    whole = logits_of(decoder, some_tokens(), "native")
    for chunk in (1, 3, 4, 5, 20):
        assert torch.equal(logits_of(decoder, some_tokens(), "native", chunk), whole), chunk


@DTYPES
def test_bits_do_not_depend_on_the_threads(dtype: torch.dtype, three_threads: None) -> None:
    decoder = Decoder(CONFIG, packed(plain_weights(dtype)))
    together = logits_of(decoder, some_tokens(MANY), "native", MANY)
    torch.set_num_threads(1)
    assert torch.equal(logits_of(decoder, some_tokens(MANY), "native", MANY), together)


def test_threads_that_are_not_granted_are_not_waited_for() -> None:
    code = """
from test_native_decoder import *
torch.set_num_threads(3)
decoder = Decoder(CONFIG, packed(plain_weights(torch.float32)))
print(len(logits_of(decoder, some_tokens(MANY), "native", MANY)))
"""
    folder = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": folder, "OMP_THREAD_LIMIT": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(MANY)


@DTYPES
def test_nan_in_a_token_reaches_no_earlier_one(dtype: torch.dtype) -> None:
    plain = plain_weights(dtype)
    want = logits_of(Decoder(CONFIG, packed(plain)), some_tokens(), "native")
    tokens = some_tokens()
    bad = next(i for i in range(3, TOKENS) if tokens[i] not in tokens[:i])
    plain.embedding[tokens[bad]] = float("nan")
    got = logits_of(Decoder(CONFIG, packed(plain)), tokens, "native")
    assert torch.equal(got[:bad], want[:bad])
    assert got[bad].isnan().all()


@pytest.mark.parametrize("isa", NATIVE.available_isas())
def test_the_best_is_the_first_of_equals_and_nan_above_all(
    isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`logits_of` compares it with numpy's."""
    monkeypatch.setenv("PAGEDKV_ISA", isa)
    plain = plain_weights(torch.float32)
    plain.head[VOCAB // 2 + 1 :] = plain.head[: VOCAB // 2].clone()
    logits = logits_of(Decoder(CONFIG, packed(plain)), some_tokens(), "native")
    assert ((logits == logits.max(dim=1, keepdim=True).values).sum(dim=1) == 2).any()
    plain.head[:] = plain.head[:1].clone()
    logits_of(Decoder(CONFIG, packed(plain)), some_tokens(), "native")
    plain.head[VOCAB - 1, 0] = -float("inf")
    logits_of(Decoder(CONFIG, packed(plain)), some_tokens(), "native")
    plain.head[[20, VOCAB - 2], 0] = float("nan")
    logits_of(Decoder(CONFIG, packed(plain)), some_tokens(), "native")


def test_rows_may_be_any_view() -> None:
    """And any number of them: none, or one repeatedly."""
    decoder = Decoder(CONFIG, packed(plain_weights(torch.float32)))
    inner = make_backend("native", CONFIG.kv_spec(1, BLOCK, torch.float32))
    lens, slots = np.array([4], np.int32), np.arange(4) + BLOCK
    batch = AttentionBatch(lens, lens, np.array([[1]], np.int32), slots)

    def logits(rows: torch.Tensor) -> torch.Tensor:
        four = torch.arange(4)
        return decoder.forward(four, four, inner, inner.plan(batch), rows)

    every = logits(torch.arange(4))
    for rows in (torch.arange(4)[::2], torch.tensor([2]).expand(9), torch.arange(0)):
        assert torch.equal(logits(rows), every[rows])


def test_every_layer_is_shown_what_attention_was_given_and_gave() -> None:
    plain = plain_weights(torch.float32)
    decoder = Decoder(CONFIG, packed(plain))
    spec = CONFIG.kv_spec(2, BLOCK, torch.float32)
    inner, check = make_backend("native", spec), make_backend("reference", spec)
    batch = AttentionBatch(
        np.array([3], np.int32),
        np.array([3], np.int32),
        np.array([[1]], np.int32),
        np.array([4, 5, 6]),
    )
    seen = []

    class Watching:
        def native_step(self, plan: Any) -> Any:
            return replace(inner.native_step(plan), after_layer=after_layer)

    def after_layer(layer: int, q: Any, k: Any, v: Any, out: torch.Tensor) -> None:
        want = check.run(check.plan(batch), layer, q, k, v)
        torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)
        seen.append(layer)

    rows = torch.arange(3)
    arguments: Any = (rows, rows, Watching(), inner.plan(batch), rows)
    decoder.forward(*arguments)
    assert seen == [0, 1]


@pytest.mark.parametrize("count", [1, MANY])
def test_what_is_raised_after_a_layer_ends_the_step_and_the_next_one_works(
    count: int, three_threads: None
) -> None:
    decoder = Decoder(CONFIG, packed(plain_weights(torch.float32)))
    want = logits_of(decoder, [1, 2, 3], "native")
    blocks = MANY // BLOCK
    inner = make_backend("native", CONFIG.kv_spec(blocks, BLOCK, torch.float32))
    batch = AttentionBatch(
        np.array([count], np.int32),
        np.array([count], np.int32),
        np.arange(1, blocks + 1, dtype=np.int32)[None],
        np.arange(count) + BLOCK,
    )

    class Failing:
        def native_step(self, plan: Any) -> Any:
            return replace(inner.native_step(plan), after_layer=after_layer)

    def after_layer(layer: int, *_: Any) -> None:
        raise LookupError(f"layer {layer}")

    rows = torch.arange(count)
    arguments: Any = (rows % VOCAB, rows, Failing(), inner.plan(batch), rows)
    with pytest.raises(LookupError, match="layer 0"):
        decoder.forward(*arguments)
    assert torch.equal(logits_of(decoder, [1, 2, 3], "native"), want)


def test_a_store_of_another_model_and_matrices_that_do_not_fit_are_refused() -> None:
    weights = packed(plain_weights(torch.float32))
    decoder = Decoder(CONFIG, weights)
    other = replace(CONFIG, num_heads=4)
    backend = make_backend("native", other.kv_spec(1, BLOCK, torch.float32))
    batch = AttentionBatch(
        np.array([1], np.int32), np.array([1], np.int32), np.array([[1]], np.int32), np.array([4])
    )
    one = torch.tensor([0])
    with pytest.raises(ValueError, match="the store has other layers"):
        decoder.forward(one, one, backend, backend.plan(batch), one)
    with pytest.raises(ValueError, match=r"qkv must be \[80, 27\]"):
        NativeDecoder(other, weights)
