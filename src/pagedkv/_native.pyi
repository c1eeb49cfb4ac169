"""The C++ extension. Needs `import torch` first: it uses the OpenMP runtime that torch loaded.

A tensor argument is a CPU torch.Tensor or its capsule from `torch.utils.dlpack.to_dlpack`. The
capsule costs about 0.5 microseconds, the protocol of torch.Tensor about 6: where a call is made
once a layer, pass the capsule.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Tensor = object  # torch.Tensor or a DLPack capsule of one

class Store:
    def __init__(
        self,
        memory: Tensor,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: str,
        scale: float,
        isa: str,
    ) -> None:
        """K/V of num_blocks blocks and the null block in `memory`, which is kept alive.

        memory: uint8 [2 * L * (num_blocks + 1) * B * G * padded_head_dim * size of dtype], zeroed.
        ValueError for another size, a dtype that is neither "float32" nor "bfloat16", or an isa
        that is not one of available_isas().
        """

    def run(
        self,
        plan: Plan,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
    ) -> None:
        """Writes k, v [T, G, D] to the plan's slots, then attends: q [T, H, D] to out, as large.

        All in the store's dtype, contiguous in their last dimension; `out` is the caller's.
        ValueError, nothing done, for other shapes or dtypes or a layer that is not in the store.
        The plan is one of this store; that is not checked.
        """

    def copy_blocks(self, copies: Int64) -> None:
        """The first `filled` slots of source to destination: [c, 3], all layers, K and V.

        Ids and numbers of slots are not checked.
        """

    def read_blocks(self, ids: Int64, out: Tensor) -> None:
        """Blocks `ids` [n] to out [n, L, 2, B, G, D], contiguous, the caller's.

        ValueError for another shape; ids, and that `out` has the store's dtype, are not checked.
        """

    def write_blocks(self, ids: Int64, data: Tensor) -> None:
        """The inverse of `read_blocks`."""

class Plan:
    def __init__(
        self,
        store: Store,
        query_lens: Int32,
        context_lens: Int32,
        tables: Int32,
        slots: Int64,
        num_threads: int,
        share: bool,
    ) -> None:
        """`share`: spans in the same blocks for several rows are read once for all; same bits."""

    @property
    def num_threads(self) -> int: ...
    @property
    def num_items(self) -> int:
        """Units of work that the threads of a layer share."""

    @property
    def num_shared_spans(self) -> int:
        """Spans that are read once for two or more rows, counted once a group of rows."""

class PackedMatrix:
    """[rows, columns] of "float32" or "bfloat16" in panels of outputs, zero until written.

    Owns its memory, taken from the system on first touch, in huge pages where possible.
    ValueError for an empty shape or another dtype, MemoryError when the address space is refused.
    """

    def __init__(self, rows: int, columns: int, dtype: str) -> None: ...
    def write_rows(self, first: int, source: Tensor) -> None:
        """Rows [first, first + n) become source [n, columns]: the matrix's dtype, rows contiguous.

        ValueError, nothing written, for another shape or dtype or for rows that do not exist.
        """

    def gather(self, ids: Tensor, out: Tensor) -> None:
        """out[i] = row ids[i], exact: int64 [n] -> [n, columns]; ValueError for unknown rows."""

    @property
    def num_bytes(self) -> int: ...

class Linear:
    """x -> x W^T + bias; shares the weight, copies the bias (float32 [rows])."""

    def __init__(self, weight: PackedMatrix, bias: Tensor | None, isa: str) -> None:
        """`isa` is one of available_isas(), else ValueError."""

    def run(self, x: Tensor, out: Tensor) -> None:
        """[T, columns] -> out [T, rows], the caller's; both in the weight's dtype, T may be 0.

        Rows are contiguous in their last dimension. float32 accumulation in one order over the
        columns, rounded once: the bits of out[t, n] depend on x[t], W[n], bias[n] and the isa
        only. ValueError for other shapes, dtypes or strides.
        """

class LayerWeights:
    """Shares the matrices; copies norms ([hidden], [head_dim]) and biases, float32 each.

    ValueError for another shape or type.
    """

    def __init__(
        self,
        *,
        input_norm: Tensor,
        qkv: PackedMatrix,
        output: PackedMatrix,
        post_norm: Tensor,
        gate: PackedMatrix,
        up: PackedMatrix,
        down: PackedMatrix,
        qkv_bias: Tensor | None,
        output_bias: Tensor | None,
        gate_bias: Tensor | None,
        up_bias: Tensor | None,
        down_bias: Tensor | None,
        query_norm: Tensor | None,
        key_norm: Tensor | None,
    ) -> None: ...

class Decoder:
    """All layers of a decoder and its head. `isa` is one of available_isas().

    ValueError for shapes or types that do not fit each other.
    """

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        epsilon: float,
        layers: list[LayerWeights],
        norm: Tensor,
        head: PackedMatrix,
        isa: str,
    ) -> None: ...
    def forward(
        self,
        store: Store,
        plan: Plan,
        embedded: Tensor,
        cos: Tensor,
        sin: Tensor,
        wanted: Int64,
        logits: Tensor,
        after_layer: Callable[[int, object, object, object, object], object] | None,
        best: Tensor | None,
    ) -> None:
        """One step: writes K/V through the plan, fills `logits`, float32 [m, V], the caller's.

        embedded: [T, hidden] in the weights' type. cos, sin: float32 [T, head_dim / 2], contiguous.
        wanted: the m tokens, of 0..T-1, whose logits are asked for. `after_layer` is called with
        the layer, q, k, v and what attention made of them, tensors [T, heads, head_dim] that must
        not be kept; what it raises ends the step. best: int64 [m], filled with the first of the
        largest logits of each row, NaN above all. ValueError, nothing done, for other shapes, types
        or a store of another model. The residual stream is float32, what a matrix multiplies is
        rounded once to the weights' type: the bits of a token's logits depend on the token and the
        K/V of its positions only.
        """

    def profile(self) -> dict[str, float]:
        """Seconds of the first thread in each part of all steps so far, its waiting included."""

def allocate(bytes: int, touched: bool = False) -> torch.Tensor:
    """Zeroed uint8 [bytes], in huge pages where possible.

    Taken from the system as it is touched first; `touched`: now, by all threads. Freed with the
    tensor. MemoryError when the address space is refused.
    """

def slot_offset(
    block: int,
    slot: int,
    head: int,
    num_kv_heads: int,
    block_size: int,
    padded_dim: int,
    dtype: str,
) -> int:
    """Offset in its layer of the first element of a slot's key: the kernels' own index function."""

def padded_head_dim(head_dim: int) -> int:
    """Elements that the store keeps for a head of `head_dim`."""

def available_isas() -> list[str]:
    """Code paths of all kernels that this build has and this machine can run, slowest first."""

def cpu_features() -> dict[str, bool]:
    """What the processor and operating system offer, whether the build uses it or not."""

def max_threads() -> int:
    """Threads that a parallel region of the calling thread would use now."""

def count_threads() -> int:
    """Threads that did take part in a parallel region just now."""
