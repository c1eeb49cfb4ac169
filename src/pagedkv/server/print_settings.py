"""The settings in force as TOML that can be read again, each with the place it came from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from pagedkv.server.layers import Loaded


def as_toml(loaded: Loaded) -> str:
    """Sections server, engine and cluster whole; of tenants, classes and prefixes what there is.

    Keys in clear are not shown: they have to be given again. Hashes of keys are, since they lead
    back to no key.
    """
    settings = loaded.settings
    lines = ["# Settings in force, and where each came from."]
    for section in ("server", "engine", "cluster"):
        lines += ["", f"[{section}]", *_lines(loaded, getattr(settings, section), section)]
    for name, tenant in settings.tenants.items():
        lines += ["", f"[tenants.{toml_value(name)}]", *_lines(loaded, tenant, "tenants", name)]
    for name, slo in settings.slo_classes.items():
        lines += [
            "",
            f"[slo_classes.{toml_value(name)}]",
            *_lines(loaded, slo, "slo_classes", name),
        ]
    for prefix in settings.public_prefixes:
        lines += ["", f"[[public_prefixes]]  # {loaded.origin('public_prefixes')}"]
        lines += [f"{name} = {toml_value(value)}" for name, value in prefix if value is not None]
    return "\n".join(lines) + "\n"


def _lines(loaded: Loaded, section: BaseModel, *path: str) -> Iterator[str]:
    for name, value in section:
        origin = loaded.origin(*path, name)
        if name != "api_key":
            yield f"{name} = {toml_value(value)}  # {_one_line(origin)}"
        elif value:
            yield f"# {name}: {len(value)} given by {origin}, not shown"
        else:
            yield f"# {name}: none"


def toml_value(value: object) -> str:
    """A value as TOML has it; None is the word "none"."""
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, Path):
        value = str(value)
    # JSON's escapes are TOML's too; TOML wants one more character escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _one_line(text: str) -> str:
    """A comment ends with the line and takes no control character."""
    return "".join(c if c.isprintable() else "?" for c in text)
