"""What a decoder computes, read from a Hugging Face `config.json`, and nothing left to chance.

The reading is by allow-list: a key is implemented, or known not to touch the arithmetic, or has the
value that switches it off, or the model is refused by name. Ignoring a field that matters would
give fluent wrong text.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from pagedkv.attention.interface import KVSpec
from pagedkv.errors import ModelError
from pagedkv.models.config_keys import HARMLESS, IMPLEMENTED, NEUTRAL, NEUTRAL_FOR

ARCHITECTURES = MappingProxyType(
    {
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
    }
)
DEFAULT_ROPE_THETA = 10000.0  # of all four families when the config names none
# What transformers' MistralConfig assumes when the key is absent (null means: no window).
MISTRAL_DEFAULT_WINDOW = 4096
QWEN3_DEFAULT_HEAD_DIM = 128
MAX_COUNT = 2**63 - 1  # what a tensor's dimension can be
ROPE_KEYS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "default": frozenset(),
        "linear": frozenset({"factor"}),
        "llama3": frozenset(
            {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
        ),
    }
)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding. `kind` is "default", "linear" or "llama3".

    The fields after `factor` are used by "llama3" only (Llama 3.1's frequency-dependent scaling).
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and switches of one decoder-only model."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False  # of the attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False
    eos_token_ids: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32  # of the checkpoint; float32 where we do not compute in it

    @classmethod
    def from_dict(
        cls, raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None
    ) -> ModelConfig:
        """Parse a `config.json` and, for the end tokens, a `generation_config.json`.

        Raises ModelError that names the field and its value.
        """
        model_type = raw.get("model_type")
        if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
            raise _refused("model_type", model_type, f"known are {', '.join(ARCHITECTURES)}")
        _check_keys(raw, model_type)
        heads = _count(raw, "num_attention_heads")
        kv_heads = heads if model_type == "llama" and raw.get("num_key_value_heads") is None else 0
        kv_heads = kv_heads or _count(raw, "num_key_value_heads")
        if heads % kv_heads:
            raise _refused(
                "num_key_value_heads", kv_heads, f"it must divide num_attention_heads={heads}"
            )
        bias = model_type in ("llama", "qwen3") and _flag(raw, "attention_bias")
        max_positions = _count(raw, "max_position_embeddings")
        _check_window(raw, model_type, max_positions)
        return cls(
            model_type=model_type,
            vocab_size=_count(raw, "vocab_size"),
            hidden_size=_count(raw, "hidden_size"),
            intermediate_size=_count(raw, "intermediate_size"),
            num_layers=_count(raw, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=_head_dim(raw, model_type, heads),
            rms_norm_eps=_number(raw, "rms_norm_eps"),
            max_position_embeddings=max_positions,
            rope=_rope(raw),
            tie_word_embeddings=_flag(raw, "tie_word_embeddings"),
            qkv_bias=bias or model_type == "qwen2",
            output_bias=bias,
            mlp_bias=_flag(raw, "mlp_bias"),
            qk_norm=model_type == "qwen3",
            eos_token_ids=_eos(raw, generation or {}),
            dtype=torch.bfloat16 if _stored_dtype(raw) == "bfloat16" else torch.float32,
        )

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Read `config.json` and, if there, `generation_config.json` of a local folder."""
        if not (folder / "config.json").exists():
            raise ModelError(
                f"{folder} has no config.json: give the folder that holds config.json and "
                "safetensors"
            )
        generation = folder / "generation_config.json"
        return cls.from_dict(
            read_json(folder / "config.json"),
            read_json(generation) if generation.is_file() else None,
        )

    def kv_spec(self, num_blocks: int, block_size: int, dtype: torch.dtype) -> KVSpec:
        """The K/V store that this model needs."""
        return KVSpec(
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=dtype,
        )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ModelError naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}, an object was expected")
    return value


def _refused(key: str, value: object, why: str) -> ModelError:
    return ModelError(f"config field {key}={value!r} cannot be used: {why}")


def _count(raw: Mapping[str, Any], key: str) -> int:
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_COUNT:
        raise _refused(key, value, f"a positive integer up to {MAX_COUNT} is needed")
    return value


def _number(raw: Mapping[str, Any], key: str) -> float:
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _refused(key, value, "a positive number is needed")
    if not 0 < value <= sys.float_info.max:
        raise _refused(key, value, "a positive number is needed")
    return float(value)


def _flag(raw: Mapping[str, Any], key: str) -> bool:
    value = raw.get(key)
    if value is not None and not isinstance(value, bool):
        raise _refused(key, value, "true or false is needed")
    return bool(value)


def _stored_dtype(raw: Mapping[str, Any]) -> object:
    """`dtype`, or `torch_dtype` as transformers before 5 called it; None if neither is there."""
    return raw.get("dtype", raw.get("torch_dtype"))


