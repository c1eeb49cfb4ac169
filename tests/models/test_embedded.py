"""Converting the embedded GGUF: right numbers, once, and safe when several processes start."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers.convert_slow_tokenizer import bytes_to_unicode

from pagedkv.models import EMBEDDED_MODEL, embedded, load_model
from pagedkv.models.partial import partial_folder

SHAPES = {
    "token_embd": (259, 32),
    "output_norm": (32,),
    "blk.0.attn_norm": (32,),
    "blk.0.ffn_norm": (32,),
    "blk.0.attn_q": (32, 32),
    "blk.0.attn_k": (16, 32),
    "blk.0.attn_v": (16, 32),
    "blk.0.attn_output": (32, 32),
    "blk.0.ffn_gate": (64, 32),
    "blk.0.ffn_up": (64, 32),
    "blk.0.ffn_down": (32, 64),
}
TEMPLATE = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '\n' }}{% endfor %}"


def small_gguf(path: Path, quantised: bool = False) -> dict[str, np.ndarray]:
    """A one-layer Llama of 4 heads over a byte vocabulary; returns its tensors as stored."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(32)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(259)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*bytes_to_unicode().values(), "<|start|>", "<|end|>", "he"])
    writer.add_token_merges(["h e"])
    writer.add_token_types([1] * 256 + [3, 3, 1])
    writer.add_chat_template(TEMPLATE)
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_pad_token_id(257)
    rng = np.random.default_rng(0)
    stored = {}
    for name, shape in SHAPES.items():
        values = rng.standard_normal(shape).astype(np.float32)
        if quantised and len(shape) == 2:
            kind = gguf.GGMLQuantizationType.Q4_1
            packed = gguf.quantize(values, kind)
            writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind)
            values = gguf.dequantize(packed, kind)
        else:
            writer.add_tensor(f"{name}.weight", values)
        stored[name] = values
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Stands in for the package that carries the model; importing it would fail."""
    folder = tmp_path / "site" / embedded.PACKAGE
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    stored = small_gguf(folder / "small.gguf", quantised=True)
    monkeypatch.syspath_prepend(folder.parent)
    monkeypatch.setenv(embedded.CACHE_VARIABLE, str(tmp_path / "cache"))
    return folder.parent, stored


def halves(weight: np.ndarray, heads: int) -> torch.Tensor:
    """Rows of each head: GGUF's (pair 0 first, pair 0 second, pair 1 first, ...) as two halves."""
    by_head = weight.reshape(heads, -1, weight.shape[1])
    order = [*range(0, by_head.shape[1], 2), *range(1, by_head.shape[1], 2)]
    return torch.from_numpy(by_head[:, order].reshape(weight.shape).copy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_dequantised_and_rotary_pairs_put_in_halves(package, dtype) -> None:
    _, stored = package
    folder = embedded.embedded_folder(dtype)
    tensors = load_file(folder / "model.safetensors")
    attention = "model.layers.0.self_attn."
    assert torch.equal(
        tensors[attention + "q_proj.weight"], halves(stored["blk.0.attn_q"], 4).to(dtype)
    )
    assert torch.equal(
        tensors[attention + "k_proj.weight"], halves(stored["blk.0.attn_k"], 2).to(dtype)
    )
    v = torch.from_numpy(stored["blk.0.attn_v"].copy()).to(dtype)
    assert torch.equal(tensors[attention + "v_proj.weight"], v)


def test_the_converted_model_loads_with_tokenizer_and_chat_template(package) -> None:
    loaded = load_model(EMBEDDED_MODEL)
    assert loaded.config.tie_word_embeddings and loaded.config.eos_token_ids == (257,)
    assert loaded.tokenizer is not None
    text = loaded.tokenizer.apply_chat_template([{"role": "user", "content": "hé"}], tokenize=False)
    assert text == "user:hé\n"
    ids = loaded.tokenizer(text).input_ids
    assert len(ids) == len(text.encode()) and loaded.tokenizer.decode(ids) == text


def test_the_second_start_converts_nothing(package, monkeypatch) -> None:
    first = embedded.embedded_folder(torch.float32)
    monkeypatch.setattr(embedded, "convert", lambda *args: pytest.fail("converted again"))
    assert embedded.embedded_folder(torch.float32) == first


def test_a_process_that_finishes_second_uses_the_first_ones_folder(package, monkeypatch) -> None:
    """The other process publishes its folder while this one is still converting."""
    convert, calls = embedded.convert, []

    def slow(*args):
        calls.append(args)
        if len(calls) == 1:
            embedded.embedded_folder(torch.float32)
        convert(*args)

    monkeypatch.setattr(embedded, "convert", slow)
    folder = embedded.embedded_folder(torch.float32)
    assert len(calls) == 2
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    load_model(EMBEDDED_MODEL)


def test_what_a_killed_conversion_left_is_removed_by_the_next(package, monkeypatch) -> None:
    models = embedded.cache_root() / "models"

    def killed(source, folder, dtype):
        (folder / "model.safetensors").write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patched:
        patched.setattr(embedded, "convert", killed)
        child = os.fork()
        if child == 0:
            embedded.embedded_folder(torch.bfloat16)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
    [left] = models.iterdir()
    assert left.name.startswith(".")
    folder = embedded.embedded_folder(torch.float32)
    assert list(models.iterdir()) == [folder]


def test_a_conversion_that_runs_is_left_alone(tmp_path) -> None:
    with partial_folder(tmp_path, "model-", "model-a") as first:
        os.utime(first, (0, 0))
        with partial_folder(tmp_path, "model-", "model-b") as second:
            assert sorted(tmp_path.iterdir()) == sorted([first, second])
    assert list(tmp_path.iterdir()) == []


def test_other_folders_of_the_cache_are_left_alone(tmp_path) -> None:
    others = [tmp_path / name for name in (".other-x", "model-a")]
    for other in others:
        other.mkdir()
    with partial_folder(tmp_path, "model-", "model-b"):
        pass
    assert sorted(tmp_path.iterdir()) == others


def test_without_locks_of_folders_age_tells_what_is_abandoned(tmp_path, monkeypatch) -> None:
    def flock(descriptor, operation):
        raise OSError(errno.EBADF, "no locks on this file system")

    monkeypatch.setattr(fcntl, "flock", flock)
    young, old = tmp_path / ".model-young", tmp_path / ".model-old"
    young.mkdir()
    old.mkdir()
    os.utime(old, (0, 0))
    with partial_folder(tmp_path, "model-", "model-a") as folder:
        assert sorted(tmp_path.iterdir()) == sorted([folder, young])


def test_a_folder_removed_before_it_was_locked_is_made_again(tmp_path, monkeypatch) -> None:
    """Another process may take the moment between the two for abandonment."""
    taken = []

    def flock(descriptor, operation):
        if not taken:
            taken.extend(tmp_path.iterdir())
            taken[0].rmdir()

    monkeypatch.setattr(fcntl, "flock", flock)
    with partial_folder(tmp_path, "model-", "model-a") as folder:
        assert folder.is_dir() and folder != taken[0]


def test_two_processes_may_convert_at_once(package, tmp_path) -> None:
    site, _ = package
    script = (
        "import torch; from pagedkv.models import load_model\n"
        f"print(load_model({EMBEDDED_MODEL!r}).path)"
    )
    paths = [str(site), *(path for path in sys.path if path)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    runs = [
        subprocess.Popen([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    printed = {run.communicate(timeout=120)[0].strip() for run in runs}
    assert [run.returncode for run in runs] == [0, 0]
    [folder] = printed
    assert [path.name for path in Path(folder).parent.iterdir()] == [Path(folder).name]
