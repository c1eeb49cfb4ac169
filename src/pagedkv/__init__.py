"""Memory management for LLM serving: a paged KV cache, its block table, and an engine on them.

The engine's names are imported when they are first used, so `import pagedkv` needs numpy only.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING

from pagedkv.errors import MissingExtraError

if TYPE_CHECKING:
    from pagedkv.cache import BlockManager
    from pagedkv.engine.llm import LLM
    from pagedkv.engine.llm_engine import LLMEngine
    from pagedkv.engine.output import CompletionOutput, RequestOutput
    from pagedkv.engine.tiers import TierConfig
    from pagedkv.scheduling.params import BeamSearchParams, SamplingParams
    from pagedkv.scheduling.structured import StructuredOutputs
    from pagedkv.scheduling.tenants import Tenant

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "BeamSearchParams",
    "BlockManager",
    "CompletionOutput",
    "LLMEngine",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "Tenant",
    "TierConfig",
    "__version__",
]

_HOME = MappingProxyType(
    {
        "LLM": "pagedkv.engine.llm",
        "LLMEngine": "pagedkv.engine.llm_engine",
        "RequestOutput": "pagedkv.engine.output",
        "CompletionOutput": "pagedkv.engine.output",
        "BeamSearchParams": "pagedkv.scheduling.params",
        "SamplingParams": "pagedkv.scheduling.params",
        "StructuredOutputs": "pagedkv.scheduling.structured",
        "BlockManager": "pagedkv.cache",
        "Tenant": "pagedkv.scheduling.tenants",
        "TierConfig": "pagedkv.engine.tiers",
    }
)
# What `import` calls the packages of the extras.
_EXTRAS = MappingProxyType(
    {
        "torch": "engine",
        "transformers": "engine",
        "tokenizers": "engine",
        "safetensors": "engine",
        "gguf": "engine",
        "huggingface_hub": "engine",
        "msgspec": "engine",
        "xxhash": "engine",
        "threadpoolctl": "engine",
        "typer": "engine",
        "rich": "engine",
        "zmq": "kv-events",
        "fastapi": "server",
        "starlette": "server",
        "uvicorn": "server",
        "h11": "server",
        "pydantic": "server",
        "pydantic_core": "server",
        "llguidance": "server",
        "prometheus_client": "server",
        "httpx": "server",
        "aiohttp": "server",
        "ray": "cluster",
        "opentelemetry": "tracing",
        "opentelemetry.exporter": "tracing",
    }
)


@contextmanager
def extras() -> Iterator[None]:
    """Around what needs an extra: MissingExtraError says what of it is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name not in _EXTRAS:
            raise
        raise MissingExtraError(
            f'{error.name} is not installed: pip install "pagedkv[{_EXTRAS[error.name]}]"'
        ) from None


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with extras():
        return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