def _check_keys(raw: Mapping[str, Any], model_type: str) -> None:
    """Refuse every key whose effect is not implemented."""
    for key, value in raw.items():
        if key in IMPLEMENTED or key in HARMLESS:
            continue
        rule = NEUTRAL_FOR.get((model_type, key)) or NEUTRAL.get(key)
        if rule is None:
            # A field that is unset cannot switch anything on.
            if value is not None:
                raise _refused(
                    key,
                    value,
                    "this field is unknown here and may change the result; if it does not change "
                    "the arithmetic, remove it from config.json",
                )
        elif value is not None and value not in rule.neutral:
            raise _refused(key, value, f"{rule.what} is not implemented")
    architectures = raw.get("architectures")
    if architectures is not None and architectures != [ARCHITECTURES[model_type]]:
        raise _refused(
            "architectures",
            architectures,
            f"a {model_type} text generator is [{ARCHITECTURES[model_type]!r}]",
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise _refused("hidden_act", raw["hidden_act"], "only 'silu' is implemented")
    layers = raw.get("layer_types")
    if layers is not None and not _all_full(layers, _count(raw, "num_hidden_layers")):
        raise _refused(
            "layer_types", layers, "one 'full_attention' for each layer is what is implemented"
        )


def _all_full(layers: object, count: int) -> bool:
    return (
        isinstance(layers, list)
        and len(layers) == count
        and all(layer == "full_attention" for layer in layers)
    )


def _check_window(raw: Mapping[str, Any], model_type: str, max_positions: int) -> None:
    """A sliding window must be off, or as long as the longest context (then it hides nothing)."""
    if model_type == "mistral":
        window = raw.get("sliding_window", MISTRAL_DEFAULT_WINDOW)
    else:
        window = raw.get("sliding_window") if _flag(raw, "use_sliding_window") else None
    if window is not None and (not isinstance(window, int) or window < max_positions):
        raise _refused(
            "sliding_window",
            window,
            "sliding windows are not implemented: it must be null or at least "
            f"max_position_embeddings={max_positions}",
        )


def _head_dim(raw: Mapping[str, Any], model_type: str, heads: int) -> int:
    if raw.get("head_dim") is not None:
        head_dim = _count(raw, "head_dim")
    elif model_type == "qwen3":
        head_dim = QWEN3_DEFAULT_HEAD_DIM
    else:
        hidden = _count(raw, "hidden_size")
        if hidden % heads:
            raise _refused("hidden_size", hidden, f"num_attention_heads={heads} must divide it")
        head_dim = hidden // heads
    if head_dim % 2:
        raise _refused("head_dim", head_dim, "rotary embedding needs an even number")
    return head_dim


def _rope_settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings under their new names, be they written the old way (`rope_theta`,
    `rope_scaling`) or the new (`rope_parameters`, transformers 5); a contradiction is refused."""
    settings: dict[str, Any] = {}
    if raw.get("rope_theta") is not None:
        settings["rope_theta"] = raw["rope_theta"]
    for field in ("rope_scaling", "rope_parameters"):
        source = raw.get(field)
        if source is not None and not isinstance(source, Mapping):
            raise _refused(field, source, "an object is needed")
        for key, value in (source or {}).items():
            name = "rope_type" if key == "type" else key
            if settings.setdefault(name, value) != value:
                raise _refused(name, value, f"elsewhere the config says {settings[name]!r}")
    settings.setdefault("rope_theta", DEFAULT_ROPE_THETA)
    return settings


def _rope(raw: Mapping[str, Any]) -> RopeConfig:
    settings = _rope_settings(raw)
    kind = settings.pop("rope_type", "default")
    if not isinstance(kind, str) or kind not in ROPE_KEYS:
        raise _refused("rope_type", kind, f"implemented are {', '.join(ROPE_KEYS)}")
    partial = settings.pop("partial_rotary_factor", None)
    if partial not in (None, 1.0):
        raise _refused("partial_rotary_factor", partial, "partial rotary is not implemented")
    theta = _number(settings, "rope_theta")
    del settings["rope_theta"]
    if kind == "llama3":
        settings.setdefault("original_max_position_embeddings", raw["max_position_embeddings"])
    unknown = {key for key, value in settings.items() if value is not None} - ROPE_KEYS[kind]
    if unknown:
        key = min(unknown)
        raise _refused(f"rope {key}", settings[key], f"it has no meaning for rope type {kind!r}")
    if kind == "default":
        return RopeConfig(theta)
    factor = _number(settings, "factor")
    if kind == "linear":
        return RopeConfig(theta, kind, factor)
    low, high = _number(settings, "low_freq_factor"), _number(settings, "high_freq_factor")
    if low >= high:
        raise _refused("low_freq_factor", low, f"it must be below high_freq_factor={high}")
    original = _count(settings, "original_max_position_embeddings")
    return RopeConfig(theta, kind, factor, low, high, original)


def _eos(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """End tokens; the generation config, where it names them, has the last word."""
    value = generation.get("eos_token_id")
    if value is None:
        value = raw.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise _refused("eos_token_id", value, "an id or a list of ids is needed")
    # One outside the vocabulary can never be drawn, and never has to be forbidden.
    return tuple(i for i in ids if i < _count(raw, "vocab_size"))
