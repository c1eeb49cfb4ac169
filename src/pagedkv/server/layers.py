"""Where settings come from: defaults < one TOML file < variables PAGEDKV_* < flags.

Every value keeps the place from which it came, and a wrong one is named with it. Names are never
guessed: one that is no setting is an error that says which is nearest.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, ValidationError

from pagedkv.errors import ConfigError
from pagedkv.server.setting_types import SECRETS, flag_names
from pagedkv.server.settings import (
    ClusterSettings,
    EngineSettings,
    PublicPrefix,
    ServerSettings,
    ServeSettings,
    SloClass,
    TenantSettings,
)

PREFIX = "PAGEDKV_"
CONFIG_VARIABLE = "PAGEDKV_CONFIG"
DEFAULT = "default"
SECTIONS: Mapping[str, type[BaseModel]] = MappingProxyType(
    {"server": ServerSettings, "engine": EngineSettings, "cluster": ClusterSettings}
)
_TABLES: Mapping[str, type[BaseModel]] = MappingProxyType(
    {"tenants": TenantSettings, "slo_classes": SloClass}
)
_PREFIXES = "public_prefixes"
# Variables that mean something elsewhere: to build, tests, threads, models, kernels, benchmarks.
_OTHERS = (
    CONFIG_VARIABLE,
    "PAGEDKV_NUM_THREADS",
    "PAGEDKV_TRACES",
    "PAGEDKV_REQUIRE_NATIVE",
    "PAGEDKV_CACHE",
    "PAGEDKV_ISA",
    "PAGEDKV_PEERS",
)
# What Kubernetes sets in every container of a namespace that has a Service called pagedkv.
_SERVICE_LINK = re.compile(r"PAGEDKV_(SERVICE_(HOST|PORT)\w*|PORT_\d+_(TCP|UDP)\w*)")
_SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://")
# What users of other servers look for under another name, or in vain: why, and the setting to use.
FOREIGN: Mapping[str, tuple[str, str | None]] = MappingProxyType(
    {
        "swap_space": ("blocks that leave the pool go to host memory", "host_memory"),
        "cpu_offload_gb": ("weights are not offloaded, K/V are", "host_memory"),
        "kv_offloading_size": ("it has another name", "host_memory"),
        "gpu_memory_utilization": ("the pool's memory is given in bytes", "kv_cache_memory"),
        "mem_fraction_static": ("the pool's memory is given in bytes", "kv_cache_memory"),
        "kv_cache_memory_bytes": ("it has another name", "kv_cache_memory"),
        "num_gpu_blocks_override": ("it has another name", "num_blocks"),
        "page_size": ("it has another name", "block_size"),
        "context_length": ("it has another name", "max_model_len"),
        "model_path": ("it has another name", "model"),
        "max_running_requests": ("it has another name", "max_num_seqs"),
        "preemption_mode": ("it has another name", "recovery"),
        "enable_chunked_prefill": ("prefill is always chunked", "max_num_batched_tokens"),
        "data_parallel_size": ("it has another name", "workers"),
        "tensor_parallel_size": ("one process computes the whole model", None),
    }
)


@dataclass(frozen=True, slots=True)
class Loaded:
    """The settings in force; origins: from (section, name ...) to the place of the value.

    What is not in `origins` is a default.
    """

    settings: ServeSettings
    origins: Mapping[tuple[str, ...], str]

    def origin(self, *path: str) -> str:
        return self.origins.get(path, DEFAULT)


def load_settings(
    file: Path | None, environ: Mapping[str, str], flags: Mapping[str, object]
) -> Loaded:
    """Reads all layers. file: from --config; None: $PAGEDKV_CONFIG, if it is set.

    flags: values by the setting's name: text, True or False, or a list of texts. Reads no model.
    ConfigError names the place of what is wrong, and the nearest name for one that does not exist.
    """
    if file is None and environ.get(CONFIG_VARIABLE):
        file = Path(environ[CONFIG_VARIABLE])
    layers = _Layers()
    if file is not None:
        _read_file(file, layers)
    _read_environment(environ, layers)
    for name, value in flags.items():
        layers.put(section_of(name), name, value, flag(name, value))
    try:
        settings = ServeSettings.model_validate(layers.values)
    except ValidationError as error:
        raise ConfigError(_reason(error)) from None
    for prefix in settings.public_prefixes:
        prefix.content()
    return Loaded(settings, layers.origins)


def section_of(name: str) -> str:
    """The section, such as server, of a setting."""
    return next(section for section, model in SECTIONS.items() if name in model.model_fields)


def scalar_names() -> list[str]:
    """Settings that have a flag and a variable of their own."""
    return [name for model in SECTIONS.values() for name in model.model_fields]


def variable(name: str) -> str:
    return PREFIX + name.upper()


def flag(name: str, value: object = None) -> str:
    """The option by which a setting is known; that of a switch which turns it off, for False."""
    field = SECTIONS[section_of(name)].model_fields[name]
    return flag_names(name, field)[0].split("/")[-1 if value is False else 0]


class _Layers:
    """Checked values, later layers over earlier ones, and where each came from."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.origins: dict[tuple[str, ...], str] = {}

    def put(self, section: str, name: str, text: object, place: str) -> None:
        """A value that is text (or True, False, a list of texts) as the setting's type."""
        value = _checked(SECTIONS[section], name, text, place, typed=False)
        self.values.setdefault(section, {})[name] = value
        self.origins[section, name] = place


