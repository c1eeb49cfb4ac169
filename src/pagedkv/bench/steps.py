"""Steps of a model over K/V that nobody computed: any batch and context without a prefill."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from pagedkv.attention.interface import AttentionBackend
from pagedkv.bench.attention import filled_backend, step_batch
from pagedkv.engine.executor import ModelExecutor
from pagedkv.engine.machine import machine_memory
from pagedkv.models.loader import LoadedModel, load_model
from pagedkv.scheduling.params import SamplingParams
from pagedkv.scheduling.step import Result, Sample, Step

_GREEDY = SamplingParams(temperature=0.0)


class ModelSteps:
    """A model, and a pool whose blocks are full of random K/V.

    dtype: of weights and K/V. Raises as `load_model`.
    """

    def __init__(
        self,
        model: str | Path,
        dtype: torch.dtype,
        num_blocks: int,
        *,
        block_size: int = 16,
        kernels: str = "auto",
    ) -> None:
        self.model: LoadedModel = load_model(
            model, dtype, memory=machine_memory().available, kernels=kernels
        )
        spec = self.model.config.kv_spec(num_blocks, block_size, dtype)
        self.backend: AttentionBackend = filled_backend("auto", spec)
        self._executor = ModelExecutor(self.model.decoder, self.backend)
        self._rows = self._steps = 0  # table rows given away, steps made

    def step(self, rows: int, context: int, query: int = 1) -> Callable[[], Result]:
        """A call that computes the last `query` tokens of `rows` rows of `context`, and samples.

        Blocks lie in no order and no two rows share one; those of other steps may be the same.
        ValueError where the pool has too few.
        """
        size = self.backend.spec.block_size
        width = -(-context // size)
        rng = np.random.default_rng(context)
        ids = rng.permutation(self.backend.spec.num_blocks)[: rows * width] + 1
        if len(ids) < rows * width:
            raise ValueError(f"{rows} rows of {width} blocks are more than the pool has")
        tables = ids.astype(np.int32).reshape(rows, width)
        batch = step_batch(tables, context, query, size)
        table_rows = np.arange(self._rows, self._rows + rows, dtype=np.int32)
        self._rows += rows
        tokens = rng.integers(self.model.config.vocab_size, size=rows * query, dtype=np.int32)
        positions = np.tile(np.arange(context - query, context, dtype=np.int32), rows)
        samples = tuple(Sample(row, _GREEDY, row, context, best=True) for row in range(rows))
        # The executor keeps tables: they are sent with the first step.
        changed, changed_tables = table_rows, tables
        none = np.zeros((0, 3), np.int32)

        def run() -> Result:
            nonlocal changed, changed_tables
            step = Step(
                self._steps,
                np.arange(rows, dtype=np.int64),
                table_rows,
                batch.query_lens,
                batch.context_lens,
                tokens,
                positions,
                batch.slots,
                none,
                changed,
                changed_tables,
                samples,
            )
            self._steps += 1
            changed, changed_tables = changed[:0], changed_tables[:0]
            return self._executor.collect(self._executor.submit(step))

        return run
