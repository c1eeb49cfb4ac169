"""Running the calls of a replay log again, without the engine and the model that made them."""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from pagedkv.cache.errors import SanitizerError
from pagedkv.cache.manager import BlockManager
from pagedkv.cache.sanitizer.recording import FORMAT, Call, from_json
from pagedkv.cache.sanitizer.sanitizer import REFUSALS
from pagedkv.cache.sanitizer.watch import Watch
from pagedkv.errors import ConfigError

_VERBS = frozenset(name for name in vars(Watch) if name[0] != "_" and name in vars(BlockManager))
_REPORTS = frozenset(
    {
        "begin_step",
        "check_copies",
        "check_writes",
        "check_reads",
        "check_blocks",
        "check_fills",
        "check_idle",
    }
)


class Replay(NamedTuple):
    """What came of it: calls made, the error they led to, and the report that was recorded.

    The recorded report names the call sites of the program that made the calls, the error those of
    the replay.
    """

    num_calls: int
    error: SanitizerError | None
    recorded: str | None

    @property
    def reproduced(self) -> bool:
        """Whether the calls led to what was recorded."""
        return self.error is not None and _head(str(self.error)) == _head(self.recorded)


def _head(report: str | None) -> str:
    """The line of a report that says what is wrong."""
    return (report or "").partition("\n")[0]


def replay(path: str | Path) -> Replay:
    """Restores the snapshot of a log and makes its calls, the sanitizer watching.

    Calls that the manager refused when they were recorded are refused again, and passed over.
    ConfigError: the file is no replay log, of another version, or damaged. OSError: unreadable.
    """
    header, calls, recorded = _read(Path(path))
    manager = _restore(header, path)
    for number, (name, args, kwargs) in enumerate(calls, 1):
        target = manager if name in _VERBS else manager.sanitizer
        try:
            getattr(target, name)(*args, **kwargs)
        except SanitizerError as error:
            return Replay(number, error, recorded)
        except Exception as error:
            if name in _VERBS and isinstance(error, REFUSALS):
                continue
            raise ConfigError(f"{path}: call {number}, {name}, is damaged: {error!r}") from error
    return Replay(len(calls), None, recorded)


def _read(path: Path) -> tuple[dict[str, Any], list[Call], str | None]:
    """The header, the calls and the error of a log."""
    first, _, body = path.read_text(errors="replace").partition("\n")
    header = _line(first, path, 1)
    if header.get("format") != FORMAT:
        raise ConfigError(f"{path} is no {FORMAT!r}: its format is {header.get('format')!r}")
    if zlib.crc32(body.encode()) != header.get("checksum"):
        raise ConfigError(f"{path} is damaged or cut off: its checksum is not that of its calls")
    lines = [_line(text, path, n) for n, text in enumerate(body.splitlines(), 2)]
    recorded = str(lines.pop()["error"]) if lines and "error" in lines[-1] else None
    return header, [_call(line, path, n) for n, line in enumerate(lines, 2)], recorded


def _line(text: str, path: Path, number: int) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: line {number} is damaged or cut off: {error}") from error
    if not isinstance(line, dict):
        raise ConfigError(f"{path}: line {number} is {text[:80]!r}, not a call")
    return line


def _call(line: dict[str, Any], path: Path, number: int) -> Call:
    name, args, kwargs = line.get("call"), line.get("args"), line.get("kwargs")
    if not isinstance(name, str) or name not in _VERBS | _REPORTS:
        raise ConfigError(f"{path}: line {number} calls {name!r}, which a replay log does not have")
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise ConfigError(f"{path}: line {number} is {str(line)[:80]!r}, not a call")
    try:
        return name, from_json(args), {key: from_json(value) for key, value in kwargs.items()}
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{path}: an argument in line {number} is damaged: {error}") from error


def _restore(header: dict[str, Any], path: str | Path) -> BlockManager:
    try:
        snapshot = base64.b64decode(header["snapshot"], validate=True)
        return BlockManager.restore(snapshot, sanitize=True)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: its snapshot cannot be restored: {error}") from error
