"""The page of all settings, made of the models: `python tests/docs/settings_page.py` writes it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from pagedkv.server.layers import SECTIONS, flag, variable
from pagedkv.server.print_settings import toml_value
from pagedkv.server.settings import PublicPrefix, SloClass, TenantSettings

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "server_configuration.md"

_HEAD = """\
# Settings of `pagedkv serve`

Made of the models in [`settings.py`](../../src/pagedkv/server/settings.py) by
`python tests/docs/settings_page.py`; a test compares the two.

A value comes from the first of these that has one: a flag, a variable `PAGEDKV_*`, the TOML file of
`--config FILE` or `$PAGEDKV_CONFIG`, the default. `pagedkv serve --print-config` prints all values
in force with the place of each, as TOML that can be read again. A name that is no setting is an
error.

* Sizes are bytes, or text such as `"512MiB"` (powers of 1024) and `"2GB"` (powers of 1000).
* `"none"` is no value: no bound, or what the description says.
* In a variable, several values have commas between them; a flag is repeated. Of a switch such as
  `--metrics` there is also `--no-metrics`; a variable is `1` or `0`.
* Paths are relative to the folder in which the server starts.

```toml
[server]
port = 8000

[engine]
kv_cache_memory = "2GiB"
policy = "fair"

[tenants.alice]
key_hashes = ["sha256:f5b5d0e2ad9b9ba80b5a7ee1c9a9f2d6b4e0b1e9f21fb9aa0d37e0c3b1f7d6aa"]
weight = 2
slo_class = "chat"

[slo_classes.chat]
ttft_slo_ms = 500

[[public_prefixes]]
text = "You are a helpful assistant."
```
"""


def render() -> str:
    parts = [_HEAD]
    for section, model in SECTIONS.items():
        parts += [f"## `[{section}]`\n", *_table(model, with_flags=True)]
    parts += ["## `[tenants.NAME]`\n", *_table(TenantSettings)]
    parts += ["## `[slo_classes.NAME]`\n", *_table(SloClass)]
    parts += ["## `[[public_prefixes]]`\n", *_table(PublicPrefix)]
    return "\n".join(parts)


def _table(model: type[BaseModel], with_flags: bool = False) -> Iterator[str]:
    yield f"{inspect.cleandoc(model.__doc__ or '')}\n"
    columns = ["setting", "default", *(["flag", "variable"] if with_flags else []), "meaning"]
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for name, field in model.model_fields.items():
        cells = [f"`{name}`", f"`{toml_value(field.default)}`"]
        if with_flags:
            cells += [f"`{flag(name)}`", f"`{variable(name)}`"]
        yield f"| {' | '.join([*cells, field.description or ''])} |"
    yield ""


if __name__ == "__main__":
    PAGE.write_text(render())
