"""Ray itself: one of our own on this machine, or a cluster that is there."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from pagedkv.errors import ConfigError, MissingExtraError

# Bytes. Payloads between workers of one host go through shared memory of their own.
_OBJECT_STORE = 128 * 2**20
# Read when Ray is imported, or by the processes that it starts. No figures leave the machine;
# SIGTERM remains the server's; a runtime on one machine listens at 127.0.0.1 alone, which Ray does
# by itself only where it does not believe in clusters; workers are as urgent as this process, else
# a step on all cores stands still for whatever else the machine does.
_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1"}
_ALONE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_worker_niceness": "0"}
_REMEDY = (
    "start a cluster there with `ray start --head`, or leave ray_address out to run on this "
    "machine alone"
)
_KNOCK = 5.0  # seconds


def start_ray(address: str | None, num_workers: int) -> Any:
    """Ray, initialised. address: of a cluster, "host:port" or "auto"; None: one is started here.

    MissingExtraError: it is not installed. ConfigError: there is no cluster, or Ray did not start.
    """
    os.environ.update(_ENVIRONMENT if address else _ENVIRONMENT | _ALONE)
    try:
        import ray
    except ModuleNotFoundError:
        raise MissingExtraError('ray is not installed: pip install "pagedkv[cluster]"') from None
    if address is not None:
        _knock(address)
    try:
        if address is None:
            ray.init(
                address="local",
                num_cpus=num_workers,
                object_store_memory=_OBJECT_STORE,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        else:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        raise ConfigError(
            f"ray_address={address!r} cannot be reached ({_line(error)}): {_REMEDY}"
        ) from None
    except (ValueError, RuntimeError, OSError, TimeoutError) as error:
        what = "Ray did not start" if address is None else f"ray_address={address!r} is refused"
        raise ConfigError(f"{what}: {_line(error)}") from None
    return ray


def share_nodes(
    nodes: Sequence[Mapping[str, Any]], num_workers: int, wanted: int | None, gpus: int
) -> int:
    """CPUs of each worker, all alike: `wanted`, or the most with which all have room.

    nodes: as of `ray.nodes`; they are shared with nobody. gpus: of each worker. ConfigError: there
    is no room for so many workers.
    """
    there = [node["Resources"] for node in nodes if node["Alive"]]

    def room(cpus: int) -> int:
        places = 0
        for node in there:
            by_cpu, by_gpu = int(node.get("CPU", 0)) // cpus, int(node.get("GPU", 0))
            places += min(by_cpu, by_gpu // gpus) if gpus else by_cpu
        return places

    most = max((int(node.get("CPU", 0)) for node in there), default=0)
    for cpus in range(most, 0, -1) if wanted is None else [wanted]:
        if room(cpus) >= num_workers:
            return cpus
    each = wanted or 1
    raise ConfigError(
        f"{num_workers} workers of {each} CPUs{f' and {gpus} GPU' if gpus else ''} each: the nodes "
        f"of the Ray cluster have room for {room(each)}; add nodes, or give fewer workers"
        + ("" if each == 1 else " or a smaller worker_threads")
    )


def _knock(address: str) -> None:
    """ConfigError where nobody listens: Ray itself would go on trying for minutes."""
    host, _, port = address.rpartition(":")
    if "://" in address or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), _KNOCK).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"ray_address={address!r} cannot be reached ({error}): {_REMEDY}"
        ) from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
