"""The native extension as the models see it: used where it is built, demanded by a mode."""

from __future__ import annotations

from types import ModuleType

from pagedkv.attention.native import import_native
from pagedkv.errors import ConfigError


def find_native(deterministic: bool) -> ModuleType | None:
    """The extension, or None where it is not built; then `deterministic` raises ConfigError."""
    try:
        return import_native()
    except ImportError as error:
        if not deterministic:
            return None
        raise ConfigError(
            "deterministic=True needs the native extension, which is not built "
            f"({error}): install pagedkv with a C++ compiler at hand, or set deterministic=False"
        ) from error
