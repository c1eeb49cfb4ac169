"""Which instruction set the native kernels run: this machine's best, or what PAGEDKV_ISA says.

The variable is read here and nowhere else, and holds for attention, linear layers and activations
alike. A family of kernels that has no path of that name takes its fastest one below it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import ModuleType

from pagedkv.errors import ConfigError

ISA_VARIABLE = "PAGEDKV_ISA"


def forced_isa(native: ModuleType) -> str | None:
    """What PAGEDKV_ISA forces; None where it is not set, or "auto".

    Raises ConfigError for a name that this build has not or this machine cannot run.
    """
    asked = os.environ.get(ISA_VARIABLE, "auto")
    known = available_isas(native)
    if asked in ("", "auto"):
        return None
    if asked not in known:
        raise ConfigError(
            f"{ISA_VARIABLE}={asked!r}: this machine and build have {', '.join(known)}; "
            "unset it, or set auto, for the best"
        )
    return asked


def available_isas(native: ModuleType) -> list[str]:
    """Instruction sets that can be forced, slowest first: linear layers have a path for each."""
    isas: list[str] = native.available_linear_isas()
    return isas


def attention_isa(native: ModuleType) -> str:
    """The path of attention and activations. ConfigError as forced_isa."""
    return _path(native, native.available_isas())


def linear_isa(native: ModuleType) -> str:
    """The path of linear layers. ConfigError as forced_isa."""
    return _path(native, native.available_linear_isas())


def _path(native: ModuleType, family: Sequence[str]) -> str:
    forced = forced_isa(native)
    if forced is None:
        return family[-1]
    known = available_isas(native)
    allowed = known[: known.index(forced) + 1]
    return [name for name in family if name in allowed][-1]
