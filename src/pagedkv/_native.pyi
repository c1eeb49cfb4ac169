"""The C++ extension. Needs `import torch` first: it uses the OpenMP runtime that torch loaded.

A tensor argument is a CPU torch.Tensor or its capsule from `torch.utils.dlpack.to_dlpack`. The
capsule costs about 0.5 microseconds, the protocol of torch.Tensor about 6: where a call is made
once a layer, pass the capsule.
"""

import numpy as np
import numpy.typing as npt
import torch

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Tensor = object  # torch.Tensor or a DLPack capsule of one

class Store:
    def __init__(
        self, data: Tensor, num_heads: int, head_dim: int, scale: float, isa: str
    ) -> None: ...
    def run(
        self,
        plan: Plan,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
    ) -> None: ...
    def copy_blocks(self, copies: Int64) -> None: ...
    def read_blocks(self, ids: Int64, out: Tensor) -> None: ...
    def write_blocks(self, ids: Int64, data: Tensor) -> None: ...

class Plan:
    def __init__(
        self,
        store: Store,
        query_lens: Int32,
        context_lens: Int32,
        tables: Int32,
        slots: Int64,
        num_threads: int,
    ) -> None: ...
    @property
    def num_threads(self) -> int: ...
    @property
    def num_items(self) -> int: ...

def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """out[t, i] = silu(gate_up[t, i]) * gate_up[t, I + i]: [T, 2 * I] -> [T, I].

    float32 or bfloat16 (computed in float32, rounded once), last dimension contiguous. The bits
    of an element depend on its two inputs only, not on where it stands. `out` is the caller's.
    ValueError for other shapes or types.
    """

def allocate(bytes: int) -> torch.Tensor:
    """Zeroed uint8 [bytes], taken from the system on first touch, in huge pages where possible.

    Freed with the tensor. MemoryError when the address space is refused.
    """

def slot_offset(
    block: int, slot: int, head: int, num_kv_heads: int, block_size: int, padded_dim: int
) -> int:
    """Element offset of a slot within one layer's K (or V): the kernels' own index function."""

def padded_head_dim(head_dim: int) -> int:
    """Elements that the store keeps for a head of `head_dim`."""

def isa() -> str:
    """The code path picked for this machine: "scalar" or "avx2"."""

def available_isas() -> list[str]:
    """Code paths that this build has and this machine can run, slowest first."""

def cpu_features() -> dict[str, bool]:
    """What the processor and operating system offer, whether the build uses it or not."""

def max_threads() -> int:
    """Threads that a parallel region of the calling thread would use now."""

def count_threads() -> int:
    """Threads that did take part in a parallel region just now."""
