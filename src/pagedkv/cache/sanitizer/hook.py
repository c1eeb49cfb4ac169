"""How the sanitizer gets to see the calls of a BlockManager, and when there is one."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from pagedkv.errors import ConfigError

if TYPE_CHECKING:
    from pagedkv.cache.manager import BlockManager

_P = ParamSpec("_P")
_R = TypeVar("_R")

VARIABLE = "PAGEDKV_SANITIZE"


def asked_for_by_environment() -> bool:
    """Whether PAGEDKV_SANITIZE is 1. ConfigError unless it is 1, 0 or empty."""
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ConfigError(f"{VARIABLE}={value!r}: use 1 or 0")
    return value == "1"


def watched(
    method: Callable[Concatenate[BlockManager, _P], _R],
) -> Callable[Concatenate[BlockManager, _P], _R]:
    """Marks a call that changes something: the sanitizer, when there is one, runs it.

    A watched call makes no other watched call.
    """

    @functools.wraps(method)
    def call(self: BlockManager, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        if self.sanitizer is None:
            return method(self, *args, **kwargs)
        return self.sanitizer.call(method.__name__, method, args, kwargs)

    return call
