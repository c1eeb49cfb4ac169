"""Prompts in all the forms that users write them, turned into messages for the loop."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from pagedkv.engine.grammar import check_grammar
from pagedkv.errors import ConfigError, ModelError, RequestError
from pagedkv.scheduling.messages import Add
from pagedkv.scheduling.params import BeamSearchParams, SamplingParams

TokenIds = Sequence[int] | npt.NDArray[np.integer[Any]] | torch.Tensor


class PromptDict(TypedDict, total=False):
    """Text, token ids, or ids and the text they stand for."""

    prompt: str
    prompt_token_ids: TokenIds


Prompt = str | PromptDict
# Characters that a normaliser makes one of, at most; and it may drop some.
_COMPOSED = 16

ChatMessages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that has passed every check and has not entered yet. `add.seed` is a placeholder
    unless the parameters give one."""

    add: Add
    prompt: str | None


class RequestReader:
    """Tokenises and checks requests. Raises RequestError that says what to change.

    `validate` is the scheduler's own check: what passes here is only refused later if the queue is
    full by then.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, validate: Callable[[Add], None]
    ) -> None:
        self._tokenizer, self._validate = tokenizer, validate

    def read(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams,
        *,
        arrival: float,
        priority: int = 0,
        tenant: str | None = None,
        cache_salt: str | None = None,
        ttft_slo: float | None = None,
        tpot_slo: float | None = None,
        deadline: float | None = None,
    ) -> Prepared:
        if not isinstance(request_id, str) or not request_id:
            raise RequestError(f"request_id={request_id!r} must be a non-empty string")
        beam = params if isinstance(params, BeamSearchParams) else None
        if isinstance(params, BeamSearchParams):
            params = params.sampling
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params={params!r:.200} must be SamplingParams or BeamSearchParams")
        if params.stop and self._tokenizer is None:
            raise RequestError("stop strings need text, and this model has no tokenizer: use ids")
        if params.structured_outputs is not None:
            if self._tokenizer is None:
                raise RequestError("structured_outputs need text, and this model has no tokenizer")
            check_grammar(params.structured_outputs)
        text, ids = self.tokens(prompt)
        seed = params.seed or 0
        add = Add(
            request_id,
            ids,
            params,
            arrival,
            seed,
            priority,
            tenant,
            beam,
            cache_salt,
            ttft_slo,
            tpot_slo,
            deadline,
        )
        self._validate(add)
        return Prepared(add, text)

    @property
    def has_chat_template(self) -> bool:
        return self._tokenizer is not None and bool(self._tokenizer.chat_template)

    @property
    def template_has_tools(self) -> bool:
        """Whether the chat template writes tools, or leaves them out."""
        templates = self._tokenizer.chat_template if self._tokenizer is not None else None
        return "tools" in str(templates)

    @cached_property
    def _longest_token(self) -> int:
        """Most characters of a text that become one token."""
        if self._tokenizer is None:
            return 1
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        composed = 1 if backend is not None and backend.normalizer is None else _COMPOSED
        return composed * max(map(len, self._tokenizer.get_vocab()), default=1)

    @property
    def decoder(self) -> Tokenizer | None:
        """What text is made with; None: the model has no tokenizer."""
        return text_decoder(self._tokenizer)

    def chat(
        self,
        messages: ChatMessages,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        template_arguments: Mapping[str, Any] | None = None,
        special: bool = False,
        most: int | None = None,
    ) -> PromptDict:
        """The prompt that the model's chat template makes of a conversation.

        continue_final_message: the last message is left open, for the model to go on with it.
        tools: what the model may call, as templates want them. template_arguments: names that this
        template knows. special: add what the tokenizer puts around any text (most templates write
        it themselves). most: see `encode`.
        """
        tokenizer = self._tokenizer
        if tokenizer is None or not self.has_chat_template:
            raise RequestError("this model has no chat template: use generate with a plain prompt")
        if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
            raise RequestError(
                f"a conversation is a list of messages, [{{'role': 'user', 'content': text}}], "
                f"not {messages!r:.200}"
            )
        if not messages:
            raise RequestError("the conversation is empty: give at least one message")
        plain = [_plain_message(message) for message in messages]
        arguments = dict(template_arguments or {})
        reserved = inspect.signature(tokenizer.apply_chat_template).parameters.keys()
        if taken := reserved & arguments.keys():
            raise RequestError(
                f"chat_template_kwargs={arguments!r:.200} cannot have {min(taken)!r}: leave it out"
            )
        try:
            text = str(
                tokenizer.apply_chat_template(
                    plain,
                    tools=None if tools is None else [*tools],
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    **arguments,
                )
            )
        except Exception as error:  # the template is a program that came with the model
            raise RequestError(f"the chat template refuses these messages: {error}") from error
        return {"prompt": text, "prompt_token_ids": self.encode(text, special=special, most=most)}

    def tokens(
        self, prompt: Prompt, *, special: bool = True, most: int | None = None
    ) -> tuple[str | None, tuple[int, ...]]:
        """Text, where given, and token ids of a prompt; the ids are not checked yet.

        special: add to a text what the tokenizer puts around any text, such as a BOS token.
        most: see `encode`.
        """
        if isinstance(prompt, str):
            prompt = {"prompt": prompt}
        if isinstance(prompt, Mapping):
            for key in prompt:
                if key not in PromptDict.__annotations__:
                    raise RequestError(
                        f"a prompt has no key {key!r:.200}: use 'prompt' or 'prompt_token_ids'"
                    )
        if not isinstance(prompt, Mapping) or not prompt:
            raise RequestError(
                f"a prompt is text, {{'prompt': text}} or {{'prompt_token_ids': [...]}}, "
                f"not {prompt!r:.200}"
            )
        text = prompt.get("prompt")
        if text is not None and not isinstance(text, str):
            raise RequestError(f"prompt={text!r} must be text")
        ids = prompt.get("prompt_token_ids")
        if ids is None:
            if not text:
                raise RequestError("the prompt is empty: give at least one character")
            return text, self.encode(text, special=special, most=most)
        return text, _plain_ids(ids)

    def encode(self, text: str, *, special: bool, most: int | None = None) -> tuple[int, ...]:
        """Token ids of a text. RequestError: it is not valid Unicode, or there is no tokenizer.

        most: a text that cannot but have more tokens is refused before it is tokenised.
        """
        if self._tokenizer is None:
            raise RequestError(
                "this model has no tokenizer: put tokenizer.json into its folder, or give "
                "{'prompt_token_ids': [...]}"
            )
        if most is not None and len(text) > most * self._longest_token:
            raise RequestError(
                f"the prompt has {len(text)} characters, which is more than {most} tokens of at "
                f"most {self._longest_token}: give less"
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the prompt is not valid Unicode: {error}") from None
        encoded = self._tokenizer(text, add_special_tokens=special, verbose=False)
        return tuple(encoded["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens too. RequestError: an id is none, or no tokenizer."""
        decoder = self.decoder
        if decoder is None:
            raise RequestError("this model has no tokenizer: put tokenizer.json into its folder")
        size = decoder.get_vocab_size()
        for token in ids:
            if not 0 <= token < size:
                raise RequestError(f"token id {token} is outside the vocabulary [0, {size})")
        return str(decoder.decode(list(ids), skip_special_tokens=False))


