"""API keys, and whose they are.

A key is 256 random bits. Only its SHA-256 is kept. A slow, salted hash as for passwords is not
needed: it makes guessing dear where secrets are few and chosen by people, and nobody guesses 256
random bits, nor are two of them equal by chance. So a key can be checked at each request. Keys that
were chosen by hand (`--api-key`) are hashed in the same way and are as good as they are long.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable

from pagedkv.server.settings import DEFAULT_TENANT, ServeSettings

_MARK = "pkv-"
_HASH = "sha256:"


def new_key() -> str:
    """A key that nobody has had before: 256 random bits as text."""
    return _MARK + secrets.token_urlsafe(32)


def key_hash(key: str) -> str:
    """What is kept of a key: "sha256:" and 64 hexadecimal digits."""
    return _HASH + hashlib.sha256(key.encode()).hexdigest()


class KeyRing:
    """The hashes of all keys, and whose they are. Immutable.

    hashes: pairs of a hash as `key_hash` gives it, and a tenant.
    """

    def __init__(self, hashes: Iterable[tuple[str, str]]) -> None:
        self._digests = tuple(
            (bytes.fromhex(text.removeprefix(_HASH)), tenant) for text, tenant in hashes
        )

    @classmethod
    def of(cls, settings: ServeSettings) -> KeyRing:
        """The keys of all tenants, and those of `api_key`, which are the default tenant's."""
        plain = (key.get_secret_value() for key in settings.server.api_key)
        return cls(
            [(key_hash(key), DEFAULT_TENANT) for key in plain]
            + [(text, name) for name, one in settings.tenants.items() for text in one.key_hashes]
        )

    def __len__(self) -> int:
        return len(self._digests)

    def tenant(self, key: bytes) -> str | None:
        """Whose key this is; None if it is nobody's.

        It is compared with every key there is, each in constant time, so that the time tells
        nothing of the keys, nor of which of them it is.
        """
        digest, found = hashlib.sha256(key).digest(), None
        for known, tenant in self._digests:
            if hmac.compare_digest(known, digest):
                found = tenant
        return found
