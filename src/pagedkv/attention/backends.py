"""Choosing and making an attention backend."""

from __future__ import annotations

from pagedkv.attention.gather import GatherBackend
from pagedkv.attention.interface import AttentionBackend, KVSpec
from pagedkv.attention.isa import ISA_VARIABLE, chosen_isa, forced_isa
from pagedkv.attention.native import NativeBackend, import_native
from pagedkv.attention.native import stored_block_bytes as native_block_bytes
from pagedkv.attention.reference import ReferenceBackend
from pagedkv.errors import ConfigError

BACKENDS = ("native", "gather", "reference")
REBUILD = "install a C++20 compiler and reinstall pagedkv, or use attention_backend='gather'"


def choose_backend(name: str = "auto") -> tuple[str, str]:
    """The backend that `name` means here and, in one line, why.

    "auto" is native where the extension imports, else gather. Raises ConfigError for an unknown
    name, for one that was asked for but is not available, and for a wrong PAGEDKV_ISA.
    """
    if name not in ("auto", *BACKENDS):
        raise ConfigError(f"attention_backend={name!r}: use 'auto' or one of {BACKENDS}")
    if name in ("gather", "reference"):
        return name, f"attention backend {name}: asked for"
    try:
        native = import_native()
    except ImportError as error:
        if name == "native":
            raise ConfigError(
                f"attention_backend='native' is not available ({error}): {REBUILD}"
            ) from error
        return "gather", f"attention backend gather: the native kernels are missing ({error})"
    how = "asked for" if name == "native" else "the native kernels are installed"
    forced = forced_isa(native)
    if forced is not None:
        how += f"; {ISA_VARIABLE}={forced}"
    return "native", f"attention backend {backend_kernels('native')}: {how}"


def backend_kernels(name: str) -> str:
    """Backend `name` of those that are available, and the instruction set of native's path."""
    return f"native ({chosen_isa(import_native())})" if name == "native" else name


def stored_block_bytes(name: str, spec: KVSpec) -> int:
    """Bytes of one block in the store of backend `name`."""
    native = choose_backend(name)[0] == "native"
    return native_block_bytes(spec) if native else spec.block_bytes


def make_backend(
    name: str,
    spec: KVSpec,
    *,
    scale: float | None = None,
    deterministic: bool = False,
    isa: str | None = None,
    preallocate: bool = False,
) -> AttentionBackend:
    """A backend with its own zeroed K/V store for `spec`.

    `name` as for `choose_backend`. `scale` multiplies the scores, 1/sqrt(D) when None.
    `deterministic` asks that a row's result bits never depend on the batch, the chunking or the
    block size: native always keeps that, gather cannot and is refused. `isa` forces a code path
    of native, one of the extension's available_isas(); None is as NativeBackend says.
    `preallocate` takes the store's memory from the system now rather than at the first writes.
    Raises ConfigError naming the setting.
    """
    chosen, reason = choose_backend(name)
    if isa is not None and chosen != "native":
        raise ConfigError(f"isa={isa!r} applies to the native backend only, not to {chosen}")
    if chosen == "native":
        return NativeBackend(spec, scale=scale, isa=isa, preallocate=preallocate)
    if chosen == "reference":
        return ReferenceBackend(spec, scale=scale, preallocate=preallocate)
    if deterministic:
        raise ConfigError(
            f"deterministic=True needs the native backend; {reason}. Use native, or "
            "deterministic=False"
        )
    return GatherBackend(spec, scale=scale, preallocate=preallocate)
