"""Reading safetensors: every damage is named by file and tensor."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from pagedkv.attention.native import import_native
from pagedkv.errors import ModelError
from pagedkv.models import ModelConfig
from pagedkv.models.linear import Matrix, embed
from pagedkv.models.packed import PackedMatrix
from pagedkv.models.weights import load_weights

Q0 = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folder of a tiny untied Llama and its tensors by name."""
    folder = tmp_path_factory.mktemp("saved")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=11,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder, load_file(folder / "model.safetensors")


@pytest.fixture
def write(saved, tmp_path):
    """Writes tensors (and changes to the config) as a model folder."""
    folder, _ = saved

    def write(tensors, **changes):
        raw = json.loads((folder / "config.json").read_text()) | changes
        (tmp_path / "config.json").write_text(json.dumps(raw))
        save_file(tensors, tmp_path / "model.safetensors")
        return tmp_path

    return write


def load(folder, dtype=torch.float32, native=None, memory=None):
    return load_weights(folder, ModelConfig.from_folder(folder), dtype, native, memory)


def shard(folder, tensors, split: int = 7):
    """Two shards and an index, as transformers writes large models."""
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[:split], names[split:]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def rows_of(matrix: Matrix) -> torch.Tensor:
    return embed(matrix, torch.arange(matrix.shape[0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("native", [None, import_native()], ids=["plain", "packed"])
def test_every_tensor_lands_in_its_place(saved, dtype, native) -> None:
    folder, tensors = saved
    weights = load(folder, dtype, native)
    layer = weights.layers[1]
    for stacked, parts in (
        (layer.qkv, [f"self_attn.{part}_proj" for part in "qkv"]),
        (layer.output, ["self_attn.o_proj"]),
        (layer.gate, ["mlp.gate_proj"]),
        (layer.up, ["mlp.up_proj"]),
        (layer.down, ["mlp.down_proj"]),
    ):
        want = torch.cat([tensors[f"model.layers.1.{part}.weight"] for part in parts])
        assert isinstance(stacked, torch.Tensor if native is None else PackedMatrix)
        assert torch.equal(rows_of(stacked), want.to(dtype))
    assert torch.equal(rows_of(weights.head), tensors["lm_head.weight"].to(dtype))
    assert torch.equal(weights.embedding, tensors["model.embed_tokens.weight"].to(dtype))


def test_shards_and_a_single_file_give_the_same_weights(saved, write) -> None:
    _, tensors = saved
    folder = write(tensors)
    whole = load(folder)
    shard(folder, tensors)
    parts = load(folder)
    assert torch.equal(whole.layers[0].qkv, parts.layers[0].qkv)
    assert torch.equal(whole.layers[1].down, parts.layers[1].down)


def test_a_missing_tensor_is_named(saved, write) -> None:
    _, tensors = saved
    folder = write({name: t for name, t in tensors.items() if name != Q0})
    with pytest.raises(ModelError, match=Q0):
        load(folder)


def test_a_tensor_that_its_shard_lacks_is_named_with_the_file(saved, write) -> None:
    _, tensors = saved
    folder = write(tensors)
    file = shard(folder, tensors)[Q0]
    save_file(
        {name: t for name, t in load_file(folder / file).items() if name != Q0}, folder / file
    )
    with pytest.raises(ModelError, match=f"{file}.*{Q0}"):
        load(folder)


def test_a_missing_shard_is_named(saved, write) -> None:
    _, tensors = saved
    folder = write(tensors)
    file = shard(folder, tensors)[Q0]
    (folder / file).unlink()
    with pytest.raises(ModelError, match=file):
        load(folder)


def test_a_shard_outside_the_folder_is_refused(saved, write) -> None:
    _, tensors = saved
    folder = write(tensors)
    index = {"weight_map": {Q0: "../other.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="other"):
        load(folder)


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": {Q0: 3}}])
def test_a_useless_index_is_named(saved, write, index) -> None:
    _, tensors = saved
    folder = write(tensors)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"index\.json"):
        load(folder)


def test_a_tensor_in_two_shards_is_named(saved, write) -> None:
    _, tensors = saved
    folder = write(tensors)
    files = sorted(set(shard(folder, tensors).values()))
    for file in files:
        save_file(load_file(folder / file) | {Q0: tensors[Q0]}, folder / file)
    with pytest.raises(ModelError, match=f"{Q0}.*again"):
        load(folder)


def test_an_unexpected_tensor_is_named(saved, write) -> None:
    """A bias that the config does not mention would be left out of the arithmetic."""
    _, tensors = saved
    name = "model.layers.0.self_attn.q_proj.bias"
    with pytest.raises(ModelError, match=name):
        load(write(tensors | {name: torch.zeros(16)}))


def test_a_wrong_shape_is_named(saved, write) -> None:
    _, tensors = saved
    with pytest.raises(ModelError, match=rf"{Q0}.*\[8, 16\].*\[16, 16\]"):
        load(write(tensors | {Q0: tensors[Q0][:8].clone()}))


@pytest.mark.parametrize(
    ("field", "value", "tensor"),
    [
        ("vocab_size", 10**12, "model.embed_tokens.weight"),
        ("vocab_size", 2**63 - 1, "model.embed_tokens.weight"),
        ("hidden_size", 10**9, "model.embed_tokens.weight"),
        ("intermediate_size", 10**15, "model.layers.0.mlp.gate_proj.weight"),
        ("head_dim", 10**12, Q0),
        ("num_attention_heads", 10**12, Q0),
    ],
)
@pytest.mark.parametrize("native", [None, import_native()], ids=["plain", "packed"])
def test_a_size_that_no_file_confirms_is_refused_before_it_is_allocated(
    saved, write, native, field, value, tensor
) -> None:
    _, tensors = saved
    stored = re.escape(str(list(tensors[tensor].shape)))
    with pytest.raises(ModelError, match=rf"safetensors.*{tensor}.*{stored}.*{field}={value}"):
        load(write(tensors, **{field: value}), native=native)


def test_layers_that_no_file_holds_are_refused_at_the_first(saved, write) -> None:
    """So many would take minutes to lay out, and all the memory there is."""
    _, tensors = saved
    with pytest.raises(ModelError, match=r"model\.layers\.2\..*num_hidden_layers=1000000000000$"):
        load(write(tensors, num_hidden_layers=10**12, layer_types=None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_do_not_fit_in_memory_are_refused(saved, write, dtype) -> None:
    _, tensors = saved
    folder = write(tensors)
    size = sum(tensor.numel() for tensor in tensors.values()) * dtype.itemsize
    load(folder, dtype, memory=size)
    with pytest.raises(ModelError, match=f"{size:,} bytes.*{size - 1:,} bytes"):
        load(folder, dtype, memory=size - 1)


def test_quantised_tensors_are_refused(saved, write) -> None:
    _, tensors = saved
    with pytest.raises(ModelError, match=rf"{Q0}.* I8"):
        load(write(tensors | {Q0: tensors[Q0].to(torch.int8)}))


def test_old_rotary_buffers_are_ignored(saved, write) -> None:
    _, tensors = saved
    load(write(tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}))


@pytest.mark.parametrize("native", [None, import_native()], ids=["plain", "packed"])
def test_a_tied_head_may_be_stored_but_not_differ(saved, write, native) -> None:
    _, tensors = saved
    head, embedding = "lm_head.weight", tensors["model.embed_tokens.weight"]
    folder = write(tensors | {head: embedding.clone()}, tie_word_embeddings=True)
    weights = load(folder, native=native)
    assert weights.head is weights.embedding
    assert torch.equal(rows_of(weights.head), embedding)
    with pytest.raises(ModelError, match="tie_word_embeddings"):
        load(write(tensors, tie_word_embeddings=True), native=native)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_file_is_named(saved, write, keep: int) -> None:
    _, tensors = saved
    path = write(tensors) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load(path.parent)


def test_a_folder_without_safetensors_says_what_is_needed(saved, write) -> None:
    _, tensors = saved
    folder = write(tensors)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="safetensors"):
        load(folder)
