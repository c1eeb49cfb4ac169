"""The tiers below the device that an engine is asked to use."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from pagedkv.attention.interface import KVSpec
from pagedkv.engine.machine import MachineMemory, machine_memory
from pagedkv.errors import ConfigError
from pagedkv.models.decoder import Decoder
from pagedkv.models.fingerprint import kv_fingerprint
from pagedkv.scheduling.config import check_flag, check_integer
from pagedkv.scheduling.tiering import LowerTiers
from pagedkv.tiers.disk import DiskTier
from pagedkv.tiers.host import HostTier
from pagedkv.tiers.interface import Tier
from pagedkv.tiers.names import Namer


@dataclass(frozen=True, slots=True)
class TierConfig:
    """Where blocks go that leave the device; K/V found there is loaded instead of computed.

    host_memory: most bytes in host memory; 0 for no host tier.
    disk_folder: a folder for blocks that outlives the process, and that several processes with the
        same model may use at once; None for no disk tier. disk_memory: most bytes in it.
    write_through: a block counts as stored when the disk has it (fsync). Else it goes to the disk
        when it leaves host memory, at the latest when the engine is closed.
    ConfigError names the setting that cannot be.
    """

    host_memory: int = 0
    disk_folder: str | Path | None = None
    disk_memory: int = 0
    write_through: bool = False

    def __post_init__(self) -> None:
        check_integer("host_memory", self.host_memory, 0)
        check_integer("disk_memory", self.disk_memory, 0)
        check_flag("write_through", self.write_through)
        if self.disk_folder is not None and not isinstance(self.disk_folder, (str, Path)):
            raise ConfigError(f"disk_folder={self.disk_folder!r:.200} must be a path")
        if (self.disk_folder is None) != (self.disk_memory == 0):
            raise ConfigError(
                f"disk_folder={str(self.disk_folder)!r} and disk_memory={self.disk_memory}: a disk "
                "tier takes a folder and a size, give both"
            )
        if not self.host_memory and self.disk_folder is None:
            raise ConfigError("no tier is asked for: set host_memory or disk_folder")
        if self.write_through and self.disk_folder is None:
            raise ConfigError("write_through=True writes to the disk: set disk_folder")


def check_tiers(config: object) -> None:
    """ConfigError unless it is None, or a TierConfig whose folder can be written."""
    if config is None:
        return
    if not isinstance(config, TierConfig):
        raise ConfigError(f"tiers={config!r:.200} must be a pagedkv.TierConfig(...), or None")
    if config.disk_folder is not None:
        _check_folder(Path(config.disk_folder))


def open_tiers(
    config: TierConfig, decoder: Decoder, spec: KVSpec, kernels: str
) -> tuple[Tier, LowerTiers]:
    """The uppermost tier, and what the scheduler is to know of it.

    kernels: see `kv_fingerprint`. ConfigError: it cannot hold a block.
    """
    # Names of host memory alone mean nothing outside the process.
    alone = config.disk_folder is None
    fingerprint = b"this process" if alone else kv_fingerprint(decoder, spec, kernels)
    tier = _open(config, spec.block_bytes, fingerprint, machine_memory())
    sizes = {"host": config.host_memory, "disk": config.disk_memory}
    tiers = tuple(name for name, size in sizes.items() if size)
    return tier, LowerTiers(tier, Namer(fingerprint), spec.block_bytes, tiers)


def _open(config: TierConfig, block_bytes: int, fingerprint: bytes, memory: MachineMemory) -> Tier:
    if config.host_memory > memory.available:
        raise ConfigError(
            f"host_memory={config.host_memory} bytes of a host tier are more than the "
            f"{memory.available} that are available: give less"
        )
    disk = None
    if config.disk_folder is not None:
        disk = DiskTier(
            config.disk_folder, config.disk_memory, block_bytes, fingerprint, config.write_through
        )
    if not config.host_memory and disk is not None:
        return disk
    return HostTier(config.host_memory, block_bytes, disk, config.write_through)


def _check_folder(folder: Path) -> None:
    """A folder that was never right is a mistake; one that fails later only turns the tier off."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"disk_folder={str(folder)!r} cannot be written: {error.strerror}: give another folder"
        ) from error