def read_prefixes(
    tokenizer: PreTrainedTokenizerBase | None, prefixes: Sequence[Prompt]
) -> tuple[tuple[int, ...], ...]:
    """Token ids of public prefixes, given as prompts are. ConfigError says which one is none."""
    if isinstance(prefixes, (str, bytes, Mapping)) or not isinstance(prefixes, Sequence):
        raise ConfigError(f"public_prefixes={prefixes!r:.200} must be a list of prompts")
    reader = RequestReader(tokenizer, lambda add: None)
    found = []
    for i, prefix in enumerate(prefixes):
        try:
            found.append(reader.tokens(prefix)[1])
        except RequestError as error:
            raise ConfigError(f"public_prefixes[{i}]: {error}") from error
    return tuple(found)


def _plain_ids(ids: object) -> tuple[int, ...]:
    """Token ids of a list, an array or a tensor as Python's integers, as far as they are any."""
    if isinstance(ids, (np.ndarray, torch.Tensor)):
        ids = ids.tolist()
    if isinstance(ids, (str, bytes, bytearray)) or not isinstance(ids, Sequence):
        raise RequestError(f"prompt_token_ids={ids!r:.200} must be a list of token ids")
    if bool in set(map(type, ids)):
        raise RequestError(f"prompt_token_ids={ids!r:.200} has truths (True, False) for token ids")
    try:
        return tuple(map(operator.index, ids))
    except TypeError:
        return tuple(ids)  # the scheduler's check says what is wrong


def _plain_message(message: object) -> dict[str, Any]:
    """A chat message whose content is text; parts of text are joined by line feeds."""
    if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
        raise RequestError(f"message {message!r:.200} must have the keys 'role' and 'content'")
    content = message["content"]
    if isinstance(content, str):
        return dict(message)
    if isinstance(content, (bytes, bytearray)) or not isinstance(content, Sequence):
        raise RequestError(
            f"content={content!r:.200} must be text, or a list of {{'type': 'text', 'text': ...}}"
        )
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if kind == "text" else None
        if not isinstance(text, str):
            raise RequestError(
                f"content part {part!r:.200} is not {{'type': 'text', 'text': ...}}: "
                "only text is implemented"
            )
        texts.append(text)
    return {**message, "content": "\n".join(texts)}


def text_decoder(tokenizer: PreTrainedTokenizerBase | None) -> Tokenizer | None:
    """The tokenizer that text is made with. ModelError if the model has only a slow one."""
    if tokenizer is None:
        return None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise ModelError(
            f"the tokenizer {type(tokenizer).__name__} has no tokenizer.json: save it with "
            "tokenizer.save_pretrained of a fast tokenizer"
        )
    return backend
