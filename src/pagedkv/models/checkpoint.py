"""The safetensors files of a folder: what their headers say, and the tensors themselves."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from pagedkv.errors import ModelError
from pagedkv.models.config import read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What a header says of a tensor; `dtype` as safetensors writes it ("F32", "BF16", ...)."""

    path: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a folder by name; reads no data.

    The library has checked each header against the length of its file, so the sizes are real.
    Raises ModelError naming the file and the tensor when a file is missing or damaged, lacks what
    the index names, or a tensor is there twice.
    """
    stored: dict[str, StoredTensor] = {}
    for path, expected in _files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                names = list(file.keys())
                slices = {name: file.get_slice(name) for name in names}
                found = {
                    name: StoredTensor(path, tuple(part.get_shape()), part.get_dtype())
                    for name, part in slices.items()
                }
        except (SafetensorError, OSError) as error:
            raise ModelError(f"cannot read {path}: {error}") from error
        lacking = sorted(set(expected or ()) - found.keys())
        if lacking:
            raise ModelError(f"{path}: tensor {lacking[0]} is missing, the index names it")
        for name in names:
            if name in stored:
                raise ModelError(
                    f"tensor {name} is in {stored[name].path.name} and again in {path.name}"
                )
        stored |= found
    return stored


def read_tensors(stored: dict[str, StoredTensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of `read_headers`, one at a time, file by file; views of mapped files."""
    by_file: dict[Path, list[str]] = {}
    for name, tensor in stored.items():
        by_file.setdefault(tensor.path, []).append(name)
    for path, names in by_file.items():
        try:
            with safe_open(path, framework="pt") as file:
                for name in names:
                    yield name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"cannot read {path}: {error}") from error


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
