"""From a name to a model that runs: embedded, a local folder, or a hub id."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from pagedkv.errors import ConfigError, ModelError
from pagedkv.models.config import ModelConfig
from pagedkv.models.decoder import Decoder
from pagedkv.models.embedded import EMBEDDED_MODEL, embedded_folder
from pagedkv.models.native import find_native
from pagedkv.models.tokenizer import load_tokenizer
from pagedkv.models.weights import load_weights

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
HUB_OTHERS = ("*/*", "consolidated*")  # the same weights once more, in other forms
HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder with its config, its tokenizer (None: token-id prompts only) and its folder."""

    config: ModelConfig
    decoder: Decoder
    tokenizer: PreTrainedTokenizerBase | None
    path: Path


def load_model(
    name_or_path: str | Path,
    dtype: torch.dtype | None = torch.float32,
    deterministic: bool = False,
    device: str = "cpu",
    memory: int | None = None,
    kernels: str = "auto",
) -> LoadedModel:
    """Load a Llama, Mistral, Qwen2 or Qwen3 model in float32 or bfloat16 (None: the checkpoint's).

    `name_or_path` is "smollm2-135m-instruct" (embedded), a local Hugging Face folder with
    safetensors, or a hub id. `memory` is how many bytes the weights may take (None: not checked).
    `kernels` says what computes the layers, see `find_native`; weights are held once, packed for
    the native ones or plain for torch.
    Raises ModelError if it cannot be found, read or computed exactly, ConfigError if a setting
    cannot work.
    """
    if dtype not in (None, *DTYPES):
        raise ConfigError(f"dtype={dtype} is not implemented: use torch.float32 or torch.bfloat16")
    if device != "cpu":
        raise ConfigError(f"device={device!r} is not implemented: use 'cpu'")
    native = find_native(kernels, deterministic)
    folder = find_model(name_or_path, dtype or torch.float32)
    config = ModelConfig.from_folder(folder)
    dtype = dtype or config.dtype
    tokenizer = load_tokenizer(folder)
    weights = load_weights(folder, config, dtype, native, memory)
    decoder = Decoder(config, weights, deterministic)
    return LoadedModel(config, decoder, tokenizer, folder)


def find_model(name_or_path: str | Path, dtype: torch.dtype) -> Path:
    """The local folder of a model; converts the embedded one, downloads a hub id."""
    name = str(name_or_path)
    if name == EMBEDDED_MODEL:
        return embedded_folder(dtype)
    try:
        folder = Path(name).expanduser()
        is_folder, is_file = bool(name) and folder.is_dir(), folder.is_file()
    except (OSError, RuntimeError) as error:  # a name that is too long, no such home
        why = error.strerror if isinstance(error, OSError) else error
        raise ModelError(f"model {name[:80]!r} cannot be found: {why}") from error
    if is_folder:
        return folder
    if is_file:
        raise ModelError(f"{folder} is a file: give the folder that holds config.json")
    if not HUB_ID.fullmatch(name) or name.startswith("."):
        raise ModelError(
            f"model {name!r} is unknown: give {EMBEDDED_MODEL!r}, an existing folder with "
            "config.json and safetensors, or a hub id such as 'owner/name'"
        )
    return _download(name)


def _download(hub_id: str) -> Path:
    import huggingface_hub.errors  # only here: most runs are local

    try:
        return Path(
            huggingface_hub.snapshot_download(
                hub_id, allow_patterns=list(HUB_FILES), ignore_patterns=list(HUB_OTHERS)
            )
        )
    except huggingface_hub.errors.LocalEntryNotFoundError as error:
        raise ModelError(
            f"model {hub_id!r} is no local folder and cannot be downloaded (no network?): "
            "download it elsewhere and give the folder"
        ) from error
    except Exception as error:  # whatever the hub, the network and the disk provoke
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"model {hub_id!r} is no local folder and cannot be downloaded: {why}"
        ) from error
