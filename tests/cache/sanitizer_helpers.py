"""Errors of the sanitizer: what they say, and where they say that it happened."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pagedkv.cache import BlockManager
from pagedkv.cache.errors import Misuse, SanitizerError


class Caught:
    """What `caught` caught: `error` is there after its block."""

    error: SanitizerError

    def functions(self, what: str) -> list[str]:
        """Functions of tests, innermost first, that the report names for "allocated" and so on."""
        text = str(self.error) + "\n"
        parts = re.findall(rf"{what}[^\n]* called from\n((?: +/.*\n)+)", text)
        assert len(parts) == 1, f"{what} is {len(parts)} times in {text}"
        return re.findall(r"/test\w*\.py:\d+ in (\w+)", parts[0])


@contextmanager
def caught(
    kind: Misuse, *, block: int | None = None, seq: int | None = None, step: int | None = None
) -> Iterator[Caught]:
    """The block raises SanitizerError with exactly these facts."""
    result = Caught()
    with pytest.raises(SanitizerError) as info:
        yield result
    result.error = info.value
    facts = info.value.kind, info.value.block, info.value.seq, info.value.step
    assert facts == (kind, block, seq, step), str(info.value)
    assert str(info.value).startswith(f"{kind}: ")


def sanitized(num_blocks: int = 8, block_size: int = 2, step: int | None = 5) -> BlockManager:
    """A watched manager, in an engine's step."""
    m = BlockManager(num_blocks, block_size, sanitize=True)
    assert m.sanitizer is not None
    if step is not None:
        m.sanitizer.begin_step(step)
    return m
