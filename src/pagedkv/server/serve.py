"""Running the server: make the core, listen, end in order."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import uvicorn
from transformers import PreTrainedTokenizerBase

from pagedkv.engine.facts import Facts
from pagedkv.models.tokenizer import load_tokenizer
from pagedkv.server.app import create_app
from pagedkv.server.async_engine import AsyncEngine
from pagedkv.server.core_link import ProcessLink
from pagedkv.server.keys import KeyRing


def tokenizer_of(facts: Facts) -> PreTrainedTokenizerBase | None:
    """The tokenizer in the folder of the core's model."""
    return None if facts.folder is None else load_tokenizer(Path(facts.folder))


async def serve(
    arguments: Mapping[str, Any], models: tuple[str, ...], host: str, port: int, keys: KeyRing
) -> int:
    """Serves until a signal comes; the exit status. `arguments`: of the core, see `ProcessLink`."""
    engine = AsyncEngine(ProcessLink(arguments), tokenizer_of)
    await engine.start()
    app = create_app(engine, models, keys)
    config = uvicorn.Config(app, host=host, port=port, log_level="info")
    try:
        await uvicorn.Server(config).serve()
    finally:
        await engine.close()
    return 0


def run(
    arguments: Mapping[str, Any], models: tuple[str, ...], host: str, port: int, keys: KeyRing
) -> int:
    """`serve` in an event loop of its own."""
    return asyncio.run(serve(arguments, models, host, port, keys))
