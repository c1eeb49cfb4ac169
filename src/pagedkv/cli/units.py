"""Seconds and bytes with the unit that fits."""

from __future__ import annotations

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_time(seconds: float) -> str:
    """Milliseconds below a second: 0.25 is "250 ms"."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.9995 else f"{seconds:,.2f} s"


def format_size(value: float) -> str:
    """Bytes with the unit that fits: 524288 is "512 KiB"."""
    unit = 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.4g} {_UNITS[unit]}"
