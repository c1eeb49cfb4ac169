"""Recorded runs, replayed: every decision again, block ids included."""

from __future__ import annotations

import dataclasses
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedkv.cache import BlockManager
from pagedkv.engine.core import EngineCore
from pagedkv.engine.recording import Recorder
from pagedkv.engine.toy import ToyExecutor, payload_bytes
from pagedkv.errors import ConfigError
from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.messages import Abort, Add, Drain
from pagedkv.scheduling.params import BeamSearchParams, SamplingParams
from pagedkv.scheduling.scheduler import Scheduler
from pagedkv.scheduling.step import Result, Step, Ticket
from pagedkv.scheduling.tiering import LowerTiers
from pagedkv.simulation.replay_run import replay_run
from pagedkv.tiers.host import HostTier
from pagedkv.tiers.names import Namer

VOCAB = 30
# A replay that ends at a difference leaves its requests where they are.
stops_early = pytest.mark.plants_faults


class FaultyToy(ToyExecutor):
    """Takes random time, and sometimes fails: a row, a step, or by an interrupt."""

    def __init__(self, rng: random.Random, faults: float, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rng, self.faults = rng, faults

    def collect(self, ticket: Ticket) -> Result:
        result = super().collect(ticket)
        if self.rng.random() < self.faults:
            raise self.rng.choice([ValueError("bad"), KeyError("k"), KeyboardInterrupt("now")])
        if self.rng.random() < self.faults:
            result = dataclasses.replace(result, tokens=result.tokens[:-1])  # does not fit
        if self.rng.random() < self.faults:
            result.errors[0] = "the row went wrong"
        return dataclasses.replace(result, duration=self.rng.random() / 7)


def add(rng: random.Random, name: str, now: float) -> Add:
    stem = [rng.randrange(3)] * rng.randrange(9)
    prompt = (*stem, *(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 9))))
    if rng.random() < 0.2:
        beam = BeamSearchParams(rng.choice([1, 2, 4]), rng.randrange(1, 9))
        return Add(name, prompt, beam.sampling, now, 0, beam=beam)
    params = SamplingParams(
        n=rng.choice([1, 1, 2, 3]),
        temperature=rng.choice([0.0, 1.0]),
        max_tokens=rng.randrange(1, 14),
        logprobs=rng.choice([None, 0, 2]),
        prompt_logprobs=rng.choice([None, None, None, 1]),
    )
    tenant = rng.choice([None, "a", "b"])
    deadline = now + rng.random() * 9 if rng.random() < 0.1 else None
    wanted = rng.random() < 0.4
    return Add(
        name,
        prompt,
        params,
        now,
        rng.randrange(99),
        priority=rng.randrange(3),
        tenant=tenant,
        ttft_slo=rng.random() * 3 + 0.01 if wanted else None,
        tpot_slo=rng.random() / 5 + 0.01 if wanted else None,
        deadline=deadline,
    )


def record(
    path: Path,
    seed: int,
    faults: float = 0.0,
    close: bool = True,
    tier: bool = False,
    **settings: Any,
) -> int:
    """A random run under pressure; how many of its requests were preempted."""
    rng = random.Random(seed)
    blocks, size = rng.choice([6, 9, 12]), rng.choice([2, 4])
    manager = BlockManager(blocks, size, prefix_caching=rng.random() < 0.8, max_seqs=8)
    config = SchedulerConfig(8, rng.choice([8, 12]), 40, (0,), VOCAB, ((1, 1, 1, 1),), **settings)
    host = HostTier(30 * payload_bytes(size), payload_bytes(size)) if tier else None
    lower = None if host is None else LowerTiers(host, Namer(b"toy"), payload_bytes(size))
    scheduler = Scheduler(manager, config, lower)
    toy = FaultyToy(rng, faults, blocks, size, VOCAB, eos_positions=(9, 14), tier=host)
    recorder = Recorder(path, scheduler)
    core = EngineCore(scheduler, toy, recorder)
    now, sent = 100.0 * rng.random(), 0
    while sent < 40 or core.has_unfinished():
        if sent < 40 and rng.random() < 0.5:
            core.send(add(rng, f"r{sent}", now))
            sent += 1
        if rng.random() < 0.05:
            core.send(Abort(f"r{rng.randrange(40)}", rng.choice([None, 0, 1])))
        if rng.random() < 0.02:
            core.reset_prefix_cache()
        if rng.random() < 0.1 and len(scheduler):
            core.send(core.release(rng.choice(sorted(scheduler.roster.requests)), now))
        if sent == 40 and rng.random() < 0.1:
            core.send(Drain())
        with suppress(KeyboardInterrupt):
            core.step(now)
        now += rng.random() / 3
    if close:
        recorder.close()
    return scheduler.stats.num_preemptions


