"""`LLM` on a tiny random llama: prompts, order, chat, settings, interrupts."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_llm import save_tiny_llm
from transformers import LlamaForCausalLM

from pagedkv import LLM, RequestOutput, SamplingParams
from pagedkv.engine.machine import MachineMemory
from pagedkv.errors import ConfigError, ModelError, RequestError
from pagedkv.scheduling.messages import StepStats

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
PROMPTS = ["one", "a second prompt", "x", "the third is the longest of all the prompts"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-llm")
    save_tiny_llm(path)
    return path


@pytest.fixture(scope="module")
def reference(folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder).eval()


@pytest.fixture
def llm(folder: Path) -> LLM:
    return make(folder)


def make(folder: Path, **kwargs: object) -> LLM:
    kwargs = {"num_blocks": 64, "block_size": 4, **kwargs}
    return LLM(folder, **kwargs)


def tokens(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_greedy_text_is_that_of_transformers(llm: LLM, reference: LlamaForCausalLM) -> None:
    outputs = llm.generate(PROMPTS, GREEDY)
    for output in outputs:
        ids = torch.tensor([output.prompt_token_ids])
        with torch.inference_mode():
            expected = reference.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False
            )
        assert output.outputs[0].token_ids == tuple(expected[0, ids.shape[1] :].tolist())


def test_results_are_in_the_order_of_the_prompts(llm: LLM) -> None:
    params = [dataclasses.replace(GREEDY, max_tokens=m) for m in (9, 1, 5, 3)]
    outputs = llm.generate(PROMPTS, params)
    assert [o.prompt for o in outputs] == PROMPTS
    assert [len(t) for t in tokens(outputs)] == [9, 1, 5, 3]
    assert all(o.finished for o in outputs)
    assert len({o.request_id for o in outputs}) == 4


def test_all_forms_of_prompts(llm: LLM) -> None:
    texts = tokens(llm.generate(["abc"], GREEDY))
    ids = llm.generate("abc", GREEDY)[0].prompt_token_ids
    for form in ({"prompt": "abc"}, {"prompt_token_ids": list(ids)}, [{"prompt_token_ids": ids}]):
        assert tokens(llm.generate(form, GREEDY)) == texts
    assert llm.generate([], GREEDY) == []


@pytest.mark.parametrize(
    "array", [np.array, torch.tensor, tuple, list], ids=["numpy", "torch", "tuple", "list"]
)
def test_token_ids_of_any_array_are_plain_integers(llm: LLM, array: Callable[..., Any]) -> None:
    (output,) = llm.generate({"prompt_token_ids": array([5, 6])}, GREEDY)
    assert output.prompt_token_ids == (5, 6)
    assert {type(token) for token in output.prompt_token_ids} == {int}


def test_token_ids_without_their_key_are_refused_with_it(llm: LLM) -> None:
    for prompts in ([1, 2, 3], [[1, 2], [3]], np.array([1, 2])):
        with pytest.raises(RequestError, match=r"prompts?\b.*\{'prompt_token_ids': \[...\]\}"):
            llm.generate(prompts)


def test_parameters_by_the_name_that_vllm_users_know(llm: LLM) -> None:
    (by_name,) = llm.generate("abc", sampling_params=GREEDY)
    assert tokens([by_name]) == tokens(llm.generate("abc", GREEDY))
    with pytest.raises(
        RequestError, match=r"sampling_params=\{'temperature': 0\} must be Sampling"
    ):
        llm.generate("x", {"temperature": 0})


def test_an_unknown_key_of_a_prompt_is_named(llm: LLM) -> None:
    for prompt in ({"promt": "x"}, {"prompt": "x", "promt": "y"}):
        with pytest.raises(RequestError, match="no key 'promt'"):
            llm.generate(prompt)


def test_tokenizer_of_the_model(llm: LLM, tmp_path: Path) -> None:
    (output,) = llm.generate("abc", GREEDY)
    assert tuple(llm.get_tokenizer()("abc")["input_ids"]) == output.prompt_token_ids
    save_tiny_llm(tmp_path)
    for file in tmp_path.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelError, match=f"{tmp_path} has no tokenizer: put tokenizer.json there"):
        make(tmp_path).get_tokenizer()
    with pytest.raises(RequestError, match=r"put tokenizer\.json into its folder"):
        make(tmp_path).generate("abc")


def test_default_params(llm: LLM) -> None:
    assert [len(t) for t in tokens(llm.generate(["a", "b"]))] == [16, 16]


def test_every_step_is_reported_once_with_its_numbers(llm: LLM) -> None:
    llm.engine.add_request("mine", "keep me", GREEDY)
    for _ in range(2):  # numbers of an earlier call are not reported again
        steps: list[int] = []
        ends: list[str] = []

        def on_step(outputs: Sequence[RequestOutput], stats: StepStats | None) -> None:
            assert stats is not None
            steps.append(stats.step)  # noqa: B023
            ends.extend(o.request_id for o in outputs if o.finished)  # noqa: B023

        outputs = llm.generate(["a", "b"], GREEDY, on_step=on_step)
        assert ends == [o.request_id for o in outputs]
        assert steps == list(range(steps[0], steps[0] + 8))


@pytest.mark.parametrize("bad", ["", {"prompt_token_ids": [10**6]}, "x" * 256, None])
def test_one_bad_prompt_refuses_the_list_and_names_it(llm: LLM, bad: object) -> None:
    with pytest.raises(RequestError, match="prompt 2: "):
        llm.generate(["fine", "good", bad], GREEDY)
    assert not llm.engine.has_unfinished_requests()
    assert llm.engine.block_manager.num_free_blocks == 64


def test_params_must_match_the_prompts(llm: LLM) -> None:
    with pytest.raises(RequestError, match="1 params for 2 prompts"):
        llm.generate(["a", "b"], [GREEDY])


def test_chat_uses_the_models_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    output = llm.chat(messages, GREEDY)[0]
    assert output.prompt == "[user]hi[assistant]"
    assert tokens([output]) == tokens(llm.generate("[user]hi[assistant]", GREEDY))
    two = llm.chat([messages, [{"role": "user", "content": "ho"}]], GREEDY)
    assert [o.prompt for o in two] == ["[user]hi[assistant]", "[user]ho[assistant]"]
    for wrong in ([], [{"role": "user"}], [{"role": "wizard", "content": "x"}]):
        with pytest.raises(RequestError):
            llm.chat(wrong, GREEDY)


def test_chat_joins_parts_of_text_and_names_what_is_none(llm: LLM) -> None:
    parts: list[dict[str, object]] = [{"type": "text", "text": t} for t in ("one", "two")]
    (output,) = llm.chat([{"role": "user", "content": parts}], GREEDY)
    assert output.prompt == "[user]one\ntwo[assistant]"
    image = {"type": "image_url", "image_url": {"url": "x"}}
    for content in ([*parts, image], "image_url"), (None, "content=None"), (["a"], "part 'a'"):
        with pytest.raises(RequestError, match=content[1]):
            llm.chat([{"role": "user", "content": content[0]}])
    with pytest.raises(RequestError, match=r"messages='hi' must be a list of \{'role'"):
        llm.chat("hi")


class Interrupting:
    """An executor that is interrupted in its n-th step."""

    def __init__(self, executor: object, step: int, error: type[BaseException]) -> None:
        self._executor, self._left, self._error = executor, step, error

    def submit(self, step: object) -> object:
        return self._executor.submit(step)

    def collect(self, ticket: object) -> object:
        result = self._executor.collect(ticket)
        self._left -= 1
        if self._left == 0:
            raise self._error
        return result


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_interrupted_generate_leaves_a_usable_engine(
    llm: LLM, step: int, error: type[BaseException]
) -> None:
    core, executor = llm.engine.core, llm.engine.core.executor
    core.executor = Interrupting(executor, step, error)
    with pytest.raises(error):
        llm.generate(PROMPTS, GREEDY)
    core.executor = executor
    assert llm.engine.block_manager.num_held_blocks == 0
    assert not llm.engine.has_unfinished_requests()
    fresh = tokens(llm.generate(PROMPTS, GREEDY))
    assert [len(t) for t in fresh] == [8] * 4


def test_interrupt_between_steps_aborts_only_what_generate_started(llm: LLM) -> None:
    llm.engine.add_request("mine", "keep me", GREEDY)

    def interrupt(outputs: Sequence[RequestOutput], stats: StepStats | None) -> None:
        if any(output.finished for output in outputs):
            raise KeyboardInterrupt

    params = [dataclasses.replace(GREEDY, max_tokens=m) for m in (1, 8)]
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], params, on_step=interrupt)
    outputs = []
    while llm.engine.has_unfinished_requests():
        outputs += llm.engine.step()
    assert {o.request_id for o in outputs} == {"mine"}
    assert outputs[-1].finished and len(outputs[-1].outputs[0].token_ids) == 8


def test_outputs_of_other_requests_are_kept_for_step(llm: LLM) -> None:
    llm.engine.add_request("mine", "keep me", dataclasses.replace(GREEDY, max_tokens=2))
    llm.generate("other", GREEDY)
    assert llm.engine.has_unfinished_requests()
    outputs = llm.engine.step()
    assert outputs[-1].request_id == "mine" and outputs[-1].finished


@pytest.mark.parametrize("backend", ["reference", "gather"])
def test_other_backends_give_the_same_text(folder: Path, llm: LLM, backend: str) -> None:
    expected = tokens(llm.generate(PROMPTS, GREEDY))
    assert tokens(make(folder, attention_backend=backend).generate(PROMPTS, GREEDY)) == expected


def test_bfloat16_runs_in_half_the_memory(folder: Path, llm: LLM) -> None:
    half = make(folder, dtype="bfloat16")
    assert half.report.bytes_per_token * 2 == llm.report.bytes_per_token
    assert [len(t) for t in tokens(half.generate(PROMPTS, GREEDY))] == [8] * 4


def test_prefix_cache_can_be_switched_off(folder: Path, llm: LLM) -> None:
    off = make(folder, enable_prefix_caching=False)
    prompt = "a prompt that comes twice"
    for engine, hits in ((llm, len(prompt) - 1), (off, 0)):
        first, second = engine.generate(prompt, GREEDY), engine.generate(prompt, GREEDY)
        assert (first[0].num_cached_tokens, second[0].num_cached_tokens) == (0, hits)
        assert tokens(first) == tokens(second)


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"device": "tpu"}, "device='tpu'"),
        ({"block_size": 0}, "block_size=0"),
        ({"block_size": 2.5}, "block_size=2.5"),
        ({"num_blocks": 0}, "num_blocks=0"),
        ({"num_blocks": 10**12}, "num_blocks=1000000000000"),
        ({"num_blocks": None, "kv_cache_memory": 10}, "kv_cache_memory=10"),
        ({"kv_cache_memory": 10**6}, "twice"),
        ({"max_model_len": 257}, "max_position_embeddings=256"),
        ({"max_model_len": 1}, "max_model_len=1"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens=0"),
        ({"attention_backend": "fast"}, "attention_backend='fast'"),
        ({"attention_backend": "gather", "deterministic": True}, "deterministic"),
        ({"attention_backend": "reference", "deterministic": True}, "native backend"),
    ],
)
def test_settings_that_cannot_work_are_named(
    folder: Path, kwargs: dict[str, object], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        make(folder, **kwargs)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"num_blocks": "8"},
        {"num_blocks": 2.5},
        {"num_blocks": True},
        {"kv_cache_memory": "1GiB"},
        {"kv_cache_memory": 1e9},
        {"block_size": "16"},
        {"max_model_len": "x"},
        {"max_num_seqs": "a"},
        {"max_num_seqs": 10**9},
        {"max_num_batched_tokens": 1.5},
        {"seed": None},
        {"seed": 10**400},
        {"deterministic": "no"},
        {"enable_prefix_caching": 1},
        {"dtype": []},
    ],
    ids=str,
)
def test_foreign_exception_a_setting_of_the_wrong_type_is_named_before_the_model_loads(
    kwargs: dict[str, object],
) -> None:
    with pytest.raises(ConfigError, match=next(iter(kwargs))):
        LLM("nowhere", **{"num_blocks": None, **kwargs})


def test_memory_a_block_table_larger_than_memory_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = MachineMemory(2**20, 2**20)
    monkeypatch.setattr("pagedkv.engine.llm.machine_memory", lambda: memory)
    with pytest.raises(ConfigError, match=r"max_num_seqs=60000 .* 3\.7 MiB and 1\.0 MiB"):
        make(folder, num_blocks=16, max_num_seqs=60_000, max_num_batched_tokens=60_000)


def test_silent_choice_the_start_up_lines_are_logged(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PAGEDKV_SANITIZE", raising=False)  # a warning more
    with caplog.at_level("INFO", logger="pagedkv"):
        llm = make(folder)
    assert tuple(record.getMessage() for record in caplog.records) == llm.report.lines()
    assert {record.levelname for record in caplog.records} == {"INFO"}


def test_silent_choice_falling_back_to_gather_is_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise ImportError("no kernels here")

    monkeypatch.delenv("PAGEDKV_SANITIZE", raising=False)  # a warning more
    monkeypatch.setattr("pagedkv.attention.backends.import_native", missing)
    assert make(folder).report.backend == "gather"
    (warning,) = (r.getMessage() for r in caplog.records if r.levelname == "WARNING")
    assert "gather" in warning and "no kernels here" in warning and "compiler" in warning
    caplog.clear()
    make(folder, attention_backend="gather")  # asked for: no fall-back
    assert not [r for r in caplog.records if r.levelname == "WARNING"]


@pytest.mark.parametrize("bad", [5, None, {1, 2}, b"ab"], ids=str)
def test_foreign_exception_arguments_of_the_wrong_type_are_named(llm: LLM, bad: object) -> None:
    with pytest.raises(RequestError, match="prompts="):
        llm.generate(bad)
    with pytest.raises(RequestError, match="messages="):
        llm.chat(bad)
    if bad is not None:
        with pytest.raises(RequestError, match="params="):
            llm.generate("x", bad)
    with pytest.raises(RequestError, match="conversation"):
        llm.chat([bad])
    for ids in (5, b"ab", "ab"):
        with pytest.raises(RequestError, match="prompt_token_ids="):
            llm.generate({"prompt_token_ids": ids})
    assert not llm.engine.has_unfinished_requests()


def test_unknown_model_is_named() -> None:
    with pytest.raises(ModelError, match="nowhere"):
        LLM("nowhere", num_blocks=8)


def test_report_and_pool_follow_the_settings(folder: Path) -> None:
    llm = make(folder, num_blocks=None, kv_cache_memory=2**20, max_model_len=100)
    report = llm.report
    assert report.bytes_per_token == 2 * 2 * 2 * 8 * 4  # K and V, layers, heads, head_dim, float32
    assert report.num_blocks == llm.engine.block_manager.num_blocks == 2**20 // 1024 - 1
    assert report.longest_context == 100 and report.concurrency == 1023 // 25
    with pytest.raises(RequestError, match="max_model_len=100"):
        llm.generate("x" * 100, GREEDY)


def test_threads_follow_the_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setenv("PAGEDKV_NUM_THREADS", "1")
    try:
        assert make(folder).report.num_threads == torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_a_smaller_number_of_torch_threads_is_honoured(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PAGEDKV_NUM_THREADS", raising=False)
    torch.set_num_threads(1)
    assert make(folder).report.num_threads == torch.get_num_threads() == 1
    torch.set_num_threads(1000)
    assert make(folder).report.num_threads == torch.get_num_threads() < 1000


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_importing_pagedkv_imports_no_torch() -> None:
    code = (
        "import sys, pagedkv; assert 'torch' not in sys.modules; "
        "pagedkv.BlockManager, pagedkv.SamplingParams; assert 'torch' not in sys.modules; "
        "pagedkv.LLM; assert 'torch' in sys.modules; assert 'LLM' in dir(pagedkv)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_foreign_exception_a_missing_extra_is_named(missing: str) -> None:
    code = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "try:\n    from pagedkv import LLM\n"
        "except ImportError as error:\n    print(type(error).__name__, error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    want = f'MissingExtraError {missing} is not installed: pip install "pagedkv[engine]"\n'
    assert done.stdout == want


def test_unknown_attribute_is_an_attribute_error() -> None:
    import pagedkv

    with pytest.raises(AttributeError, match="nothing_like_it"):
        pagedkv.nothing_like_it  # noqa: B018
