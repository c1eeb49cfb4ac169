"""What may go to a terminal."""

from __future__ import annotations

import sys

# Controls of ASCII and Latin-1, but for line feed and tab: a terminal would obey them.
_CONTROLS = {c: f"\\x{c:02x}" for c in (*range(32), *range(127, 160)) if chr(c) not in "\n\t"}


def printable(text: str) -> str:
    """Text as stdout may have it: on a terminal no control character of a model's gets through."""
    return text.translate(_CONTROLS) if sys.stdout.isatty() else text
