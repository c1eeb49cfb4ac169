"""The errors every room raises. Each message carries the numbers and the remedy.

Errors that concern the block pool are in `pagedkv.cache.errors`.
"""

from __future__ import annotations


class PagedKVError(Exception):
    """Base of every error that pagedkv raises on purpose."""


class ReportError(PagedKVError):
    """The message is a report of several lines, to be shown as it is."""


class ConfigError(PagedKVError, ValueError):
    """A setting cannot work: names the setting, its value and what to change."""


class ModelError(PagedKVError, ValueError):
    """A model cannot be loaded or would be computed wrongly: names the field or file."""


class RequestError(PagedKVError, ValueError):
    """A request can never run as given: names the field, its value and the limit."""


class GrammarError(PagedKVError):
    """A sample cannot go on under its grammar, or the grammar library failed on it."""


class OverloadError(RequestError):
    """The queue is full: the same request may be accepted later. Names the bound and what waits.

    retry_after: seconds until it may be, as far as that is known.
    """

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DrainingError(RequestError):
    """The engine finishes what it has and takes nothing more."""


class EngineDeadError(PagedKVError):
    """The core runs no more steps. `kind`: the name of the exception that ended it."""

    def __init__(self, reason: str, kind: str) -> None:
        super().__init__(f"the engine has ended ({kind}): {reason}")
        self.reason, self.kind = reason, kind


class ShutdownError(PagedKVError):
    """The server is about to end: it takes no requests, or gives up one that does not end."""


class MissingExtraError(PagedKVError, ImportError):
    """A package of an extra is not installed: names it and the extra."""
