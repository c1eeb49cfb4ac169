"""Safetensors into a `DecoderWeights`, every tensor's name and shape checked.

Files are memory-mapped and copied tensor by tensor into their final place (projections that run
together are stacked, matrices of linear layers packed for the native kernels where those are
built), so the peak is the model once, plus one tensor, plus pages that the system can drop.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from pagedkv.errors import ModelError
from pagedkv.models.config import ModelConfig, read_json
from pagedkv.models.decoder import DecoderWeights, LayerWeights
from pagedkv.models.linear import Matrix, embed
from pagedkv.models.packed import PackedMatrix

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Buffers that old checkpoints carry and that follow from the config.
DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
ROWS_AT_ONCE = 1024  # when two matrices are compared
FLOAT_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class Place(Protocol):
    """Where a tensor goes: a view of a tensor, or rows of a packed matrix."""

    @property
    def shape(self) -> torch.Size: ...

    def copy_(self, source: torch.Tensor, /) -> object: ...


def load_weights(
    folder: Path, config: ModelConfig, dtype: torch.dtype, native: ModuleType | None = None
) -> DecoderWeights:
    """The weights of a Hugging Face folder in `dtype`; the caller owns the tensors.

    With the native extension the matrices of linear layers are packed; a tied embedding too, which
    is then also the head's.
    Raises ModelError naming the file and the tensor when a file cannot be read or a tensor is
    missing, unexpected, of another shape or not a plain float.
    """
    places = _Places(config, dtype, native)
    weights = places.decoder_weights()
    seen: dict[str, Path] = {}
    for path, names in _files(folder):
        for name, tensor in _tensors(path, names):
            if name in seen:
                raise ModelError(f"tensor {name} is in {seen[name].name} and again in {path.name}")
            seen[name] = path
            if DERIVED.fullmatch(name):
                continue
            place = places.views.get(name)
            if place is None:
                raise ModelError(
                    f"{path}: tensor {name} {list(tensor.shape)} has no place in a "
                    f"{config.model_type} model with this config"
                )
            if tensor.shape != place.shape:
                raise ModelError(
                    f"{path}: tensor {name} has shape {list(tensor.shape)}, "
                    f"the config says {list(place.shape)}"
                )
            if tensor.dtype not in FLOAT_TYPES:
                raise ModelError(
                    f"{path}: tensor {name} is {tensor.dtype}; only float32, bfloat16 and float16 "
                    "weights are implemented"
                )
            place.copy_(tensor)
    missing = sorted(places.views.keys() - seen.keys() - places.optional)
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"{folder}: tensor {missing[0]}{more} is in none of the weight files")
    if config.tie_word_embeddings and places.TIED_HEAD in seen:
        _check_tied(places.tied_head, weights.embedding, seen[places.TIED_HEAD])
    return weights


class _Places:
    """Where each named tensor of a checkpoint goes: views into the stacked, final tensors."""

    TIED_HEAD = "lm_head.weight"

    def __init__(self, config: ModelConfig, dtype: torch.dtype, native: ModuleType | None) -> None:
        self._config, self._dtype, self._native = config, dtype, native
        self.views: dict[str, Place] = {}
        self.optional: set[str] = set()

    def decoder_weights(self) -> DecoderWeights:
        """Allocate everything, uninitialised."""
        config = self._config
        hidden, vocab = config.hidden_size, config.vocab_size
        embedding: Matrix
        if config.tie_word_embeddings:
            embedding = head = self._matrix({"model.embed_tokens": vocab}, hidden)
            self.optional.add(self.TIED_HEAD)
            self.tied_head = self._new(self.TIED_HEAD, vocab, hidden)
        else:
            embedding = self._new("model.embed_tokens.weight", vocab, hidden)
            head = self._matrix({"lm_head": vocab}, hidden)
        layers = tuple(self._layer(f"model.layers.{i}.") for i in range(config.num_layers))
        return DecoderWeights(embedding, layers, self._new("model.norm.weight", hidden), head)

    def _layer(self, prefix: str) -> LayerWeights:
        config = self._config
        hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
        q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        qkv = {f"{attention}{name}_proj": q_size if name == "q" else kv_size for name in "qkv"}
        gate_up = {f"{mlp}{name}_proj": inner for name in ("gate", "up")}
        output, down = {attention + "o_proj": hidden}, {mlp + "down_proj": hidden}
        return LayerWeights(
            input_norm=self._new(prefix + "input_layernorm.weight", hidden),
            qkv=self._matrix(qkv, hidden),
            output=self._matrix(output, q_size),
            post_norm=self._new(prefix + "post_attention_layernorm.weight", hidden),
            gate_up=self._matrix(gate_up, hidden),
            down=self._matrix(down, inner),
            qkv_bias=self._bias(qkv) if config.qkv_bias else None,
            output_bias=self._bias(output) if config.output_bias else None,
            gate_up_bias=self._bias(gate_up) if config.mlp_bias else None,
            down_bias=self._bias(down) if config.mlp_bias else None,
            q_norm=self._new(attention + "q_norm.weight", head_dim) if config.qk_norm else None,
            k_norm=self._new(attention + "k_norm.weight", head_dim) if config.qk_norm else None,
        )

    def _new(self, name: str, *shape: int) -> torch.Tensor:
        place = torch.empty(shape, dtype=self._dtype)
        self.views[name] = place
        return place

    def _matrix(self, parts: dict[str, int], columns: int) -> Matrix:
        """One matrix of the parts' rows."""
        rows = sum(parts.values())
        if self._native is None:
            return self._stacked(parts, ".weight", torch.empty((rows, columns), dtype=self._dtype))
        packed = PackedMatrix(self._native, rows, columns, self._dtype)
        first = 0
        for name, count in parts.items():
            self.views[name + ".weight"] = packed.rows(first, count)
            first += count
        return packed

    def _bias(self, parts: dict[str, int]) -> torch.Tensor:
        return self._stacked(parts, ".bias", torch.empty(sum(parts.values()), dtype=self._dtype))

    def _stacked(self, parts: dict[str, int], suffix: str, whole: torch.Tensor) -> torch.Tensor:
        for name, view in zip(parts, whole.split_with_sizes(list(parts.values())), strict=True):
            self.views[name + suffix] = view
        return whole


