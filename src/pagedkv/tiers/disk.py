"""Blocks on disk: a file of fixed slots, and a SQLite index that says what stands in them.

A slot and its row of the index are written in one transaction. A process that is killed in between
leaves the row of the block that stood there before; its checksum tells, and nothing is trusted that
does not match it. Processes that share a folder take turns by SQLite's own lock; one that reads a
slot while another overwrites it sees a wrong checksum, that is, a miss.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from pagedkv.errors import ConfigError
from pagedkv.tiers.interface import TierStats, UInt8, check_payload
from pagedkv.tiers.names import BlockName

_LOG = logging.getLogger("pagedkv")

VERSION = 1
_BUSY_SECONDS = 5.0  # how long to wait for another process
# One row a slot that was ever used; those that are empty have no name and were used longest ago.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (version INTEGER, block_bytes INTEGER, fingerprint BLOB);
CREATE TABLE IF NOT EXISTS slots (
    slot INTEGER PRIMARY KEY, name BLOB UNIQUE, tokens BLOB, checksum INTEGER, used INTEGER
);
CREATE INDEX IF NOT EXISTS by_use ON slots (used);
"""
_EMPTY = "name = NULL, tokens = NULL, checksum = NULL, used = 0"


class DiskTier:
    """A `Tier` in a folder that outlives the process, of at most `capacity` bytes of payloads.

    fingerprint: as for `Namer`: a folder that was made with another one is not touched.
    durable: `put` returns after the disk has the block (fsync); else after the system has it, which
        a killed process survives and a power failure may not.

    A folder that cannot be used, or that fails later, turns the tier off: a warning is logged,
    `off` says why, and everything is a miss from then on. ConfigError unless one block fits.
    """

    def __init__(
        self,
        folder: str | Path,
        capacity: int,
        block_bytes: int,
        fingerprint: bytes,
        durable: bool = False,
    ) -> None:
        self._slots = capacity // block_bytes if block_bytes > 0 else 0
        if self._slots < 1:
            raise ConfigError(
                f"a disk tier of {capacity} bytes holds no block of {block_bytes} bytes: give more"
            )
        self.block_bytes, self.stats = block_bytes, TierStats()
        self.off: str | None = None
        self._folder, self._durable = Path(folder), durable
        self._file = -1
        self._index: sqlite3.Connection | None = None
        self._used: dict[BlockName, None] = {}  # hits whose time of use is not written yet
        with self._guarded():
            self._open(fingerprint)

    def contains(self, names: Sequence[BlockName]) -> list[bool]:
        found = [False] * len(names)
        with self._guarded():
            if self._index is not None:
                query = "SELECT 1 FROM slots WHERE name = ?"
                found = [
                    self._index.execute(query, (name,)).fetchone() is not None for name in names
                ]
        return found

    def get(self, name: BlockName, tokens: bytes, out: UInt8) -> bool:
        check_payload(out, self.block_bytes)
        with self._guarded():
            if self._index is not None and self._read(self._index, name, tokens, out):
                self.stats.hits += 1
                return True
        self.stats.misses += 1
        return False

    def put(self, name: BlockName, tokens: bytes, data: UInt8) -> bool:
        check_payload(data, self.block_bytes)
        with self._guarded():
            if self._index is not None:
                self._write(self._index, name, tokens, data)
                return True
        self.stats.refused += 1
        return False

    def num_blocks(self) -> int:
        with self._guarded():
            if self._index is not None:
                query = "SELECT COUNT(*) FROM slots WHERE name IS NOT NULL"
                return int(self._index.execute(query).fetchone()[0])
        return 0

    def close(self) -> None:
        with self._guarded():
            if self._index is not None:
                with self._transaction(self._index):
                    self._write_uses(self._index)
        self._release()

    # ---- opening and failing ------------------------------------------------------------------

    def _open(self, fingerprint: bytes) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self._folder / "blocks.bin", os.O_RDWR | os.O_CREAT, 0o600)
        index = sqlite3.connect(
            self._folder / "index.db",
            timeout=_BUSY_SECONDS,
            isolation_level=None,
            check_same_thread=False,
        )
        self._index = index
        self._share(index)
        index.execute(f"PRAGMA synchronous = {'FULL' if self._durable else 'OFF'}")
        with self._transaction(index):
            for statement in _SCHEMA.split(";")[:-1]:
                index.execute(statement)
            mine = VERSION, self.block_bytes, fingerprint
            there = index.execute("SELECT version, block_bytes, fingerprint FROM facts").fetchone()
            if there is None:
                index.execute("INSERT INTO facts VALUES (?, ?, ?)", mine)
            elif there != mine:
                raise ValueError(
                    f"it was made for blocks of {there[1]} bytes by version {there[0]} of the "
                    "format, or for another model: use a folder of its own"
                )
            # The capacity may have been another one.
            index.execute("DELETE FROM slots WHERE slot >= ?", (self._slots,))

    def _share(self, index: sqlite3.Connection) -> None:
        """Switches to the write-ahead log. SQLite itself does not wait for its turn here."""
        last = time.monotonic() + _BUSY_SECONDS
        while True:
            try:
                index.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > last:
                    raise
            time.sleep(0.01)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Turns the tier off when the folder fails."""
        try:
            yield
        except (OSError, sqlite3.Error, ValueError, TypeError, OverflowError) as error:
            # The last three: a damaged index may hold anything in any column.
            self.off = (
                f"the disk tier in {self._folder} is off: {error}: the engine goes on without it; "
                "for the next start make room there, or remove the folder if it is damaged"
            )
            _LOG.warning("%s", self.off)
            self._release()

    def _release(self) -> None:
        index, self._index = self._index, None
        if index is not None:
            index.close()
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    @contextmanager
    def _transaction(self, index: sqlite3.Connection) -> Iterator[None]:
        """One writer at a time, over all processes; nothing of it stays if it fails."""
        index.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            if index.in_transaction:
                index.execute("ROLLBACK")
            raise
        index.execute("COMMIT")

    # ---- blocks -------------------------------------------------------------------------------

    def _read(self, index: sqlite3.Connection, name: BlockName, tokens: bytes, out: UInt8) -> bool:
        row = index.execute(
            "SELECT slot, tokens, checksum FROM slots WHERE name = ?", (name,)
        ).fetchone()
        if row is None or row[1] != tokens:
            return False
        slot, _, checksum = row
        data = os.pread(self._file, self.block_bytes, slot * self.block_bytes)
        if len(data) != self.block_bytes or _checksum(name, data) != checksum:
            with self._transaction(index):
                index.execute(
                    f"UPDATE slots SET {_EMPTY} WHERE slot = ? AND name = ? AND checksum = ?",
                    (slot, name, checksum),
                )
            self.stats.damaged += 1
            return False
        out[:] = np.frombuffer(data, np.uint8)
        self._used[name] = None
        return True

    def _write(
        self, index: sqlite3.Connection, name: BlockName, tokens: bytes, data: UInt8
    ) -> None:
        with self._transaction(index):
            self._used[name] = None
            self._write_uses(index)
            if index.execute("SELECT 1 FROM slots WHERE name = ?", (name,)).fetchone():
                return
            slot, before = self._take_slot(index)
            payload = data.tobytes()
            written = os.pwrite(self._file, payload, slot * self.block_bytes)
            if written != self.block_bytes:
                raise OSError(f"{written} of {self.block_bytes} bytes were written: is it full?")
            if self._durable:
                os.fsync(self._file)
            index.execute(
                "INSERT OR REPLACE INTO slots VALUES (?, ?, ?, ?, ?)",
                (slot, name, tokens, _checksum(name, payload), self._next_use(index)),
            )
        self.stats.stored += 1
        self.stats.evicted += before is not None

    def _take_slot(self, index: sqlite3.Connection) -> tuple[int, bytes | None]:
        """An empty slot, else one behind all others, else the one used longest ago; its name."""
        oldest = index.execute("SELECT slot, name FROM slots ORDER BY used LIMIT 1").fetchone()
        (new,) = index.execute("SELECT COALESCE(MAX(slot) + 1, 0) FROM slots").fetchone()
        if new < self._slots and (oldest is None or oldest[1] is not None):
            return new, None
        slot, name = oldest
        return slot, name

    def _write_uses(self, index: sqlite3.Connection) -> None:
        used, self._used = self._used, {}
        for name in used:
            index.execute("UPDATE slots SET used = ? WHERE name = ?", (self._next_use(index), name))

    def _next_use(self, index: sqlite3.Connection) -> int:
        (last,) = index.execute("SELECT COALESCE(MAX(used), 0) FROM slots").fetchone()
        return int(last) + 1


def _checksum(name: BlockName, data: bytes) -> int:
    """Of a payload under its name: a whole block of another name is not taken for it either."""
    return zlib.crc32(data, zlib.crc32(name))
