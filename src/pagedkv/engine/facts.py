"""What a front has to know of the core that it stands before."""

from __future__ import annotations

from dataclasses import dataclass

from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.messages import Add
from pagedkv.scheduling.validate import validate_add


@dataclass(frozen=True, slots=True)
class Facts:
    """config: of the core's scheduler. num_blocks: of the pool.

    sequence_blocks: most blocks that one sequence can have. folder: of the model, with its
    tokenizer; None: there is none. report: lines on how the core was set up. kv_bytes_per_token: of
    all layers; 0: not said. model: a digest of what the K/V of a token depend on; "": not said.
    """

    config: SchedulerConfig
    num_blocks: int
    block_size: int
    sequence_blocks: int
    folder: str | None = None
    report: tuple[str, ...] = ()
    kv_bytes_per_token: int = 0
    model: str = ""

    def validate(self, add: Add) -> None:
        """RequestError: the request can never run in this core. Its queue is not looked at."""
        validate_add(add, self.config, self.sequence_blocks, self.block_size)