@pytest.mark.parametrize("seed", range(12))
def test_a_run_under_pressure_is_replayed_entry_by_entry(seed: int, tmp_path: Path) -> None:
    path = tmp_path / "run"
    preempted = record(path, seed, faults=0.02 * (seed % 2))
    run = replay_run(path)
    assert run.difference is None and not run.cut_off
    assert run.num_requests >= 40 and run.num_steps > 40
    kinds = [json.loads(line).get("kind") for line in path.read_text().splitlines()]
    assert run.num_decisions == sum(kind is not None for kind in kinds)
    assert kinds.count("preempt") == preempted


def test_the_runs_above_have_everything(tmp_path: Path) -> None:
    """Not only what is easy."""
    found: set[str] = set()
    for seed in range(12):
        record(tmp_path / "run", seed, faults=0.02 * (seed % 2))
        for line in (tmp_path / "run").read_text().splitlines():
            values = json.loads(line)
            found.add(values.get("kind") or next(iter(values)))
            if "failure" in values:
                found.add(values["failure"]["kind"])
            if "result" in values and values["result"]["errors"]:
                found.add("row error")
    assert found >= {
        *("Add", "Abort", "Drain", "reset_cache", "result", "failure", "end", "row error"),
        *("release", "Resume", "resume"),
        *("arrive", "refuse", "wait", "admit", "chunk", "preempt", "step", "fail", "deadline"),
        *("interrupt", "error", "cut_short"),
    }


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair", "deadline", "fair+deadline"])
@pytest.mark.parametrize("admission", ["first_chunk", "max_tokens", "expected_peak"])
def test_settings_are_part_of_a_recording(policy: str, admission: str, tmp_path: Path) -> None:
    record(tmp_path / "run", 3, policy=policy, admission=admission, watermark=0.05)
    assert replay_run(tmp_path / "run").difference is None


@pytest.mark.parametrize("seed", range(6))
def test_what_lower_tiers_have_is_part_of_a_recording(seed: int, tmp_path: Path) -> None:
    path = tmp_path / "run"
    record(path, seed, faults=0.02 * (seed % 2), tier=True)
    run = replay_run(path)
    assert run.difference is None and run.num_requests >= 40


def test_the_runs_above_have_moved_blocks(tmp_path: Path) -> None:
    lines = []
    for seed in range(6):
        record(tmp_path / "run", seed, faults=0.02 * (seed % 2), tier=True)
        lines += lines_of(tmp_path / "run")
    assert any(True in line.get("found", ()) for line in lines)
    assert any(line.get("loads") for line in lines) and any(line.get("stores") for line in lines)
    assert any(line["result"].get("transfers") for line in lines if "result" in line)


