"""What K/V depends on beside the tokens, as a digest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import fields

import torch

from pagedkv.attention.interface import KVSpec
from pagedkv.models.decoder import Decoder
from pagedkv.models.linear import Matrix
from pagedkv.models.packed import PackedMatrix
from pagedkv.models.parts import DecoderWeights

# Of a payload: (layer, K/V, token, head, head_dim), little-endian.
LAYOUT_VERSION = 1
_ROWS_AT_ONCE = 4096  # bounds the scratch


def weights_digest(weights: DecoderWeights) -> bytes:
    """32 bytes that two models have in common only if all weights have the same bits.

    Reads every weight once: about a second for 500 MB.
    """
    digest = hashlib.blake2b(digest_size=32)
    matrices = [weights.embedding, weights.norm, weights.head]
    for layer in weights.layers:
        matrices += [
            value for field in fields(layer) if (value := getattr(layer, field.name)) is not None
        ]
    for matrix in matrices:
        digest.update(f"{tuple(matrix.shape)} {matrix.dtype};".encode())
        for rows in _rows(matrix):
            digest.update(rows.contiguous().view(torch.uint8).numpy().data)
    return digest.digest()


def _rows(matrix: Matrix) -> Iterator[torch.Tensor]:
    for first in range(0, matrix.shape[0], _ROWS_AT_ONCE):
        last = min(first + _ROWS_AT_ONCE, matrix.shape[0])
        if isinstance(matrix, PackedMatrix):
            yield matrix.gather(torch.arange(first, last))
        else:
            yield matrix[first:last].cpu()


def model_digest(decoder: Decoder) -> bytes:
    """What two processes have in common only if they have the same model, and read it alike.

    Unlike `kv_fingerprint` it says nothing of blocks, and of kernels, whose last bits may differ:
    between machines whose kernels differ K/V are as good, and results no longer bit-identical.
    """
    facts = f"layout {LAYOUT_VERSION}; {decoder.config!r}; "
    digest = hashlib.blake2b(facts.encode(), digest_size=32)
    digest.update(weights_digest(decoder.weights))
    return digest.digest()


def kv_fingerprint(decoder: Decoder, spec: KVSpec, kernels: str) -> bytes:
    """What two processes have in common only if the K/V of one will do for the other.

    kernels: says which ones compute them; other kernels give other last bits.
    """
    facts = (
        f"layout {LAYOUT_VERSION}; {decoder.config!r}; {spec.num_layers} layers, "
        f"{spec.num_kv_heads} heads of {spec.head_dim}, blocks of {spec.block_size}, {spec.dtype}; "
        f"{kernels}; "
    )
    digest = hashlib.blake2b(facts.encode(), digest_size=32)
    digest.update(weights_digest(decoder.weights))
    return digest.digest()
