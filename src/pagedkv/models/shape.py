"""The numbers that decide how large a model's K/V are, without loading the model.

Of any decoder with full attention, whether this library can run it or not: from a folder's or a hub
id's config.json, or from the header of a GGUF file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedkv.errors import ModelError
from pagedkv.models.checkpoint import INDEX_FILE, SINGLE_FILE, read_headers
from pagedkv.models.config import read_json
from pagedkv.models.embedded import EMBEDDED_MODEL, find_gguf
from pagedkv.models.loader import HUB_ID


@dataclass(frozen=True, slots=True)
class ShapeFacts:
    """Heads and layers as the model's own files have them."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str | None  # of the checkpoint, where it says so
    parameters: int | None  # where the file lists its tensors
    max_model_len: int | None = None  # tokens that the model was trained for, where it says so


def read_shape(name_or_path: str) -> ShapeFacts:
    """Facts of the embedded model, a GGUF file, a folder, or a hub id (its config.json alone).

    ModelError: it cannot be found or read, or lacks a number; it says which.
    """
    if name_or_path == EMBEDDED_MODEL:
        return _from_gguf(find_gguf())
    path = Path(name_or_path).expanduser()
    if path.is_file():
        return _from_gguf(path)
    if path.is_dir():
        return _from_config(path / "config.json")
    if not HUB_ID.fullmatch(name_or_path):
        raise ModelError(
            f"model {name_or_path!r} is unknown: give {EMBEDDED_MODEL!r}, a GGUF file, a folder "
            "with config.json, or a hub id such as 'owner/name'"
        )
    import huggingface_hub

    try:
        return _from_config(Path(huggingface_hub.hf_hub_download(name_or_path, "config.json")))
    except ModelError:
        raise
    except Exception as error:  # whatever the hub and the network provoke
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"config.json of {name_or_path!r} cannot be downloaded: {why}") from error


def count_parameters(folder: Path) -> int | None:
    """Elements of all tensors in the weight files of a folder, by their headers; None: no files.

    ModelError: they are damaged.
    """
    if not any((folder / name).is_file() for name in (SINGLE_FILE, INDEX_FILE)):
        return None
    return sum(tensor.size for tensor in read_headers(folder).values())


def _from_config(path: Path) -> ShapeFacts:
    config = read_json(path)
    config = config.get("text_config", config)
    heads = _count(config, "num_attention_heads", path)
    kv_heads = heads
    if config.get("num_key_value_heads") is not None:
        kv_heads = _count(config, "num_key_value_heads", path)
    if config.get("head_dim") is not None:
        head_dim = _count(config, "head_dim", path)
    else:
        head_dim = _count(config, "hidden_size", path) // heads
    dtype = config.get("dtype") or config.get("torch_dtype")
    layers = _count(config, "num_hidden_layers", path)
    return ShapeFacts(
        layers, heads, kv_heads, head_dim, dtype, None, config.get("max_position_embeddings")
    )


def _count(config: dict[str, Any], key: str, path: Path) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{path}: {key}={value!r} must be a whole number from 1")
    return value


def _from_gguf(path: Path) -> ShapeFacts:
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        architecture = str(reader.fields["general.architecture"].contents())
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ModelError(f"{path} is no GGUF file that can be read: {error}") from error
    facts = {
        key.removeprefix(f"{architecture}."): field.contents()
        for key, field in reader.fields.items()
        if key.startswith(f"{architecture}.")
    }
    heads = _count(facts, "attention.head_count", path)
    kv_heads = heads
    if "attention.head_count_kv" in facts:
        kv_heads = _count(facts, "attention.head_count_kv", path)
    if "attention.key_length" in facts:
        head_dim = _count(facts, "attention.key_length", path)
    else:
        head_dim = _count(facts, "embedding_length", path) // heads
    parameters = sum(int(tensor.n_elements) for tensor in reader.tensors)
    return ShapeFacts(
        _count(facts, "block_count", path),
        heads,
        kv_heads,
        head_dim,
        None,
        parameters,
        facts.get("context_length"),
    )
