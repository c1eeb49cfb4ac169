"""Seconds and bytes with the unit that fits, and counts as people write them."""

from __future__ import annotations

import re
from decimal import Decimal

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


_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kmgtKMGT]?)")


def read_count(text: str) -> int:
    """A whole number: "1k" is 1000, "25.6k" 25600, "1K" 1024. ValueError for anything else."""
    match = _COUNT.fullmatch(str(text).strip())
    if match is None:
        raise ValueError(f"{str(text)[:40]!r} is no whole number, such as 500, 1k or 25.6k")
    digits, unit = match[1], match[2]
    power = "kmgt".index(unit.lower()) + 1 if unit else 0
    value = Decimal(digits) * (1024 if unit.isupper() else 1000) ** power
    if value != int(value) or (unit.isupper() and "." in digits):
        raise ValueError(f"{text!r} is no whole number: K, M, G and T take whole numbers only")
    return int(value)
