"""Runs of SmolLM2 under pressure, recorded and replayed without the model."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from pagedkv import LLM, BeamSearchParams, SamplingParams
from pagedkv.engine.tiers import TierConfig
from pagedkv.simulation.replay_run import replay_run

PROMPTS = [
    "The block table maps",
    "When memory runs out, the scheduler",
    "When memory runs out, the operating system",
    "A sequence of tokens is",
    "Paging was invented for",
    "In a small town by the sea there lived",
]


@pytest.fixture(scope="module", params=[None, TierConfig(host_memory=2**24)], ids=["", "tiers"])
def recording(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Arrivals while others run, aborts, samples, beams, a stop string, in 14 blocks of 4."""
    path = tmp_path_factory.mktemp("recorded") / "run"
    llm = LLM(
        "smollm2-135m-instruct",
        num_blocks=14,
        block_size=4,
        max_model_len=44,
        max_num_seqs=6,
        max_num_batched_tokens=16,
        tiers=request.param,
        record=path,
    )
    engine, later = llm.engine, list(enumerate(PROMPTS))
    steps = 0
    while later or engine.has_unfinished_requests():
        if later and steps % 2 == 0:
            i, prompt = later.pop(0)
            stop = "e" if i == 3 else ()
            drawn = SamplingParams(
                n=1 + i % 2, max_tokens=20, seed=i, stop=stop, logprobs=1, ignore_eos=True
            )
            engine.add_request(f"draw-{i}", prompt, drawn, tenant=f"t{i % 2}")
            if i % 2:
                beams = BeamSearchParams(beam_width=2, max_tokens=12)
                engine.add_request(f"beam-{i}", prompt, beams)
        if steps == 9:
            engine.abort_request(["draw-1", "draw-2"])
        engine.step()
        steps += 1
    llm.close()
    return path


def test_the_run_has_been_under_pressure(recording: Path) -> None:
    lines = [json.loads(line) for line in recording.read_text().splitlines()]
    kinds = Counter(line.get("kind", "") for line in lines)
    assert kinds["preempt"] > 2 and kinds["wait"] > 2
    ends = {reason for line in lines if line.get("kind") == "end" for reason in line["reasons"]}
    assert ends >= {"length", "abort"}
    assert any("Abort" in line for line in lines)
    tiered = lines[1]["settings"]["tier_block_bytes"] is not None
    assert tiered == any(line.get("loads") for line in lines)


def test_the_decision_log_of_the_replay_is_identical(recording: Path) -> None:
    run = replay_run(recording)
    assert run.difference is None and not run.cut_off
    assert run.num_requests == 9 and run.num_steps > 30


@pytest.mark.plants_faults
def test_another_result_makes_another_log(recording: Path, tmp_path: Path) -> None:
    """The control: the comparison can fail."""
    lines = [json.loads(line) for line in recording.read_text().splitlines()]
    for i in [i for i, line in enumerate(lines) if "result" in line][::9]:
        other = {"result": lines[i]["result"] | {"errors": {"0": "the row went wrong"}}}
        written = [*lines[:i], other, *lines[i + 1 :]]
        (tmp_path / "other").write_text("".join(json.dumps(line) + "\n" for line in written))
        difference = replay_run(tmp_path / "other").difference
        assert difference is not None and difference.line > i
