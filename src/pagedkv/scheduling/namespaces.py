"""Who shares K/V with whom: namespaces of tenants, and prefixes that all tenants share."""

from __future__ import annotations

from collections.abc import Sequence


def namespace_bytes(tenant: str | None, cache_salt: str | None) -> bytes | None:
    """The namespace of a pair, framed so that no two pairs have the same; None for no names."""
    if tenant is None and cache_salt is None:
        return None
    return _framed(tenant) + _framed(cache_salt)


def _framed(name: str | None) -> bytes:
    if name is None:
        return b"\0"
    data = name.encode()
    return b"\1" + len(data).to_bytes(8) + data


def public_length(prompt: tuple[int, ...], prefixes: Sequence[tuple[int, ...]]) -> int:
    """Tokens of the longest of the prefixes that the prompt begins with, whole; 0 for none."""
    return max((len(p) for p in prefixes if prompt[: len(p)] == p), default=0)