def _check_tied(head: torch.Tensor, embedding: Matrix, path: Path) -> None:
    """A checkpoint may store the tied head a second time, but not with other numbers."""
    for first in range(0, len(head), ROWS_AT_ONCE):
        rows = head[first : first + ROWS_AT_ONCE]
        if not torch.equal(rows, embed(embedding, torch.arange(first, first + len(rows)))):
            raise ModelError(
                f"{path}: tensor {_Places.TIED_HEAD} differs from model.embed_tokens.weight "
                "although the config says tie_word_embeddings=true"
            )


def _files(folder: Path) -> Iterator[tuple[Path, list[str] | None]]:
    """Weight files and the tensors that the index expects in each (None: whatever is there)."""
    index = folder / INDEX_FILE
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index} has no weight_map")
        for shard in weight_map.values():
            if not isinstance(shard, str) or Path(shard).name != shard:
                raise ModelError(f"{index} names {shard!r}: a shard is a file of the same folder")
        for shard in sorted(set(weight_map.values())):
            yield folder / shard, [name for name, place in weight_map.items() if place == shard]
    elif (folder / SINGLE_FILE).is_file():
        yield folder / SINGLE_FILE, None
    else:
        raise ModelError(
            f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}: "
            "convert the weights to safetensors"
        )


def _tensors(path: Path, expected: list[str] | None) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            lacking = sorted(set(expected or ()) - set(names))
            if lacking:
                raise ModelError(f"{path}: tensor {lacking[0]} is missing, the index names it")
            for name in names:
                yield name, file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
