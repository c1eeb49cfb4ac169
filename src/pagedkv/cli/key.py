"""`pagedkv key new`: a key for a tenant, shown once."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from pagedkv.errors import ConfigError


def new(
    tenant: Annotated[str, typer.Argument(help="Whose key it is.", metavar="TENANT")],
) -> None:
    """Make an API key. It is printed once and stored nowhere; its hash goes into the settings."""
    from pagedkv.server.keys import key_hash, new_key

    if not tenant.strip() or not tenant.isprintable():
        raise ConfigError(f"TENANT={tenant!r} must be a name that can be printed")
    key = new_key()
    print(f"# The key of {tenant}, shown this once: {key}")
    print("# For the file of settings:")
    print(f"[tenants.{json.dumps(tenant, ensure_ascii=False)}]")
    print(f'key_hashes = ["{key_hash(key)}"]')
