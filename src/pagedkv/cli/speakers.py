"""Who answers in a chat: a server over HTTP, or a model in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import httpx

from pagedkv.errors import ConfigError, RequestError
from pagedkv.loadtest.answer import Answer, AnswerReader, refusal, refused

if TYPE_CHECKING:  # torch takes seconds to import
    from pagedkv.engine.llm import LLM
    from pagedkv.engine.output import RequestOutput
    from pagedkv.scheduling.messages import StepStats

Message = dict[str, str]  # "role" and "content"
Show = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Style:
    """How answers are made. max_tokens None: as many as there is room for."""

    max_tokens: int | None = None
    temperature: float = 0.7


class Speaker(Protocol):
    """`name` is the model's."""

    name: str

    def answer(self, messages: Sequence[Message], style: Style, show: Show) -> Answer:
        """Answers a conversation; `show` gets the text as it comes.

        When interrupted (KeyboardInterrupt) the request is given up. RequestError: it cannot be
        answered.
        """
        ...

    def close(self) -> None: ...


class Server:
    """A server that speaks OpenAI's API at `url`, such as http://127.0.0.1:8000.

    model: None is the first that it names. ConfigError: it cannot be asked.
    """

    def __init__(self, url: str, key: str | None, model: str | None) -> None:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        # A long prompt takes its time until the first token; a server that is away does not.
        timeout = httpx.Timeout(None, connect=10.0)
        try:
            self._client = httpx.Client(base_url=url, headers=headers, timeout=timeout)
            response = self._client.get("/v1/models", timeout=10.0)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ConfigError(
                f"no server answers at {url}: {error}; start one with `pagedkv serve`, or give "
                "--model alone to chat in this process"
            ) from error
        if response.status_code != 200:
            raise ConfigError(refused(url, response.status_code, response.text))
        try:
            self.name = model or str(response.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise ConfigError(f"{url}/v1/models names no model: give --model") from error

    def answer(self, messages: Sequence[Message], style: Style, show: Show) -> Answer:
        body = {
            "model": self.name,
            "messages": list(messages),
            "temperature": style.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if style.max_tokens is not None:
            body["max_completion_tokens"] = style.max_tokens
        reader, sent = AnswerReader(show), time.monotonic()
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise RequestError(refusal(response.text))
                for data in response.iter_bytes():
                    reader.feed(data, time.monotonic() - sent)
        except httpx.HTTPError as error:
            raise RequestError(f"the server went away: {error}") from error
        return reader.finish()

    def close(self) -> None:
        self._client.close()


class Here:
    """A model in this process."""

    def __init__(self, llm: LLM, name: str) -> None:
        if not llm.engine.has_chat_template:
            raise ConfigError(f"--model={name!r} has no chat template: it cannot chat")
        self._llm, self.name = llm, name

    def answer(self, messages: Sequence[Message], style: Style, show: Show) -> Answer:
        from pagedkv.scheduling.params import SamplingParams

        llm, shown = self._llm, 0
        prompt = llm.engine.chat_prompt(list(messages))
        params = SamplingParams(max_tokens=style.max_tokens, temperature=style.temperature)
        answer, start = Answer(), time.monotonic()

        def on_step(outputs: Sequence[RequestOutput], stats: StepStats | None) -> None:
            nonlocal shown
            for output in outputs:
                text = output.outputs[0].text
                if output.outputs[0].token_ids:
                    answer.times.append(time.monotonic() - start)
                show(text[shown:])
                shown = len(text)

        [output] = llm.run(llm.prepare(prompt, params), on_step=on_step)
        sample = output.outputs[0]
        answer.text, answer.error = sample.text, sample.error
        answer.prompt_tokens = len(output.prompt_token_ids)
        answer.output_tokens = len(sample.token_ids)
        answer.cached_tokens = output.num_cached_tokens
        return answer

    def close(self) -> None:
        self._llm.close()
