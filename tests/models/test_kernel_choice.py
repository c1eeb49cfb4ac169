"""`kernels`: what computes the layers around attention."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from paged_driver import PagedDriver
from tiny_llm import save_tiny_llm

from pagedkv import LLM, SamplingParams
from pagedkv.errors import ConfigError
from pagedkv.models import Decoder, load_model, native
from pagedkv.models.packed import PackedMatrix

PROMPT = list(range(3, 40))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_llm(path)
    return path


def tensors(decoder: Decoder) -> Iterator[object]:
    weights = decoder.weights
    yield from (weights.embedding, weights.head)
    for layer in weights.layers:
        yield from (layer.qkv, layer.output, layer.gate, layer.up, layer.down)


def test_weights_are_held_as_the_kernels_read_them(folder: Path) -> None:
    """Plain for torch alone; packed for the native kernels, but an embedding that is no head."""
    plain = load_model(folder, kernels="torch").decoder
    assert all(isinstance(one, torch.Tensor) for one in tensors(plain))
    packed = load_model(folder, kernels="native").decoder
    assert packed.weights.embedding is not packed.weights.head
    assert all(isinstance(one, PackedMatrix) for one in list(tensors(packed))[1:])


@pytest.mark.parametrize("backend", ["native", "gather", "reference"])
def test_torch_computes_what_the_native_kernels_do(folder: Path, backend: str) -> None:
    want = PagedDriver(load_model(folder, kernels="native").decoder, 4, "native")
    got = PagedDriver(load_model(folder, kernels="torch").decoder, 4, backend)
    [native_logits], [logits] = want.step([(0, PROMPT)]), got.step([(0, PROMPT)])
    assert native_logits.abs().max() > 1
    torch.testing.assert_close(logits, native_logits, rtol=0, atol=1e-4)


def test_an_engine_says_what_computes(folder: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=6)
    texts = set()
    for kernels in ("auto", "native", "torch"):
        llm = LLM(folder, num_blocks=32, kernels=kernels)
        assert llm.report.linear_kernels.startswith("torch" if kernels == "torch" else "native (")
        texts.add(llm.generate("In the beginning", params)[0].outputs[0].text)
        llm.close()
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kernels": "fast"}, "kernels='fast': use one of auto, native, torch"),
        ({"kernels": "torch", "deterministic": True}, "set kernels='native', or deterministic"),
    ],
)
def test_what_cannot_be_is_refused_before_a_model_is_looked_for(
    settings: dict[str, object], message: str
) -> None:
    for start in (load_model, LLM):
        with pytest.raises(ConfigError, match=message):
            start("/no/such/model", **settings)


def test_native_kernels_that_are_not_built_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ImportError("no module named pagedkv._native")

    monkeypatch.setattr(native, "import_native", missing)
    with pytest.raises(ConfigError, match=r"kernels='native' needs the .* set kernels='torch'"):
        native.find_native("native")
    assert native.find_native() is native.find_native("torch") is None


def test_a_wrong_instruction_set_is_refused_before_a_model_is_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PAGEDKV_ISA", "avx1024")
    for start in (load_model, LLM):
        with pytest.raises(ConfigError, match="PAGEDKV_ISA='avx1024'"):
            start(
                "/no/such/model", **{} if start is load_model else {"attention_backend": "gather"}
            )
