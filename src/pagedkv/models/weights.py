"""Safetensors into a `DecoderWeights`, every tensor's name and shape checked.

Files are memory-mapped and copied tensor by tensor into their final place (projections that run
together are stacked, matrices of linear layers packed for the native kernels where those are
built), so the peak is the model once, plus one tensor, plus pages that the system can drop.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Protocol

import torch

from pagedkv.errors import ModelError
from pagedkv.models.checkpoint import StoredTensor, read_headers, read_tensors
from pagedkv.models.config import ModelConfig
from pagedkv.models.linear import Matrix, embed
from pagedkv.models.packed import PackedMatrix
from pagedkv.models.parts import DecoderWeights, LayerWeights

# Buffers that old checkpoints carry and that follow from the config.
DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
ROWS_AT_ONCE = 1024  # when two matrices are compared
FLOAT_TYPES = ("F32", "BF16", "F16")  # as safetensors calls them
# Fields of a config.json that the shapes of tensors follow from, and what a ModelConfig calls them.
SIZES = MappingProxyType(
    {
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "intermediate_size": "intermediate_size",
        "num_attention_heads": "num_heads",
        "num_key_value_heads": "num_kv_heads",
        "head_dim": "head_dim",
    }
)


class Place(Protocol):
    """Where a tensor goes: a view of a tensor, or rows of a packed matrix."""

    @property
    def shape(self) -> torch.Size: ...

    def copy_(self, source: torch.Tensor, /) -> object: ...


def load_weights(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    native: ModuleType | None = None,
    memory: int | None = None,
) -> DecoderWeights:
    """The weights of a Hugging Face folder in `dtype`; the caller owns the tensors.

    With the native extension the matrices of linear layers are packed; a tied embedding too, which
    is then also the head.
    Raises ModelError naming the file and the tensor when a file cannot be read or a tensor is
    missing, unexpected, of another shape or not a plain float, or when all of them take more than
    `memory` bytes (None: not checked).
    """
    stored = {
        name: tensor for name, tensor in read_headers(folder).items() if not DERIVED.fullmatch(name)
    }
    _check_memory(folder, stored, dtype, memory)
    places = _Places(folder, config, stored, dtype, native)
    weights = places.decoder_weights()
    unexpected = stored.keys() - places.views.keys()
    if unexpected:
        name = min(unexpected)
        raise ModelError(
            f"{stored[name].path}: tensor {name} {list(stored[name].shape)} has no place in a "
            f"{config.model_type} model with this config"
        )
    for name, tensor in read_tensors(stored):
        places.views[name].copy_(tensor)
    if places.tied_head is not None:
        _check_tied(places.tied_head, weights.embedding, stored[places.TIED_HEAD].path)
    return weights


def _check_memory(
    folder: Path, stored: Mapping[str, StoredTensor], dtype: torch.dtype, memory: int | None
) -> None:
    size = sum(tensor.size for tensor in stored.values()) * dtype.itemsize
    if memory is not None and size > memory:
        raise ModelError(
            f"the weights in {folder} take {size:,} bytes in "
            f"{str(dtype).removeprefix('torch.')} and {memory:,} bytes of memory are available: "
            "free memory, or take a smaller model"
            + (" or dtype='bfloat16'" if dtype is torch.float32 else "")
        )


class _Places:
    """Where each named tensor of a checkpoint goes: views into the stacked, final tensors.

    A config may say any size, a header only what its file holds: every size that the config asks
    for is compared with the headers before it is allocated.
    """

    TIED_HEAD = "lm_head.weight"

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        stored: Mapping[str, StoredTensor],
        dtype: torch.dtype,
        native: ModuleType | None,
    ) -> None:
        self._folder, self._config, self._stored = folder, config, stored
        self._dtype, self._native = dtype, native
        self.views: dict[str, Place] = {}
        self.tied_head: torch.Tensor | None = None  # if the checkpoint has the head once more

    def decoder_weights(self) -> DecoderWeights:
        """Allocate everything, uninitialised. ModelError for what the headers do not confirm."""
        config = self._config
        hidden, vocab = config.hidden_size, config.vocab_size
        embedding: Matrix
        if config.tie_word_embeddings:
            embedding = head = self._matrix({"model.embed_tokens": vocab}, hidden)
            if self.TIED_HEAD in self._stored:
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
        gate, up = {mlp + "gate_proj": inner}, {mlp + "up_proj": inner}
        output, down = {attention + "o_proj": hidden}, {mlp + "down_proj": hidden}
        return LayerWeights(
            input_norm=self._new(prefix + "input_layernorm.weight", hidden),
            qkv=self._matrix(qkv, hidden),
            output=self._matrix(output, q_size),
            post_norm=self._new(prefix + "post_attention_layernorm.weight", hidden),
            gate=self._matrix(gate, hidden),
            up=self._matrix(up, hidden),
            down=self._matrix(down, inner),
            qkv_bias=self._bias(qkv) if config.qkv_bias else None,
            output_bias=self._bias(output) if config.output_bias else None,
            gate_bias=self._bias(gate) if config.mlp_bias else None,
            up_bias=self._bias(up) if config.mlp_bias else None,
            down_bias=self._bias(down) if config.mlp_bias else None,
            q_norm=self._new(attention + "q_norm.weight", head_dim) if config.qk_norm else None,
            k_norm=self._new(attention + "k_norm.weight", head_dim) if config.qk_norm else None,
        )

    def _check(self, name: str, *shape: int) -> None:
        """The checkpoint has a float tensor of this name and shape."""
        tensor = self._stored.get(name)
        if tensor is None:
            raise ModelError(
                f"{self._folder}: tensor {name} is in none of the weight files; the config says "
                f"num_hidden_layers={self._config.num_layers}"
            )
        if tensor.shape != shape:
            sizes = ", ".join(f"{key}={getattr(self._config, own)}" for key, own in SIZES.items())
            raise ModelError(
                f"{tensor.path}: tensor {name} has shape {list(tensor.shape)}, "
                f"the config says {list(shape)} ({sizes})"
            )
        if tensor.dtype not in FLOAT_TYPES:
            raise ModelError(
                f"{tensor.path}: tensor {name} is {tensor.dtype}; only {', '.join(FLOAT_TYPES)} "
                "weights are implemented"
            )

    def _new(self, name: str, *shape: int) -> torch.Tensor:
        self._check(name, *shape)
        place = torch.empty(shape, dtype=self._dtype)
        self.views[name] = place
        return place

    def _matrix(self, parts: dict[str, int], columns: int) -> Matrix:
        """One matrix of the parts' rows."""
        for name, count in parts.items():
            self._check(name + ".weight", count, columns)
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
        for name, count in parts.items():
            self._check(name + ".bias", count)
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
