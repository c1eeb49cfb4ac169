"""Types of settings: what is written in a file, a variable or a flag, and what becomes of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr
from pydantic.fields import FieldInfo

from pagedkv.engine.sizes import parse_bytes
from pagedkv.errors import ConfigError
from pagedkv.scheduling.config import SchedulerConfig

# Settings whose values are not shown when they are wrong: they may be secrets.
SECRETS = ("api_key", "key_hashes", "otlp_traces_endpoint")


@dataclass(frozen=True, slots=True)
class Flags:
    """What a setting is called on the command line, if not as in the file; the first is shown."""

    names: tuple[str, ...]


def flags(*names: str) -> Flags:
    return Flags(names)


def flag_names(name: str, field: FieldInfo) -> tuple[str, ...]:
    """The flags of a setting; those of a switch have two sides, such as --metrics/--no-metrics."""
    for mark in field.metadata:
        if isinstance(mark, Flags):
            return mark.names
    words = name.replace("_", "-")
    return (f"--{words}/--no-{words}" if field.annotation is bool else f"--{words}",)


def _none(value: object) -> object:
    """TOML and the shell have no None: there it is the word none."""
    return None if value == "none" else value


def _size(value: object) -> object:
    return parse_bytes(value, "size") if isinstance(value, str) else value


def _home(value: Path) -> Path:
    return value.expanduser()


def split(value: object) -> object:
    """Several texts: as one, with commas between them, or as a list."""
    if isinstance(value, str):
        value = value.split(",")
    return tuple(value) if isinstance(value, list) else value


def scheduling(name: str) -> AfterValidator:
    """The scheduler's own check of a setting."""

    def check(value: Any) -> Any:
        SchedulerConfig(1, 1, 2, **{name: value})
        return value

    return AfterValidator(check)


def _whole_keys(keys: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
    """A key that is empty would let everyone in who sends an empty one."""
    for key in keys:
        text = key.get_secret_value()
        if not text or any(c.isspace() for c in text):
            raise ConfigError("a key must be text without white space, and not empty")
    return keys


def _no_password(url: str) -> str:
    """What is printed must hold no secret."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"{url.rpartition('@')[2]!r:.200} must be an address such as http://host:4318"
        )
    if parts.username is not None or parts.password is not None:
        raise ConfigError("an address holds no password: give it in OTEL_EXPORTER_OTLP_HEADERS")
    return url


def _zmq_endpoint(address: str) -> str:
    if not address.startswith(("tcp://", "ipc://")):
        raise ConfigError(
            f"{address!r:.200} must be an address of ZeroMQ: tcp://127.0.0.1:5557, ipc:///a/path"
        )
    return address


_T = TypeVar("_T")
Maybe = Annotated[_T | None, BeforeValidator(_none)]
Size = Annotated[int, BeforeValidator(_size), Field(ge=0, lt=2**63)]
FilePath = Annotated[Path, AfterValidator(_home)]
Texts = Annotated[tuple[str, ...], BeforeValidator(split)]
Seconds = Annotated[float, Field(gt=0, le=1e9)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Keys = Annotated[tuple[SecretStr, ...], BeforeValidator(split), AfterValidator(_whole_keys)]
Url = Annotated[str, AfterValidator(_no_password)]
ZmqEndpoint = Annotated[str, AfterValidator(_zmq_endpoint)]
KeyHash = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
