"""The model's own tokenizer, through transformers."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from pagedkv.errors import ModelError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a local folder, or None if there is none (token-id prompts only).

    Raises ModelError when its files are there and cannot be used.
    """
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, local_files_only=True
        )
    except Exception as error:  # whatever the tokenizer's files provoke in the libraries
        raise ModelError(f"cannot load the tokenizer in {folder}: {error}") from error
    return tokenizer
