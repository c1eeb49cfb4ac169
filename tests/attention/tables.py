"""Random ragged batches over scattered tables, with everything unwritten set to NaN."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pagedkv.attention import AttentionBackend, AttentionBatch, KVSpec


@dataclass
class Case:
    """One layer of one step: the new q, k, v and the K/V that earlier steps left in the blocks."""

    spec: KVSpec
    batch: AttentionBatch
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    blocks: torch.Tensor  # canonical content of every block, null block first


def spec_of(
    heads: int = 2,
    kv_heads: int = 1,
    dim: int = 8,
    blocks: int = 16,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    layers: int = 1,
) -> KVSpec:
    return KVSpec(layers, heads, kv_heads, dim, blocks, block_size, dtype)


@dataclass
class Rows:
    """Content of sequences, independent of where their blocks are: q, k, v by row and position."""

    q: list[torch.Tensor]  # [context, H, D]
    k: list[torch.Tensor]  # [context, G, D]
    v: list[torch.Tensor]

    @staticmethod
    def random(
        lengths: list[int], heads: int, kv_heads: int, dim: int, dtype: torch.dtype, seed: int = 0
    ) -> Rows:
        g = torch.Generator().manual_seed(seed)

        def draw(length: int, count: int) -> torch.Tensor:
            return torch.randn(length, count, dim, generator=g).to(dtype)

        return Rows(
            [draw(n, heads) for n in lengths],
            [draw(n, kv_heads) for n in lengths],
            [draw(n, kv_heads) for n in lengths],
        )


def lay_out(
    rows: Rows, query_lens: list[int], block_size: int, *, seed: int = 0, extra_width: int = 2
) -> Case:
    """Sequences in shuffled blocks; the last `query_lens[i]` tokens of row i are new."""
    lengths = [len(q) for q in rows.q]
    counts = [-(-n // block_size) for n in lengths]
    kv_heads, dim = rows.k[0].shape[1:]
    spec = KVSpec(
        1, rows.q[0].shape[1], kv_heads, dim, sum(counts) + 3, block_size, rows.q[0].dtype
    )
    ids = np.random.default_rng(seed).permutation(spec.num_blocks) + 1
    tables = np.zeros((len(lengths), max(counts) + extra_width), np.int32)
    blocks = torch.full(
        (spec.num_blocks + 1, 1, 2, block_size, kv_heads, dim), float("nan"), dtype=spec.dtype
    )
    slots: list[int] = []
    taken = 0
    for i, (length, count, new) in enumerate(zip(lengths, counts, query_lens, strict=True)):
        tables[i, :count] = ids[taken : taken + count]
        taken += count
        for position in range(length):
            block, offset = int(tables[i, position // block_size]), position % block_size
            if position < length - new:
                blocks[block, 0, 0, offset] = rows.k[i][position]
                blocks[block, 0, 1, offset] = rows.v[i][position]
            else:
                slots.append(block * block_size + offset)

    def new_tokens(parts: list[torch.Tensor]) -> torch.Tensor:
        pairs = zip(parts, query_lens, strict=True)
        return torch.cat([part[len(part) - new :] for part, new in pairs])

    batch = AttentionBatch(
        np.array(query_lens, np.int32),
        np.array(lengths, np.int32),
        tables,
        np.array(slots, np.int64),
    )
    return Case(spec, batch, new_tokens(rows.q), new_tokens(rows.k), new_tokens(rows.v), blocks)


def attend(backend: AttentionBackend, case: Case) -> torch.Tensor:
    """Fills the store with the case's blocks (NaN where nothing was written) and runs layer 0."""
    backend.write_blocks(np.arange(case.spec.num_blocks + 1, dtype=np.int32), case.blocks)
    return backend.run(backend.plan(case.batch), 0, case.q, case.k, case.v)
