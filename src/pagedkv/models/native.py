"""The native extension as the models see it: used where it is built, demanded, or left out."""

from __future__ import annotations

from types import ModuleType

from pagedkv.attention.isa import forced_isa
from pagedkv.attention.native import import_native
from pagedkv.errors import ConfigError

KERNELS = ("auto", "native", "torch")


def find_native(kernels: str = "auto", deterministic: bool = False) -> ModuleType | None:
    """The extension that computes a model's layers, or None: torch computes them.

    kernels: "native" demands the extension, "torch" does without it, "auto" takes it where it is
    built. `deterministic` demands it, too. Raises ConfigError for another name, for what is
    demanded and not there, and for a wrong PAGEDKV_ISA.
    """
    if kernels not in KERNELS:
        raise ConfigError(f"kernels={kernels!r}: use one of {', '.join(KERNELS)}")
    if kernels == "torch":
        if deterministic:
            raise ConfigError(
                "deterministic=True needs the native kernels, torch's results depend on the batch: "
                "set kernels='native', or deterministic=False"
            )
        return None
    try:
        native = import_native()
    except ImportError as error:
        if kernels == "auto" and not deterministic:
            return None
        demand, way_out = "kernels='native'", "kernels='torch'"
        if deterministic:
            demand, way_out = "deterministic=True", "deterministic=False"
        raise ConfigError(
            f"{demand} needs the native extension, which is not built "
            f"({error}): install pagedkv with a C++ compiler at hand, or set {way_out}"
        ) from error
    forced_isa(native)
    return native
