"""Calls of a manager as a file that reproduces an error: a snapshot, and the calls since.

One JSON value a line: first what is to be restored, then the calls, then the error that was found.
"""

from __future__ import annotations

import base64
import json
import operator
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from pagedkv.cache.manager import BlockManager

FORMAT = "pagedkv replay log 1"
# When as much has been recorded, a new snapshot is taken; what is before the one before it goes.
MAX_BYTES = 16 * 2**20
_CALL_BYTES = 200  # a call's own share, beside its arrays and lists


Call = tuple[str, Sequence[Any], dict[str, Any]]  # verb or report, its arguments


class _Segment(NamedTuple):
    snapshot: bytes
    so_far: list[Call]  # what the snapshot does not have
    calls: list[Call]


class Recording:
    """The last calls of one manager, at least `max_bytes` of them. Owns the file at `path`.

    so_far: gives the calls that, after a restored snapshot, stand for what a snapshot has not.
    """

    def __init__(
        self,
        path: Path,
        manager: BlockManager,
        so_far: Callable[[], list[Call]],
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._path, self._manager, self._so_far = path, manager, so_far
        self._max_bytes = max_bytes
        self._older: _Segment | None = None
        self._newer = _Segment(manager.snapshot(), so_far(), [])
        self._bytes = 0
        self._write([])  # fails now if it cannot be written

    def add(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Notes a call that is about to be made. Takes copies of what it is given."""
        if self._bytes > self._max_bytes:
            self._older = self._newer
            self._newer = _Segment(self._manager.snapshot(), self._so_far(), [])
            self._bytes = 0
        args = [_copy(value) for value in args]
        kwargs = {key: _copy(value) for key, value in kwargs.items()}
        self._newer.calls.append((name, args, kwargs))
        self._bytes += _CALL_BYTES + sum(_size(v) for v in (*args, *kwargs.values()))

    def save(self, report: str) -> str:
        """Writes the file, the report last.

        Returns a line that says where it is, or why it could not be written.
        """
        try:
            self._write([{"error": report}])
        except (OSError, ValueError) as reason:
            return f"the replay log could not be written: {reason}"
        return f"the calls that led here are in {self._path}: pagedkv replay {self._path}"

    def _write(self, end: list[dict[str, Any]]) -> None:
        first = self._older or self._newer
        calls = first.so_far + first.calls + (self._newer.calls if self._older else [])
        lines = [{"call": name, "args": args, "kwargs": kwargs} for name, args, kwargs in calls]
        body = "".join(json.dumps(line, default=_to_json) + "\n" for line in [*lines, *end])
        header = {
            "format": FORMAT,
            "checksum": zlib.crc32(body.encode()),
            "snapshot": base64.b64encode(first.snapshot).decode(),
        }
        self._path.write_text(json.dumps(header) + "\n" + body)


def listed(value: Any) -> Any:
    """An iterable that may be read only once, or cannot be written down, as a list."""
    if isinstance(value, Iterable) and not isinstance(value, (np.ndarray, Sequence, bytearray)):
        return list(value)
    return value


def _copy(value: Any) -> Any:
    """A value that later changes of the caller's cannot reach."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray)):
        return [_copy(item) for item in value]
    return _unreadable(value) if isinstance(value, dict) else value


def _size(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, list):
        return sum(8 if isinstance(item, int) else 8 + _size(item) for item in value)
    return len(value) if isinstance(value, (str, bytes)) else 8


def _to_json(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and value.itemsize <= 8:
        return {"array": value.dtype.str, "values": value.tolist(), "shape": list(value.shape)}
    if isinstance(value, (bytes, bytearray)):
        return {"hex": bytes(value).hex()}
    if isinstance(value, np.floating):
        return float(value)
    try:
        return operator.index(value)
    except TypeError:
        return _unreadable(value)


def _unreadable(value: Any) -> dict[str, str]:
    """For an argument that the manager refuses; the call will be refused again."""
    return {"unreadable": repr(value)[:200]}


def from_json(value: Any) -> Any:
    """Inverse of how arguments are written."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if isinstance(value, dict):
        if "hex" in value:
            return bytes.fromhex(value["hex"])
        if "array" in value:
            return np.array(value["values"], value["array"]).reshape(value["shape"])
        return value.get("unreadable")
    return value
