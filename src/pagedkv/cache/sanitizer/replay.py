"""Running the calls of a replay log again, without the engine and the model that made them."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any, NamedTuple

from pagedkv.cache.errors import SanitizerError
from pagedkv.cache.manager import BlockManager
from pagedkv.cache.sanitizer.recording import FORMAT, from_json
from pagedkv.cache.sanitizer.watch import Watch
from pagedkv.errors import ConfigError, PagedKVError

_VERBS = frozenset(name for name in vars(Watch) if name in vars(BlockManager))
_REPORTS = frozenset({"begin_step", "check_copies", "check_writes", "check_reads", "check_blocks"})


class Replay(NamedTuple):
    """What came of it: calls made, the error they led to, and the error that was recorded."""

    num_calls: int
    error: SanitizerError | None
    recorded: str | None

    @property
    def reproduced(self) -> bool:
        """Whether the calls led to what was recorded."""
        return self.error is not None and str(self.error).split("\n")[0] == self.recorded


def replay(path: str | Path) -> Replay:
    """Restores the snapshot of a log and makes its calls, the sanitizer watching.

    Calls that the manager refused when they were recorded are refused again, and passed over.
    ConfigError: the file is no replay log, of another version, or damaged. OSError: unreadable.
    """
    lines = _read(Path(path))
    manager = _restore(lines[0], path)
    recorded = None
    for number, line in enumerate(lines[1:]):
        if "error" in line:
            recorded = str(line["error"])
            continue
        try:
            _call(manager, line)
        except SanitizerError as error:
            last = lines[-1].get("error")
            return Replay(number + 1, error, None if last is None else str(last))
        except ConfigError:
            raise
        except (PagedKVError, ValueError, KeyError):
            continue
    return Replay(len(lines) - 1 - (recorded is not None), None, recorded)


def _read(path: Path) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for number, text in enumerate(path.read_text(errors="replace").splitlines(), 1):
        try:
            line = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{path}: line {number} is damaged or cut off: {error}") from error
        if not isinstance(line, dict):
            raise ConfigError(f"{path}: line {number} is {text[:80]!r}, not a call")
        lines.append(line)
    if not lines or lines[0].get("format") != FORMAT:
        found = lines[0].get("format") if lines else None
        raise ConfigError(f"{path} is no {FORMAT!r}: its format is {found!r}")
    return lines


def _restore(header: dict[str, Any], path: str | Path) -> BlockManager:
    try:
        snapshot = base64.b64decode(header["snapshot"], validate=True)
        return BlockManager.restore(snapshot, sanitize=True)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: its snapshot cannot be restored: {error}") from error


def _call(manager: BlockManager, line: dict[str, Any]) -> None:
    name, sanitizer = line.get("call"), manager.sanitizer
    args, kwargs = from_json(line.get("args")), line.get("kwargs")
    if not isinstance(args, list) or not isinstance(kwargs, dict) or sanitizer is None:
        raise ConfigError(f"{str(line)[:80]!r} is not a call")
    kwargs = {key: from_json(value) for key, value in kwargs.items()}
    if name in _VERBS:
        getattr(manager, name)(*args, **kwargs)
    elif name in _REPORTS:
        getattr(sanitizer, name)(*args, **kwargs)
    else:
        raise ConfigError(f"{name!r} is not a call that a replay log has")
