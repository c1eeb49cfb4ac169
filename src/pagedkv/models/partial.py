"""Folders that are filled under a hidden name, and the ones that a killed process left behind."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Where the file system has no locks of folders, age tells what nobody fills any more.
ABANDONED_AFTER = 24 * 3600.0  # seconds


@contextmanager
def partial_folder(parent: Path, prefix: str, name: str) -> Iterator[Path]:
    """A new folder .NAME-XXXX of `parent`, removed at the end unless it was renamed.

    It is locked meanwhile; the system drops the lock of a process that dies. First the abandoned
    folders .PREFIX*, of whatever name, are removed. OSError if `parent` cannot be written.
    """
    for other in sorted(parent.glob(f".{prefix}*")):
        _remove_if_abandoned(other)
    folder, lock = _locked_folder(parent, name)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _locked_folder(parent: Path, name: str) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=parent))
        try:
            lock = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            continue
        with suppress(OSError):  # see ABANDONED_AFTER
            fcntl.flock(lock, fcntl.LOCK_EX)
        # Another process may have locked and removed it before we did.
        if folder.is_dir():
            return folder, lock
        os.close(lock)


def _remove_if_abandoned(folder: Path) -> None:
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # gone meanwhile, or another user's
        return
    try:
        if _is_abandoned(lock):
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def _is_abandoned(folder: int) -> bool:
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:  # its process lives
        return False
    except OSError:  # no locks here
        return time.time() - os.fstat(folder).st_mtime > ABANDONED_AFTER
    return True
