"""An LLM takes part in moves: what it says of itself, and how K/V reach it."""

from __future__ import annotations

from pagedkv.engine.core import EngineCore
from pagedkv.engine.executor import ModelExecutor
from pagedkv.engine.moves import Moves
from pagedkv.engine.transports import SharedMemoryTransport, Transport
from pagedkv.errors import ConfigError
from pagedkv.transfer.limits import TransferLimits
from pagedkv.transfer.messages import Hello


def open_moves(
    core: EngineCore,
    worker: str,
    boot: int,
    transport: Transport | None = None,
    limits: TransferLimits | None = None,
) -> Moves:
    """Lets requests of a core with a model move to other workers, and from them.

    core: of an LLM with max_moves > 0. worker: its name. boot: larger than at its last start.
    transport: None: shared memory, between processes of one host. Reads every weight once.
    ConfigError: the core cannot take part.
    """
    executor = core.executor
    if not isinstance(executor, ModelExecutor):
        raise ConfigError(f"a {type(executor).__name__} has no K/V that could be moved")
    spec = executor.spec
    ours = Hello(
        worker=worker,
        boot=boot,
        model=executor.model_digest(),
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=str(spec.dtype).removeprefix("torch."),
        block_size=spec.block_size,
        num_blocks=spec.num_blocks,
    )
    return Moves(core, executor.payloads, transport or SharedMemoryTransport(), ours, limits)
