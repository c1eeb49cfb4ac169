"""Attention of one backend over a block table, beside what the machine can give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from pagedkv.attention.backends import make_backend, stored_block_bytes
from pagedkv.attention.interface import AttentionBackend, AttentionBatch, KVSpec
from pagedkv.bench.limits import Limits, Yardstick
from pagedkv.bench.rounds import fast, in_turns
from pagedkv.errors import ConfigError

_FILL_BLOCKS = 64  # written at a time


@dataclass(frozen=True, slots=True)
class Shape:
    """Rows of `query_len` new tokens, the last of `context_len`.

    The first `shared_prefix_len` tokens of a context lie in the same blocks for all rows.
    """

    batch_size: int = 64
    context_len: int = 1024
    query_len: int = 1
    shared_prefix_len: int = 0
    block_size: int = 16
    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    num_layers: int = 8

    def check(self) -> None:
        """ConfigError naming the number that cannot be."""
        for name in self.__slots__:
            least = 0 if name == "shared_prefix_len" else 1
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)}: give at least {least}")
        if self.query_len > self.context_len:
            raise ConfigError(
                f"query_len={self.query_len} is more than context_len={self.context_len}"
            )
        before = self.context_len - self.query_len
        if self.shared_prefix_len > before or self.shared_prefix_len % self.block_size:
            raise ConfigError(
                f"shared_prefix_len={self.shared_prefix_len} must be whole blocks of "
                f"{self.block_size}, among the {before} tokens before the new ones"
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}"
            )

    @property
    def shared_blocks(self) -> int:
        return self.shared_prefix_len // self.block_size

    @property
    def own_blocks(self) -> int:
        """Of each row, beside the shared ones."""
        return -(-self.context_len // self.block_size) - self.shared_blocks

    @property
    def num_blocks(self) -> int:
        return self.shared_blocks + self.batch_size * self.own_blocks

    def spec(self, dtype: torch.dtype) -> KVSpec:
        return KVSpec(
            self.num_layers,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.num_blocks,
            self.block_size,
            dtype,
        )

    def layer_bytes(self, dtype: torch.dtype) -> int:
        """K and V of all positions of a layer; those of the prefix once."""
        tokens = self.shared_prefix_len + self.batch_size * (
            self.context_len - self.shared_prefix_len
        )
        return 2 * tokens * self.num_kv_heads * self.head_dim * dtype.itemsize

    @property
    def layer_operations(self) -> int:
        """4 D for each query head and each position that its token sees."""
        first = self.context_len - self.query_len + 1
        seen = (first + self.context_len) * self.query_len // 2
        return 4 * self.head_dim * self.num_heads * self.batch_size * seen

    def tables(self, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """The blocks of each row [batch, blocks] out of `ids` [num_blocks], in their order."""
        common, own = np.split(ids, [self.shared_blocks])
        rows = own.reshape(self.batch_size, self.own_blocks)
        return np.hstack([np.tile(common, (self.batch_size, 1)), rows])


@dataclass(frozen=True, slots=True)
class TableTimes:
    """Of one layer, the fastest tenth."""

    seconds: float
    gb_per_s: float
    gflop_per_s: float
    bandwidth_share: float  # of the machine's, in the same run
    matrix_share: float
    floor_share: float  # the least time that both allow over the time taken


@dataclass(frozen=True, slots=True)
class AttentionTimes:
    backend: str
    limits: Limits
    ordered: TableTimes  # the blocks of a row lie one after the other
    shuffled: TableTimes
    shared_spans: int  # read once for several rows
    rounds: int


def measure_attention(
    shape: Shape, dtype: torch.dtype, backend: str = "auto", *, seconds: float = 3.0, memory: int
) -> AttentionTimes:
    """Layers are visited in turn, so that K/V come from memory where the caches do not hold them.

    memory: bytes that the K/V may take. ConfigError if that is too little, for a shape that cannot
    be, and for a backend that is not here.
    """
    shape.check()
    if not 0 < seconds < 1e6:
        raise ConfigError(f"seconds={seconds}: give more than 0")
    spec = shape.spec(dtype)
    size = (spec.num_blocks + 1) * stored_block_bytes(backend, spec)
    if size > memory:
        raise ConfigError(
            f"K/V of batch_size={shape.batch_size}, context_len={shape.context_len}, "
            f"num_layers={shape.num_layers} take {size / 2**20:,.0f} MiB, and "
            f"{memory / 2**20:,.0f} may be used: give less of one of them"
        )
    store = filled_backend(backend, spec)
    ids = np.arange(1, spec.num_blocks + 1, dtype=np.int32)
    shuffled = np.random.default_rng(0).permutation(ids)
    yardstick = Yardstick(dtype)
    calls = {
        "ordered": attention_step(store, shape.tables(ids), shape.context_len, shape.query_len),
        "shuffled": attention_step(
            store, shape.tables(shuffled), shape.context_len, shape.query_len
        ),
        **yardstick.calls(),
    }
    taken = in_turns(calls, seconds=seconds)
    limits = yardstick.limits(taken)

    def times(name: str) -> TableTimes:
        each = fast(taken[name]) / shape.num_layers
        read, done = shape.layer_bytes(dtype) / each, shape.layer_operations / each
        return TableTimes(
            each,
            read / 1e9,
            done / 1e9,
            read / limits.read_bandwidth,
            done / limits.matrix_rate,
            limits.floor(shape.layer_bytes(dtype), shape.layer_operations) / each,
        )

    spans = store.plan(
        step_batch(shape.tables(ids), shape.context_len, shape.query_len, shape.block_size)
    )
    return AttentionTimes(
        store.name,
        limits,
        times("ordered"),
        times("shuffled"),
        spans.num_shared_spans,
        len(taken["ordered"]),
    )


def filled_backend(name: str, spec: KVSpec) -> AttentionBackend:
    """A backend full of random K/V: the same in every block."""
    backend = make_backend(name, spec)
    layout = replace(spec, num_blocks=1)
    shape = (1, layout.num_layers, 2, layout.block_size, layout.num_kv_heads, layout.head_dim)
    content = torch.randn(shape).to(spec.dtype)
    every = np.arange(1, spec.num_blocks + 1, dtype=np.int32)
    for ids in np.array_split(every, max(1, spec.num_blocks // _FILL_BLOCKS)):
        backend.write_blocks(ids, content.expand(len(ids), -1, -1, -1, -1, -1).contiguous())
    return backend


def step_batch(
    tables: npt.NDArray[np.int32], context: int | Sequence[int], query: int, block_size: int
) -> AttentionBatch:
    """Rows whose last `query` tokens are new. tables [rows, width]; context: of all, or of each."""
    contexts = np.broadcast_to(np.asarray(context, np.int32), len(tables)).copy()
    positions = contexts[:, None] - query + np.arange(query)
    blocks = np.take_along_axis(tables, positions // block_size, axis=1).astype(np.int64)
    slots = (blocks * block_size + positions % block_size).reshape(-1)
    return AttentionBatch(np.full(len(tables), query, np.int32), contexts, tables, slots)


def attention_step(
    backend: AttentionBackend,
    tables: npt.NDArray[np.int32],
    context: int | Sequence[int],
    query: int,
    layers: int | None = None,
) -> Callable[[], None]:
    """A call that plans a step and runs `layers` of it, going round those that the store has."""
    spec = backend.spec
    batch = step_batch(tables, context, query, spec.block_size)
    tokens = len(batch.slots)
    q = torch.randn(tokens, spec.num_heads, spec.head_dim).to(spec.dtype)
    k, v = torch.randn(2, tokens, spec.num_kv_heads, spec.head_dim).to(spec.dtype)

    def step() -> None:
        plan = backend.plan(batch)
        for layer in range(layers or spec.num_layers):
            backend.run(plan, layer % spec.num_layers, q, k, v)

    return step
