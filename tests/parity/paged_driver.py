"""Runs a decoder over block tables with random block ids, in chunks of any size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from pagedkv.attention.backends import make_backend
from pagedkv.attention.interface import AttentionBatch
from pagedkv.models import Decoder


class PagedDriver:
    """One decoder, one K/V store; sequences are rows of a shuffled block table."""

    def __init__(
        self,
        decoder: Decoder,
        block_size: int,
        backend: str = "gather",
        num_seqs: int = 8,
        max_len: int = 80,
        seed: int = 0,
    ) -> None:
        self.decoder, self.block_size = decoder, block_size
        width = -(-max_len // block_size)
        spec = decoder.config.kv_spec(num_seqs * width, block_size, decoder.dtype)
        self.backend = make_backend(backend, spec, deterministic=decoder.deterministic)
        ids = np.random.default_rng(seed).permutation(spec.num_blocks).astype(np.int32) + 1
        self.tables = ids.reshape(num_seqs, width)
        self.lengths = np.zeros(num_seqs, np.int32)

    def step(
        self, batch: Sequence[tuple[int, Sequence[int]]], position_shift: int = 0
    ) -> list[torch.Tensor]:
        """Feed tokens to sequences; float32 logits [tokens, V] of each."""
        counts = [len(tokens) for _, tokens in batch]
        logits = self.logits(batch, range(sum(counts)), position_shift)
        return list(torch.split(logits, counts))

    def logits(
        self,
        batch: Sequence[tuple[int, Sequence[int]]],
        rows: Sequence[int],
        position_shift: int = 0,
    ) -> torch.Tensor:
        """Feed tokens to sequences; float32 logits [len(rows), V] of the given rows."""
        seqs = [seq for seq, _ in batch]
        counts = np.array([len(tokens) for _, tokens in batch], np.int32)
        starts = self.lengths[seqs]
        positions = np.concatenate(
            [np.arange(s, s + c) for s, c in zip(starts, counts, strict=True)]
        )
        tables = self.tables[seqs]
        row_of = np.repeat(np.arange(len(batch)), counts)
        blocks = tables[row_of, positions // self.block_size].astype(np.int64)
        slots = blocks * self.block_size + positions % self.block_size
        plan = self.backend.plan(AttentionBatch(counts, starts + counts, tables, slots))
        logits = self.decoder.forward(
            torch.tensor([token for _, tokens in batch for token in tokens]),
            torch.from_numpy(positions + position_shift),
            self.backend,
            plan,
            torch.tensor(rows, dtype=torch.int64),
        )
        self.lengths[seqs] += counts
        return logits

    def teacher_force(
        self, prompts: Sequence[Sequence[int]], chunks: Iterable[int]
    ) -> list[torch.Tensor]:
        """Feed all prompts side by side, each step a chunk of the next size for each of them.

        Returns the logits [len(prompt), V] of each prompt. Sequences 0..len(prompts) - 1 are used.
        """
        sizes = iter(chunks)
        parts: list[list[torch.Tensor]] = [[] for _ in prompts]
        left = {seq: list(prompt) for seq, prompt in enumerate(prompts)}
        while left:
            batch = []
            for seq in list(left):
                size = next(sizes)
                batch.append((seq, left[seq][:size]))
                left[seq] = left[seq][size:]
                if not left[seq]:
                    del left[seq]
            for (seq, _), logits in zip(batch, self.step(batch), strict=True):
                parts[seq].append(logits)
        return [torch.cat(part) for part in parts]