@stops_early
def test_another_find_in_a_lower_tier_leads_to_another_decision(tmp_path: Path) -> None:
    for seed in range(6):
        record(tmp_path / "run", seed, tier=True)
        lines = lines_of(tmp_path / "run")
        # A look is followed by the admission that it was for.
        finds = [i - 1 for i, line in enumerate(lines) if line.get("below_tokens")]
        finds = [i for i in finds if "found" in lines[i]]
        if finds:
            break
    at = finds[0]
    lines[at]["found"] = [False] * len(lines[at]["found"])
    save(tmp_path / "run", lines)
    assert replay_run(tmp_path / "run").difference is not None


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def save(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def changed(values: dict[str, Any]) -> Iterator[str]:
    """Changes one input in place, in every way that matters; says which."""
    if "at" in values:
        values["at"] += 1e-6
        yield "time"
    elif "result" in values and values["result"]["tokens"]:
        values["result"]["tokens"][0] = 0  # the end token
        yield "token"
    elif "Abort" in values:
        values["Abort"]["request_id"] = "nobody"
        yield "abort"
    elif "Add" in values:
        values["Add"]["prompt"].append(1)
        yield "prompt"


@stops_early
@pytest.mark.parametrize("kind", ["time", "token", "abort", "prompt"])
def test_another_input_leads_to_another_decision(kind: str, tmp_path: Path) -> None:
    differing = 0
    for seed in range(5, 12):
        record(tmp_path / "run", seed)
        lines = lines_of(tmp_path / "run")
        for i in range(len(lines)):
            aborted = lines[i].get("Abort", {}).get("request_id")
            if aborted is not None and lines[i + 1].get("request") != aborted:
                continue  # it had ended before
            other = [*lines[:i], json.loads(json.dumps(lines[i])), *lines[i + 1 :]]
            if next(changed(other[i]), None) != kind:
                continue
            save(tmp_path / "other", other)
            difference = replay_run(tmp_path / "other").difference
            if difference is not None:
                assert difference.line > i and difference.recorded != difference.replayed
                differing += 1
            if differing == 3:
                return
    raise AssertionError(f"only {differing} changes of a {kind} have made a difference")


@stops_early
def test_block_ids_are_compared(tmp_path: Path) -> None:
    record(tmp_path / "run", 5)
    lines = lines_of(tmp_path / "run")
    at = next(i for i, line in enumerate(lines) if line.get("kind") == "step" and line["table"])
    lines[at]["table"][0][2] += 1
    save(tmp_path / "run", lines)
    difference = replay_run(tmp_path / "run").difference
    assert difference is not None and difference.line == at + 1


@stops_early
def test_another_pool_leads_to_other_decisions(tmp_path: Path) -> None:
    record(tmp_path / "run", 5)
    lines = lines_of(tmp_path / "run")
    lines[1]["settings"]["pool"]["num_blocks"] += 1
    save(tmp_path / "run", lines)
    assert replay_run(tmp_path / "run").difference is not None


@stops_early
def test_decisions_more_or_fewer_than_recorded_are_a_difference(tmp_path: Path) -> None:
    record(tmp_path / "run", 5)
    lines = lines_of(tmp_path / "run")
    ends = [i for i, line in enumerate(lines) if line.get("kind") == "end"]
    save(tmp_path / "fewer", lines[: ends[3]] + lines[ends[3] + 1 :])
    fewer = replay_run(tmp_path / "fewer").difference
    assert fewer is not None and '"end"' in str(fewer.replayed)
    save(tmp_path / "more", [*lines, lines[ends[-1]]])
    assert replay_run(tmp_path / "more").difference == (
        len(lines) + 1,
        json.dumps(lines[ends[-1]], separators=(",", ":")),
        None,
    )


@stops_early
def test_a_run_that_was_killed_is_replayed_as_far_as_it_goes(tmp_path: Path) -> None:
    record(tmp_path / "run", 6, close=False)
    content = (tmp_path / "run").read_bytes()
    steps = []
    for length in range(3000, len(content), len(content) // 12):
        (tmp_path / "part").write_bytes(content[:length])
        run = replay_run(tmp_path / "part")
        assert run.difference is None and run.cut_off
        steps.append(run.num_steps)
    assert steps == sorted(steps) and steps[-1] > steps[0]


def test_steps_and_results_can_be_observed(tmp_path: Path) -> None:
    record(tmp_path / "run", 7)
    seen: list[tuple[float, Step, Result]] = []
    run = replay_run(tmp_path / "run", lambda *given: seen.append(given))
    assert len(seen) == run.num_steps
    durations = [
        line["result"]["duration"] for line in lines_of(tmp_path / "run") if "result" in line
    ]
    assert [result.duration for _, _, result in seen] == durations
    times = [line["at"] for line in lines_of(tmp_path / "run") if "at" in line]
    assert [now for now, _, _ in seen] == [
        time for time in times if time in {n for n, _, _ in seen}
    ]
    assert all(isinstance(step.tokens, np.ndarray) for _, step, _ in seen)


@stops_early
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"result": {"tokens": []}}, "Result: .*indptr"),
        ({"Add": {"request_id": 1}}, "1 is no str"),
        ({"failure": {}}, "'kind'"),
        ({"nothing": 1}, "'nothing' is nothing that is recorded"),
        ({"at": "soon"}, "'soon' is no float"),
        ({"step": 1, "kind": "end"}, "'now' is missing"),
        ({}, "not enough values"),
    ],
)
def test_lines_that_cannot_be_read_are_named(
    line: dict[str, Any], message: str, tmp_path: Path
) -> None:
    record(tmp_path / "run", 5)
    lines = lines_of(tmp_path / "run")
    save(tmp_path / "run", [*lines[:2], line, *lines[2:]])
    with pytest.raises(ConfigError, match=f"run, line 3: .*{message}"):
        replay_run(tmp_path / "run")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "'settings'"),
        (
            {"settings": {"scheduler": {"max_num_seqs": 1}, "pool": {}}},
            "SchedulerConfig: .*missing",
        ),
        ({"settings": {"scheduler": {}, "pool": {}}}, "line 2"),
    ],
)
def test_settings_that_cannot_be_read_are_named(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    record(tmp_path / "run", 5)
    lines = lines_of(tmp_path / "run")
    save(tmp_path / "run", [lines[0], settings, *lines[2:]])
    with pytest.raises(ConfigError, match=message):
        replay_run(tmp_path / "run")


@stops_early
def test_a_step_without_a_result_is_named(tmp_path: Path) -> None:
    record(tmp_path / "run", 5)
    lines = lines_of(tmp_path / "run")
    at = next(i for i, line in enumerate(lines) if "result" in line)
    save(tmp_path / "run", lines[:at] + lines[at + 1 :])
    with pytest.raises(ConfigError, match="the step has no result"):
        replay_run(tmp_path / "run")


def test_a_replay_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import pagedkv.simulation.replay_run"
    subprocess.run([sys.executable, "-c", code], check=True)
