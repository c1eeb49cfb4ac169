"""What the endpoints share: the engine, the names it answers to, ids, and the way of an answer."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeVar

import msgspec
from fastapi import Request, Response

from pagedkv.engine.requests import Prepared
from pagedkv.server.async_engine import AsyncEngine
from pagedkv.server.authentication import tenant_of
from pagedkv.server.openai.answers import Answer, Form
from pagedkv.server.openai.errors import FieldError, UnknownModelError
from pagedkv.server.openai.protocol import MAX_ID_CHARS, Generation
from pagedkv.server.openai.running import Running
from pagedkv.server.openai.sse import EventStream
from pagedkv.server.openai.words import Words
from pagedkv.server.settings import ServeSettings

ID_HEADER = "X-Request-Id"
T = TypeVar("T")

# Bytes of a body whose texts are long: megabytes take seconds, and gigabytes of memory.
_LONG = 128 * 1024

_ID = re.compile(rf"[!-~]{{1,{MAX_ID_CHARS}}}")


@dataclass(frozen=True)
class Api:
    """engine: has been started."""

    engine: AsyncEngine
    settings: ServeSettings

    @cached_property
    def models(self) -> tuple[str, ...]:
        """The names it answers to, the first one by default."""
        return self.settings.model_names()

    @cached_property
    def words(self) -> Words:
        return Words(self.engine.front.reader.decoder)

    @cached_property
    def _long_texts(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "pagedkv-long-texts")

    async def in_thread(self, num_bytes: int, work: Callable[[], T]) -> T:
        """What `work` returns, which reads the texts of a body of so many bytes.

        Long ones are read one after the other, so that short ones do not wait for them.
        """
        threads = self._long_texts if num_bytes > _LONG else None
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    def model(self, name: str | None) -> str:
        """The name to answer under. UnknownModelError."""
        if name is None:
            return self.models[0]
        if name not in self.models:
            served = ", ".join(repr(model) for model in self.models)
            raise UnknownModelError(f"the model {name!r:.200} is not served: there is {served}")
        return name


@dataclass(frozen=True)
class Call:
    """One request for text. `id`: the client's own, or drawn; `arrival` on the engine's clock."""

    id: str
    arrival: float
    created: int
    tenant: str
    num_bytes: int  # of its body

    @classmethod
    async def of(cls, request: Request, arrival: float, body: Generation) -> Call:
        """FieldError: the client's id is none."""
        given = body.request_id or request.headers.get(ID_HEADER) or uuid.uuid4().hex
        if not _ID.fullmatch(given):
            raise FieldError(
                f"{ID_HEADER}={given!r:.200} must be 1 to {MAX_ID_CHARS} visible ASCII characters",
                "request_id",
            )
        num_bytes = len(await request.body())
        return cls(given, arrival, int(time.time()), tenant_of(request), num_bytes)

    @property
    def headers(self) -> dict[str, str]:
        return {ID_HEADER: self.id}


class Writer(Protocol):
    """What writes an answer; see `Answer`."""

    async def whole(self) -> dict[str, Any]: ...

    def events(self) -> AsyncIterator[bytes]: ...

    def close(self) -> None: ...


async def answer(
    api: Api,
    call: Call,
    body: Generation,
    prefix: str,
    read: Callable[[], tuple[Sequence[Prepared], Form]],
    *,
    num_prompts: int = 1,
    num_ids: int = 0,
    silent: bool = False,
) -> Response:
    """As `respond`, in the form that `read` gives."""
    options = body.stream_options
    if options is not None and not body.stream:
        raise FieldError("stream_options needs stream=true", "stream_options")

    def write(running: Running, form: Form, model: str) -> Answer:
        return Answer(
            running,
            form,
            id=f"{prefix}-{call.id}",
            model=model,
            created=call.created,
            n=body.n or 1,
            silent=silent,
            include_usage=bool(options and options.include_usage),
            continuous_usage=bool(options and options.continuous_usage_stats),
        )

    return await respond(api, call, body, read, write, num_prompts=num_prompts, num_ids=num_ids)


async def respond(
    api: Api,
    call: Call,
    body: Generation,
    read: Callable[[], tuple[Sequence[Prepared], T]],
    write: Callable[[Running, T, str], Writer],
    *,
    num_prompts: int = 1,
    num_ids: int = 0,
) -> Response:
    """Starts what `read` gives, in a thread since it tokenises, and answers as `write` does.

    write: gets what runs, what `read` gives beside the requests, and the name of the model.
    num_prompts, num_ids: of the body, and token ids in it; without room in the queue for so many
    it is refused before anything is done.
    """
    model = api.model(body.model)
    api.engine.check_open()
    samples, tokens = num_prompts * (body.n or 1), max(num_ids, num_prompts)
    with api.engine.door.reading(call.tenant, num_prompts, samples, tokens):
        prepared, form = await api.in_thread(call.num_bytes, read)
    written = write(Running(api.engine, prepared), form, model)
    if body.stream:
        return EventStream(written.events(), written.close, call.headers)
    try:
        return json_response(await written.whole(), call.headers)
    finally:
        written.close()


def json_response(value: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), headers=headers, media_type="application/json")