def _checked(model: type[BaseModel], name: str, value: object, place: str, *, typed: bool) -> Any:
    """One value as its setting's type; typed: with a type of its own, which has to fit."""
    try:
        if typed:
            # A date or a time, which JSON has not, is no setting's type, nor is {}.
            given = json.dumps({name: value}, default=lambda _: {})
            section = model.model_validate_json(given, strict=True)
        else:
            section = model.model_validate({name: value})
    except ValidationError as error:
        shown = place if name in SECRETS else f"{place}={value!r:.200}"
        raise ConfigError(_reason(error, shown)) from None
    return getattr(section, name)


def _reason(error: ValidationError, shown: str = "") -> str:
    """What is wrong, beginning with the place and the value."""
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    if not isinstance(cause, ConfigError):
        message = first["msg"].partition(", unable")[0]
        return f"{shown} {re.sub('^(Input|String) should', 'must', message)}"
    if not shown:
        return str(cause)
    # Checks of a room below begin with the setting's name there and its value.
    named = re.match(r"\w+=('.*?'|[^ ]*)", str(cause))
    return shown + str(cause)[named.end() :] if named else f"{shown}: {cause}"


def _read_file(file: Path, layers: _Layers) -> None:
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the file {str(file)!r} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{file} is not TOML: {error}") from error
    for key, table in content.items():
        place = f"{file}: {key}"
        if key in SECTIONS:
            values = _read_table(SECTIONS[key], table, place)
            for name in values:
                layers.origins[key, name] = f"{place}.{name}"
            layers.values[key] = values
        elif key in _TABLES:
            layers.values[key] = {
                name: _read_table(_TABLES[key], inner, f"{place}.{name}")
                for name, inner in _expect_table(table, place).items()
            }
            layers.origins |= {
                (key, outer, name): f"{place}.{outer}.{name}"
                for outer, inner in layers.values[key].items()
                for name in inner
            }
        elif key == _PREFIXES:
            if not isinstance(table, list):
                raise ConfigError(f"{place} must be a list: write [[{_PREFIXES}]]")
            layers.values[key] = [
                _read_table(PublicPrefix, entry, f"{place}[{i}]") for i, entry in enumerate(table)
            ]
            layers.origins[(key,)] = place
        else:
            refuse_name(f"{file}: {key}", key, [*SECTIONS, *_TABLES, _PREFIXES], str)


def _read_table(model: type[BaseModel], table: object, place: str) -> dict[str, Any]:
    values = {}
    for name, value in _expect_table(table, place).items():
        if name not in model.model_fields:
            refuse_name(f"{place}.{name}", name, model.model_fields, str)
        if name == "api_key":
            raise ConfigError(
                f"{place}.{name}: keys in clear do not belong in a file: make one with "
                "`pagedkv key new` and give its hash to a tenant"
            )
        values[name] = _checked(model, name, value, f"{place}.{name}", typed=True)
    return values


def _expect_table(table: object, place: str) -> Mapping[str, Any]:
    if not isinstance(table, Mapping):
        raise ConfigError(f"{place}={table!r:.200} must be a table: write [{place.split(': ')[1]}]")
    return table


def _read_environment(environ: Mapping[str, str], layers: _Layers) -> None:
    names = {variable(name): name for name in scalar_names()}
    for key in sorted(environ):
        value = environ[key]
        if not key.startswith(PREFIX) or key in _OTHERS or _SERVICE_LINK.fullmatch(key):
            continue
        if key == variable("port") and _SERVICE_ADDRESS.match(value):
            continue
        if key not in names:
            name = key.removeprefix(PREFIX).lower()
            refuse_name(f"the variable {key}", name, names.values(), variable)
        if value:
            layers.put(section_of(names[key]), names[key], value, key)


def refuse_name(place: str, name: str, known: Iterable[str], show: Callable[[str], str]) -> None:
    """ConfigError for a name that is no setting. show: how a setting is written there."""
    if name in FOREIGN:
        why, instead = FOREIGN[name]
        remedy = "" if instead is None else f": use {show(instead)}"
        raise ConfigError(f"{place} is no setting here, {why}{remedy}")
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {show(near[0])}?" if near else f"there are {', '.join(sorted(names))}"
    raise ConfigError(f"{place} is no setting: {hint}")
