"""What requests of an `LLM` share: public prefixes, tenants and salts, siblings, spans."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from tiny_llm import byte_tokenizer, save_tiny_llm

from pagedkv import LLM, BeamSearchParams, RequestOutput, SamplingParams
from pagedkv.errors import ConfigError, RequestError
from pagedkv.scheduling.messages import StepStats

ONE = SamplingParams(temperature=0.0, max_tokens=1)
PREFIX = "Four blocks long"  # a token a byte, blocks of 4
PROMPT = PREFIX + " and my own."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-llm")
    save_tiny_llm(path)
    return path


def make(folder: Path, **kwargs: object) -> LLM:
    kwargs = {"num_blocks": 64, "block_size": 4, **kwargs}
    return LLM(folder, **kwargs)


def cached(outputs: Sequence[RequestOutput]) -> list[int]:
    return [output.num_cached_tokens for output in outputs]


@pytest.mark.parametrize(
    "prefix", [PREFIX, {"prompt_token_ids": byte_tokenizer().encode(PREFIX)}], ids=["text", "ids"]
)
def test_tenants_share_a_public_prefix_and_nothing_else(folder: Path, prefix: object) -> None:
    llm = make(folder, public_prefixes=[prefix])
    found = [llm.generate(PROMPT, ONE, tenant=tenant)[0] for tenant in ("a", "b", None, "a")]
    assert cached(found) == [0, len(PREFIX), len(PREFIX), len(PROMPT) - 1]
    assert len({output.outputs[0].token_ids for output in found}) == 1


@pytest.mark.parametrize(
    "prefixes",
    ["text", None, 5, {"prompt": "text"}, [""], [5], [{"prompt_token_ids": [9999]}], [{"x": 1}]],
)
def test_public_prefixes_that_are_none_are_refused(folder: Path, prefixes: object) -> None:
    with pytest.raises(ConfigError, match="public_prefixes"):
        make(folder, public_prefixes=prefixes)


def test_a_public_prefix_without_a_whole_block_is_told(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(folder, public_prefixes=[{"prompt_token_ids": [1] * n} for n in (4, 3)])
    (record,) = [r for r in caplog.records if "public_prefixes" in r.getMessage()]
    assert "public_prefixes[1]" in record.getMessage()


def test_a_salt_narrows_sharing_inside_its_tenant(folder: Path) -> None:
    llm = make(folder)
    pairs = [("a", None), ("a", "s"), ("b", "s"), (None, "s"), ("a", "s"), ("a", None)]
    found = [llm.generate(PROMPT, ONE, tenant=t, cache_salt=s)[0] for t, s in pairs]
    assert cached(found) == [0, 0, 0, 0, len(PROMPT) - 1, len(PROMPT) - 1]


@pytest.mark.parametrize("kind", ["generate", "beam_search", "chat", "add_request"])
def test_every_kind_of_request_takes_tenant_and_salt(folder: Path, kind: str) -> None:
    llm = make(folder)

    def hits(**who: str) -> int:
        if kind == "beam_search":
            (output,) = llm.beam_search(PROMPT, BeamSearchParams(2, 1), **who)
        elif kind == "chat":
            (output,) = llm.chat([{"role": "user", "content": PROMPT}], ONE, **who)
        elif kind == "add_request":
            llm.engine.add_request("r", PROMPT, ONE, **who)
            (output,) = llm.engine.step()
        else:
            (output,) = llm.generate(PROMPT, ONE, **who)
        return output.num_cached_tokens

    assert hits(tenant="a", cache_salt="s") == 0
    assert [hits(), hits(tenant="a"), hits(tenant="b", cache_salt="s")] == [0, 0, 0]
    assert hits(tenant="a", cache_salt="s") >= len(PROMPT) - 1


@pytest.mark.parametrize("name", ["tenant", "cache_salt"])
@pytest.mark.parametrize("value", [5, "", "\ud800"])
def test_names_that_are_none_are_refused(folder: Path, name: str, value: object) -> None:
    llm = make(folder)
    with pytest.raises(RequestError, match=name):
        llm.generate(PROMPT, ONE, **{name: value})
    assert not llm.engine.has_unfinished_requests()


@pytest.mark.parametrize("kind", ["lone", "samples", "beams"])
def test_prompts_given_together_compute_what_they_have_in_common_once(
    folder: Path, kind: str
) -> None:
    llm = make(folder)
    prompts = [PREFIX + end for end in (" a", " b", " c")]
    steps: list[int] = []

    def note(outputs: Sequence[RequestOutput], stats: StepStats | None) -> None:
        if stats is not None:
            steps.append(stats.num_tokens)

    if kind == "beams":
        found = llm.beam_search(prompts, BeamSearchParams(2, 4), on_step=note)
    else:
        params = SamplingParams(n=1 + 2 * (kind == "samples"), seed=1, max_tokens=4)
        found = llm.generate(prompts, params, on_step=note)
    assert steps[0] == len(prompts[0])
    assert cached(found) == [0, len(PREFIX), len(PREFIX)]
    for prompt, output in zip(prompts, found, strict=True):
        alone = make(folder)
        if kind == "beams":
            (want,) = alone.beam_search(prompt, BeamSearchParams(2, 4))
        else:
            (want,) = alone.generate(prompt, params)
        assert [o.token_ids for o in output.outputs] == [o.token_ids for o in want.outputs]


@pytest.mark.parametrize("backend", ["native", "gather", "reference"])
def test_spans_that_are_read_once_are_counted(folder: Path, backend: str) -> None:
    counts = []
    for sanitize in (False, True):
        llm = make(folder, attention_backend=backend, sanitize=sanitize)
        stats: list[StepStats] = []
        llm.generate(
            "long " * 40,
            SamplingParams(n=3, seed=1, max_tokens=4),
            on_step=lambda outputs, step, stats=stats: stats.append(step),
        )
        counts.append([step.shared_spans for step in stats if step is not None])
    assert counts[0] == counts[1]
    # Three samples have the whole spans of the prompt in common from the second step on.
    assert counts[0][0] == 0
    assert all((count > 0) == (backend == "native") for count in counts[0][1:])
