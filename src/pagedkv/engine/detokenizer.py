"""From token ids to text, piece by piece, such that the pieces add up to the whole.

The text of a token depends on its neighbours: a character may be spread over several tokens, and
some tokenizers drop the space at the very beginning. So each piece is given out only when nothing
that follows can change it; what is still open is given out by `finish`.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from tokenizers import Tokenizer, decoders

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Detokenizer(Protocol):
    """Decodes one sequence. `push` for every token, then `finish` once.

    All that they return, concatenated, equals the tokenizer's decoding of all the ids at once.
    """

    def push(self, token: int) -> str:
        """The text that is certain now and was not given out before; may be empty."""
        ...

    def finish(self) -> str:
        """What is left; an incomplete character becomes U+FFFD, as in a decoding at once."""
        ...


class Detokenizers:
    """Makes the detokenizers of one tokenizer; what they have in common is read once.

    Byte-level tokenizers (GPT-2's alphabet: SmolLM2, Llama 3, Qwen) are decoded byte by byte,
    all others (SentencePiece models: Llama 2, Mistral) through a window of tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(i for i, token in added.items() if token.special)
        self._pieces = _Pieces(tokenizer)

    def make(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """For one sequence; `skip_special_tokens` leaves special tokens out."""
        skipped = self._special if skip_special_tokens else frozenset()
        if self._byte_level:
            return ByteLevelDetokenizer(self._pieces, skipped)
        return WindowDetokenizer(self._tokenizer, skipped)


def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the rest are moved up from 256."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(moved)}


_BYTES = _byte_of_char()


def _byte_level_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    piece = tokenizer.id_to_token(token)
    if piece is None:  # ids of a padded embedding have no token and no text
        return b""
    try:
        return bytes([_BYTES[char] for char in piece])
    except KeyError:  # an added token, written as it is
        return str(piece).encode()


def token_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """The bytes that a token alone stands for; they may be a part of a character."""
    if isinstance(tokenizer.decoder, decoders.ByteLevel):
        return _byte_level_bytes(tokenizer, token)
    piece = tokenizer.id_to_token(token)
    if piece is not None and _BYTE_TOKEN.fullmatch(piece):
        return bytes([int(piece[3:5], 16)])
    text = str(tokenizer.decode([token], skip_special_tokens=False))
    if piece is not None and piece.startswith("▁") and not text.startswith(" "):
        text = " " + text  # decoders drop it from what they take for a beginning
    return text.encode()


class _Piece(NamedTuple):
    """What a token stands for; `text` is None where the bytes are no whole characters."""

    data: bytes
    text: str | None

    @classmethod
    def of(cls, data: bytes) -> _Piece:
        try:
            return cls(data, data.decode())
        except UnicodeDecodeError:
            return cls(data, None)


class _Pieces(dict[int, _Piece]):
    """The pieces of a byte-level tokenizer's tokens, looked up in it the first time only."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> _Piece:
        piece = self[token] = _Piece.of(_byte_level_bytes(self._tokenizer, token))
        return piece


class ByteLevelDetokenizer:
    """Each token is a fixed run of bytes, so an incremental UTF-8 decoder is all it takes.

    Invalid bytes become U+FFFD by the same rule (maximal subparts, Unicode 15 section 3.9) as in
    the tokenizer's own decoding.
    """

    def __init__(self, pieces: Mapping[int, _Piece], skipped: frozenset[int]) -> None:
        self._pieces, self._skipped = pieces, skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._open = False  # whether the decoder holds the beginning of a character

    def push(self, token: int) -> str:
        if token in self._skipped:
            return ""
        data, text = self._pieces[token]
        if text is not None and not self._open:
            return text
        text = self._utf8.decode(data)
        self._open = self._utf8.getstate()[0] != b""
        return text

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """Decodes the ids from a clean border on, twice, and gives out the difference.

    A border is clean if all the text before it has been given out; the window starts one piece
    of text earlier, so that what a decoder does to the beginning of its input has happened in
    both decodings. A run of byte tokens is held until it ends: a later invalid byte makes the
    tokenizer replace the run as a whole.
    """

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self._tokenizer, self._skipped = tokenizer, skipped
        self._ids: list[int] = []  # from the start of the window on
        self._read = 0  # of those, how many have been given out
        self._given = ""  # decoding of ids[:read]

    def push(self, token: int) -> str:
        piece = self._tokenizer.id_to_token(token)
        # A token without text changes nothing: it must not end a run of bytes, nor be all that
        # the window starts with.
        if piece is None or token in self._skipped:
            return ""
        self._ids.append(token)
        text = self._decode(self._ids)
        if text.endswith(_REPLACEMENT) or _BYTE_TOKEN.fullmatch(piece):
            return ""
        return self._advance(text)

    def finish(self) -> str:
        return self._advance(self._decode(self._ids))

    def _advance(self, text: str) -> str:
        new = text[len(self._given) :]
        if new:
            self._ids = self._ids[self._read :]
            self._read = len(self._ids)
            self._given = self._decode(self._ids)
        return new

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)
