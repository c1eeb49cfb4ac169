"""Beam search against transformers' `generate(num_beams=...)`, float32, and against itself.

Scores agree to 1e-4; so do the tokens, except where hypotheses tie within that.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import VOCAB, save_tiny
from transformers import AutoModelForCausalLM, PreTrainedModel

from pagedkv import LLM, BeamSearchParams, RequestOutput, SamplingParams
from pagedkv.errors import RequestError
from pagedkv.models.embedded import embedded_folder

pytestmark = pytest.mark.parity

TOLERANCE = 1e-4
PROMPTS = [[(5 * i * i + 7 * n + i) % VOCAB for i in range(n)] for n in (1, 4, 7, 8, 13, 21)]
# Scores: of hypotheses with their tokens, best first.
Scored = list[tuple[float, list[int]]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("tiny")
    return folder, save_tiny("llama", folder).eval()


def with_eos(folder: Path, to: Path, eos: list[int]) -> Path:
    """The same model that says it ends with other tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.config.eos_token_id = model.generation_config.eos_token_id = eos
    model.save_pretrained(to)
    return to


def reference(
    model: PreTrainedModel, prompt: list[int], params: BeamSearchParams, eos: list[int]
) -> Scored:
    """transformers' hypotheses, padded outputs cut after the end token."""
    got = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        max_new_tokens=params.max_tokens,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        do_sample=False,
        eos_token_id=None if params.ignore_eos else eos,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    found: Scored = []
    for score, row in zip(got.sequences_scores.tolist(), got.sequences.tolist(), strict=True):
        tokens = row[len(prompt) :]
        if not params.ignore_eos:
            ends = [i for i, token in enumerate(tokens) if token in eos]
            tokens = tokens[: ends[0] + 1] if ends else tokens
        found.append((score, tokens))
    return found


def hypotheses(output: RequestOutput) -> Scored:
    return [(o.score, list(o.token_ids)) for o in output.outputs]


def assert_equal(got: Scored, want: Scored) -> None:
    assert len(got) == len(want)
    assert [score for score, _ in got] == pytest.approx([s for s, _ in want], abs=TOLERANCE)
    for score, tokens in got:
        assert tokens in [t for s, t in want if abs(s - score) <= TOLERANCE]


@pytest.mark.parametrize("eos", [[62], [2, 10, 17, 66]])
def test_tiny_model(eos: list[int], tiny: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    """All searches in one batch, blocks of 3; end tokens with which some finish early."""
    folder, model = tiny
    llm = LLM(
        with_eos(folder, tmp_path, eos), block_size=3, num_blocks=400, max_num_batched_tokens=64
    )
    searches = [
        BeamSearchParams(width, 12, length_penalty=penalty, early_stopping=early)
        for width, penalty in ((2, 1.0), (4, 0.0), (4, 2.5), (5, -1.0), (7, 1.0))
        for early in (False, True)
    ]
    searches.append(BeamSearchParams(3, 12, ignore_eos=True))
    asked = [(prompt, params) for prompt in PROMPTS for params in searches]
    outputs = llm.beam_search(
        [{"prompt_token_ids": prompt} for prompt, _ in asked], [params for _, params in asked]
    )
    short = 0
    for (prompt, params), output in zip(asked, outputs, strict=True):
        assert_equal(hypotheses(output), reference(model, prompt, params, eos))
        short += any(len(o.token_ids) < 12 for o in output.outputs)
    assert short > len(asked) // 4


def test_smollm2() -> None:
    source = embedded_folder(torch.float32)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    llm = LLM("smollm2-135m-instruct", dtype="float32", num_blocks=200)
    params = BeamSearchParams(4, 16)
    outputs = llm.beam_search(["The capital of France is", "In 1969, the first humans"], params)
    eos = list(llm.engine.core.scheduler.config.eos_token_ids)
    for output in outputs:
        want = reference(model, list(output.prompt_token_ids), params, eos)
        assert_equal(hypotheses(output), want)
        text = llm.get_tokenizer().decode(want[0][1], skip_special_tokens=True)
        assert output.outputs[0].text == text


def test_one_beam_is_greedy(tiny: tuple[Path, PreTrainedModel]) -> None:
    llm = LLM(tiny[0], num_blocks=200, block_size=3)
    for prompt in PROMPTS:
        asked = {"prompt_token_ids": prompt}
        (beam,) = llm.beam_search(asked, BeamSearchParams(1, 12, length_penalty=0.0))
        greedy = SamplingParams(temperature=0.0, max_tokens=12, logprobs=0)
        (drawn,) = llm.generate(asked, greedy)
        assert beam.outputs[0].token_ids == drawn.outputs[0].token_ids
        assert beam.outputs[0].score == pytest.approx(drawn.outputs[0].cumulative_logprob)


def test_the_same_bits_beside_others_and_after_preemption(
    tiny: tuple[Path, PreTrainedModel],
) -> None:
    """Solo equality in the deterministic mode: any step of a short run is interrupted."""
    params = BeamSearchParams(3, 6, length_penalty=0.5)

    def search(preempt_at: int | None, **settings: int) -> list[Scored]:
        settings = {"num_blocks": 100, "block_size": 3, **settings}
        llm = LLM(tiny[0], deterministic=True, attention_backend="native", **settings)
        engine, scheduler = llm.engine, llm.engine.core.scheduler
        asked = range(len(PROMPTS)) if preempt_at is not None else [2]
        for i in asked:
            engine.add_request(f"b{i}", {"prompt_token_ids": PROMPTS[i]}, params)
            if preempt_at is not None:
                drawn = SamplingParams(seed=i, max_tokens=5, ignore_eos=True)
                engine.add_request(f"s{i}", {"prompt_token_ids": PROMPTS[i]}, drawn)
        done: dict[str, RequestOutput] = {}
        steps = 0
        while engine.has_unfinished_requests():
            for request in list(scheduler._roster.running) if steps == preempt_at else []:
                scheduler._roster.preempt(request)
            done |= {output.request_id: output for output in engine.step() if output.finished}
            steps += 1
        return hypotheses(done["b2"])

    want = search(None)
    for step in range(12):
        assert search(step, max_num_batched_tokens=11) == want
    assert search(99, num_blocks=14) == want


@pytest.mark.parametrize(
    "params",
    [None, SamplingParams(), [BeamSearchParams(2, 4), SamplingParams()], BeamSearchParams(200, 4)],
)
def test_refusals_leave_nothing_behind(params: object, tiny: tuple[Path, PreTrainedModel]) -> None:
    llm = LLM(tiny[0], num_blocks=20)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS[:2]]
    with pytest.raises(RequestError):
        llm.beam_search(prompts, params)
    assert not llm.engine.has_unfinished_requests()
    assert llm.engine.block_manager.num_free_blocks == 20
