"""How many blocks the pool gets, and the figures that a start-up prints."""

from __future__ import annotations

from dataclasses import dataclass

from pagedkv.engine.machine import MachineMemory
from pagedkv.engine.processor import GIVEN_ON_REQUEST
from pagedkv.errors import ConfigError
from pagedkv.scheduling.config import check_integer

# Share of the memory that is available once the weights are loaded. The rest is for activations,
# logits (budget x vocabulary x 4 bytes) and whatever else runs in the container.
KV_SHARE = 0.4

SMALL_PAGES = (
    "weights and K/V lie in small pages, which are slower to read: `pagedkv doctor` says what to do"
)

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def pool_blocks(
    block_bytes: int,
    memory: MachineMemory,
    *,
    num_blocks: int | None = None,
    kv_cache_memory: int | None = None,
    engines: int = 1,
) -> int:
    """Blocks of the pool: as many as asked for, or as fit in `kv_cache_memory` bytes.

    By default `KV_SHARE` of the available memory, which `engines` have in common. One block less
    than fits, since the store holds the null block too. Raises ConfigError with the numbers if
    not even one fits, or if the pool would be larger than the memory that is available.
    """
    if num_blocks is not None and kv_cache_memory is not None:
        raise ConfigError(
            f"num_blocks={num_blocks} and kv_cache_memory={kv_cache_memory} say the same thing "
            "twice: give one of them"
        )
    if num_blocks is not None:
        setting = f"num_blocks={num_blocks}"
        check_integer("num_blocks", num_blocks, 1)
    else:
        limit = kv_cache_memory
        if limit is None:
            limit = int(memory.available * KV_SHARE / engines)
        check_integer("kv_cache_memory", limit, 0)
        setting = f"kv_cache_memory={limit}"
        num_blocks = limit // block_bytes - 1
        if num_blocks < 1:
            raise ConfigError(
                f"{setting} bytes hold no pool: one block and the null block take "
                f"{2 * block_bytes} bytes; give more memory or a smaller block_size"
            )
    size = (num_blocks + 1) * block_bytes
    if size > memory.available:
        fits = memory.available // block_bytes - 1
        raise ConfigError(
            f"{setting} takes {show_bytes(size)} and {show_bytes(memory.available)} of "
            f"{show_bytes(memory.limit)} are available: give at most "
            + (f"num_blocks={fits}" if fits >= 1 else "a smaller block_size, or free memory")
        )
    return num_blocks


@dataclass(frozen=True, slots=True)
class StartupReport:
    """What an engine runs with; `lines()` is what the command line prints."""

    model: str
    dtype: str
    bytes_per_token: int
    block_size: int
    num_blocks: int
    block_bytes: int
    max_model_len: int
    max_num_seqs: int
    memory: MachineMemory
    num_threads: int
    backend: str
    backend_reason: str
    linear_kernels: str
    sanitize: bool
    huge_pages: str | None  # see `processor.huge_page_mode`

    @property
    def longest_context(self) -> int:
        """Tokens of the longest sequence that the pool and the model allow."""
        return min(self.max_model_len, self.num_blocks * self.block_size)

    @property
    def concurrency(self) -> int:
        """Sequences of the longest context that fit at the same time."""
        blocks = -(-self.longest_context // self.block_size)
        return min(self.max_num_seqs, self.num_blocks // blocks)

    def lines(self) -> tuple[str, ...]:
        pool = (self.num_blocks + 1) * self.block_bytes
        return (
            f"{self.model}, {self.dtype}, {self.num_threads} threads; {self.backend_reason}; "
            f"linear layers {self.linear_kernels}",
            f"KV cache: {self.bytes_per_token:,} bytes a token, {self.num_blocks:,} blocks of "
            f"{self.block_size} tokens, {show_bytes(pool)} of {show_bytes(self.memory.available)} "
            "available",
            f"longest context {self.longest_context:,} tokens x {self.concurrency} at a time",
            *(() if self.huge_pages in GIVEN_ON_REQUEST else (SMALL_PAGES,)),
            *(("the sanitizer checks every use of a block",) if self.sanitize else ()),
        )


def show_bytes(size: int) -> str:
    """A size with the unit that fits: 1536 -> "1.5 KiB"."""
    value, unit = float(size), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{size} bytes" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"
