"""What an LLM is put together from, piece by piece; each refuses what cannot work."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from pagedkv.cache import BlockManager
from pagedkv.engine.machine import THREADS_VARIABLE, num_threads
from pagedkv.engine.memory import show_bytes
from pagedkv.errors import ConfigError
from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.tenants import Tenant

# Settings of SchedulerConfig that have no argument of their own here.
_SCHEDULING = tuple(
    field.name
    for field in fields(SchedulerConfig)
    if field.name
    not in (
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_model_len",
        "eos_token_ids",
        "vocab_size",
        "public_prefixes",
    )
)


def scheduler_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of SchedulerConfig that are not arguments of LLM.

    ConfigError for another name, or a value that cannot be.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(f"scheduling={given!r:.200} must be a dict of settings by name")
    for name in given:
        if name not in _SCHEDULING:
            raise ConfigError(f"scheduling has {name!r:.200}: there are {', '.join(_SCHEDULING)}")
    settings = dict(given)
    if isinstance(settings.get("tenants"), Mapping):
        settings["tenants"] = tuple(
            (name, Tenant(weight=granted) if isinstance(granted, (int, float)) else granted)
            for name, granted in settings["tenants"].items()
        )
    SchedulerConfig(1, 1, 2, **settings)  # before a model is loaded
    return settings


def make_manager(
    limits: SchedulerConfig,
    num_blocks: int,
    block_size: int,
    width: int,
    available: int,
    *,
    more_rows: int,
    prefix_caching: bool,
    sanitize: bool,
    replay_log: str | Path | None,
) -> BlockManager:
    """The block pool, with tables of `width` blocks. available: bytes of memory that are left.

    more_rows: of the table, beyond those of sequences that run.

    ConfigError: the tables do not fit, or the replay log cannot be written.
    """
    table_bytes = 4 * (limits.seats + more_rows) * width
    if table_bytes > available:
        raise ConfigError(
            f"max_num_seqs={limits.max_num_seqs} sequences of {width} blocks take a block table of "
            f"{show_bytes(table_bytes)} and {show_bytes(available)} are available: give "
            "fewer, or a smaller max_model_len"
        )
    manager = BlockManager(
        num_blocks,
        block_size,
        prefix_caching=prefix_caching,
        max_seqs=limits.seats + more_rows,
        max_blocks_per_seq=width,
        sanitize=sanitize,
    )
    if replay_log is not None and manager.sanitizer is not None:
        try:
            manager.sanitizer.record(replay_log)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"replay_log={str(replay_log)!r} cannot be written: {error}"
            ) from error
    return manager


def set_threads() -> int:
    """Lowers torch's threads to what the container grants; a smaller number of the user's stays."""
    threads = num_threads()
    if THREADS_VARIABLE not in os.environ:
        threads = min(threads, torch.get_num_threads())
    torch.set_num_threads(threads)
    return threads
