"""Sizes in bytes as people write them."""

from __future__ import annotations

import re

from pagedkv.errors import ConfigError

_UNITS = ("", "k", "m", "g", "t")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


def parse_bytes(text: str, option: str) -> int:
    """Bytes from "536870912", "512MiB" (powers of 1024) or "2GB" (powers of 1000).

    ConfigError names the option or setting.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[3] and not match[2]):
        raise ConfigError(f"{option}={text!r} is not a size: give bytes, 512MiB or 2GB")
    base = 1024 if match[3] else 1000
    size = float(match[1]) * base ** _UNITS.index(match[2].lower())
    if size >= 2**63:
        raise ConfigError(f"{option}={text[:80]!r} is more than 2**63 bytes: give less")
    return int(size)
