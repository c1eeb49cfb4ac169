"""Requests of a load test over HTTP, to any server that speaks OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from pagedkv.errors import ConfigError
from pagedkv.loadtest.answer import Answer, AnswerReader, refusal, refused
from pagedkv.loadtest.requests import LoadRequest


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go and what all of them say.

    url: up to the endpoint, without the slash between the two. chat: the prompt is a message.
    key: of requests of no tenant; None: they bring none. timeout: seconds until a request is given
    up. body: further fields.
    """

    url: str
    endpoint: str
    model: str
    chat: bool = False
    key: str | None = None
    timeout: float = 600.0
    body: Mapping[str, Any] = field(default_factory=dict)


class Client:
    """Sends over connections of its own, as many as there are requests under way."""

    def __init__(
        self, session: aiohttp.ClientSession, target: Target, now: Callable[[], float]
    ) -> None:
        self._session, self._target, self._now = session, target, now

    async def send(self, request: LoadRequest) -> Answer:
        """Raises nothing but a cancellation: what went wrong is in the answer."""
        reader, target = AnswerReader(), self._target
        key = target.key if request.tenant is None else request.tenant.key
        why: str | None = None
        try:
            async with self._session.post(
                target.url + target.endpoint,
                json=body_of(request, target),
                headers={} if key is None else {"Authorization": f"Bearer {key}"},
                timeout=aiohttp.ClientTimeout(total=target.timeout),
            ) as response:
                if response.status != 200:
                    text = await response.text(errors="replace")
                    return Answer(error=f"HTTP {response.status}: {refusal(text)}")
                async for data in response.content.iter_any():
                    reader.feed(data, self._now())
        except TimeoutError:
            why = f"no end after {target.timeout:g} s"
        except (aiohttp.ClientError, OSError) as error:
            why = f"{type(error).__name__}: {error}"
        answer = reader.finish()
        if why is not None:
            answer.error = why
        return answer


@asynccontextmanager
async def open_client(target: Target, now: Callable[[], float]) -> AsyncIterator[Client]:
    """A client, closed at the end. now: the clock of the answers' times."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        yield Client(session, target, now)


async def first_model(url: str, key: str | None) -> str:
    """The first model that a server names. ConfigError if it cannot be asked."""
    where = f"{url}/v1/models"
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    timeout = aiohttp.ClientTimeout(total=30)
    try:
        async with (
            aiohttp.ClientSession(headers=headers, timeout=timeout) as session,
            session.get(where) as response,
        ):
            text = await response.text(errors="replace")
    except TimeoutError:
        raise ConfigError(
            f"no server answers at {url} within 30 s: is the address right?"
        ) from None
    except (aiohttp.ClientError, OSError) as error:
        raise ConfigError(f"no server answers at {url}: {error}") from error
    if response.status != 200:
        raise ConfigError(refused(where, response.status, text))
    try:
        return str(json.loads(text)["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{where} names no model: give --model") from error


def body_of(request: LoadRequest, target: Target) -> dict[str, Any]:
    """The body of a request. Goals of its class go along in milliseconds, as pagedkv reads them."""
    question = request.question
    body: dict[str, Any] = {
        "model": target.model,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if target.chat:
        body["messages"] = [{"role": "user", "content": question.prompt}]
        body["max_completion_tokens"] = question.output_tokens
    else:
        body["prompt"] = question.prompt
        body["max_tokens"] = question.output_tokens
    if request.slo_class is not None:
        goals = request.slo_class.goals
        for name, seconds in (("ttft_slo_ms", goals.ttft), ("tpot_slo_ms", goals.tpot)):
            if seconds is not None:
                body[name] = seconds * 1e3
    return body | dict(target.body)
