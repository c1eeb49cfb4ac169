"""Log-probabilities of tokens in both of OpenAI's styles."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from pagedkv.engine.detokenizer import token_bytes
from pagedkv.engine.output import Logprob

Entry = Mapping[int, Logprob]

# JSON has no infinity: what is impossible is said to be as good as that, as in vLLM.
_LEAST = -9999.0


class Words:
    """How single tokens are written. Remembers each that was asked for: at most a vocabulary."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, bytes]] = {}

    def __getitem__(self, token: int) -> tuple[str, bytes]:
        """Text and bytes; what is no text alone is written as OpenAI does, "bytes:\\xe2\\x98"."""
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = self._make(token)
        return known

    def _make(self, token: int) -> tuple[str, bytes]:
        if self._tokenizer is None:
            return f"token_id:{token}", b""
        data = token_bytes(self._tokenizer, token)
        try:
            return data.decode(), data
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), data


class Offsets:
    """Where tokens begin in a text, in characters: a part of one begins where that does."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._end = 0

    def advance(self, data: bytes) -> int:
        """Where the token of these bytes begins."""
        begin = self._end
        self._end += len(self._utf8.decode(data))
        return begin


class Scores:
    """Entries of one request, as its form wants them. as_ids: tokens are written "token_id:7"."""

    def __init__(self, words: Words, *, as_ids: bool, top: int) -> None:
        self._words, self._as_ids, self._top = words, as_ids, top

    def name(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self._words[token][0]

    def completion(
        self, tokens: Sequence[int], entries: Sequence[Entry | None], offsets: Offsets
    ) -> dict[str, list[Any]]:
        """The style of completions; an entry is None where nothing is known (a prompt's first)."""
        names, values, tops, begins = [], [], [], []
        for token, entry in zip(tokens, entries, strict=True):
            names.append(self.name(token))
            values.append(None if entry is None else _finite(entry[token]))
            tops.append(None if entry is None else self._by_name(token, entry))
            begins.append(offsets.advance(self._words[token][1]))
        return {
            "tokens": names,
            "token_logprobs": values,
            "top_logprobs": tops,
            "text_offset": begins,
        }

    def _by_name(self, token: int, entry: Entry) -> dict[str, float]:
        """Of tokens that are written alike the one that stands there, then the likelier one."""
        named: dict[str, float] = {self.name(token): _finite(entry[token])}
        for other, score in entry.items():
            named.setdefault(self.name(other), _finite(score))
        return named

    def chat(self, tokens: Sequence[int], entries: Sequence[Entry]) -> dict[str, Any]:
        """The style of chats: the alternatives are the most likely ones, in order."""
        content = []
        for token, entry in zip(tokens, entries, strict=True):
            likely = sorted((s.rank, t, s) for t, s in entry.items() if s.rank <= self._top)
            top = [self._chat_word(t, s) for _, t, s in likely]
            content.append({**self._chat_word(token, entry[token]), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _chat_word(self, token: int, score: Logprob) -> dict[str, Any]:
        return {
            "token": self.name(token),
            "logprob": _finite(score),
            "bytes": list(self._words[token][1]),
        }

    def prompt(self, entries: Sequence[Entry | None]) -> list[Any]:
        """vLLM's style for prompts: by token id."""
        return [
            None
            if entry is None
            else {
                str(token): {
                    "logprob": _finite(score),
                    "rank": score.rank,
                    "decoded_token": self.name(token),
                }
                for token, score in entry.items()
            }
            for entry in entries
        ]


def _finite(score: Logprob) -> float:
    return max(score.logprob, _LEAST)
