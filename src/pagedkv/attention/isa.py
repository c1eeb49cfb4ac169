"""Which instruction set the native kernels run: this machine's best, or what PAGEDKV_ISA says.

The variable is read here and nowhere else, and holds for attention and the decoder alike.
"""

from __future__ import annotations

import os
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
    """Instruction sets that can be forced, slowest first."""
    isas: list[str] = native.available_isas()
    return isas


def chosen_isa(native: ModuleType) -> str:
    """The path of the native kernels. ConfigError as forced_isa."""
    return forced_isa(native) or available_isas(native)[-1]
