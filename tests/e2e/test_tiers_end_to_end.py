"""Real K/V through the tiers: pressure, restart and damage change no bit of the answers."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import VOCAB, save_tiny

from pagedkv import LLM, SamplingParams, Tenant, TierConfig
from pagedkv.errors import ConfigError
from pagedkv.scheduling.policies import POLICIES
from pagedkv.simulation.replay_run import replay_run

PROMPTS = [[(7 * i * i + 3 * i + j * 11) % VOCAB for i in range(20 + 3 * j)] for j in range(6)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of which the parity tests show that attention decides its logits."""
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny("llama", folder)
    return folder


def answers(llm: LLM, prompts: list[list[int]] = PROMPTS, max_tokens: int = 30) -> list[tuple]:
    params = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=3, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params)
    return [tuple(o.outputs[0].token_ids) for o in outputs]


def make(model: Path, **settings: object) -> LLM:
    """By measured cost so small a model would rather compute again, on some machines."""
    options = {"block_size": 4, "num_blocks": 200, "max_num_batched_tokens": 64} | settings
    options.setdefault("scheduling", {"recovery": "swap"})
    return LLM(model, deterministic=True, attention_backend="native", **options)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("sanitize", [True, False])
def test_under_pressure_victims_are_swapped_and_nothing_changes(model, caching, sanitize) -> None:
    expected = answers(make(model, enable_prefix_caching=False))
    llm = make(
        model,
        num_blocks=22,  # of some 85 that all requests take together
        enable_prefix_caching=caching,
        sanitize=sanitize,
        tiers=TierConfig(host_memory=2**24),
    )
    assert answers(llm) == expected
    assert llm.engine.core.scheduler.stats.num_preemptions > 0
    assert llm.engine.tiering.loaded > 0
    assert llm.engine.block_manager.num_held_blocks == 0
    assert llm.engine.block_manager.num_draining_blocks == 0


@pytest.mark.plants_faults
def test_a_recorded_run_with_tiers_is_replayed_decision_by_decision(model, tmp_path) -> None:
    path = tmp_path / "run.jsonl"
    llm = make(model, num_blocks=22, tiers=TierConfig(host_memory=2**16), record=path)
    answers(llm)
    llm.close()
    assert llm.engine.tiering.loaded > 0
    run = replay_run(path)
    assert run.difference is None and not run.cut_off
    assert run.num_requests == len(PROMPTS)
    lines = path.read_text().splitlines()
    found = next(i for i, line in enumerate(lines) if '"found"' in line and "true" in line)
    lines[found] = lines[found].replace("true", "false")
    path.write_text("\n".join(lines) + "\n")
    assert replay_run(path).difference is not None


@pytest.mark.parametrize("write_through", [True, False])
def test_a_second_process_finds_what_the_first_has_stored(model, tmp_path, write_through) -> None:
    tiers = TierConfig(
        host_memory=2**22, disk_folder=tmp_path, disk_memory=2**24, write_through=write_through
    )
    first = make(model, tiers=tiers)
    expected = answers(first)
    if not write_through:  # else it is there already
        first.close()
    second = make(model, tiers=tiers)
    assert answers(second) == expected
    assert second.engine.tiering.loaded >= sum((len(p) - 1) // 4 for p in PROMPTS)
    second.close()


def test_a_damaged_folder_turns_the_tier_off_and_fails_no_request(model, tmp_path) -> None:
    tiers = TierConfig(disk_folder=tmp_path, disk_memory=2**24)
    first = make(model, tiers=tiers)
    expected = answers(first)
    first.close()
    for name in ("index.db", "blocks.bin"):
        path = tmp_path / name
        path.write_bytes(bytes(255 - b for b in path.read_bytes()))
    second = make(model, tiers=tiers)
    assert answers(second) == expected
    assert second.engine.tiering.loaded == 0


def test_a_model_with_other_weights_does_not_take_over_the_folder(
    model, tmp_path, tmp_path_factory
) -> None:
    other = tmp_path_factory.mktemp("other")
    save_tiny("qwen2", other)
    tiers = TierConfig(disk_folder=tmp_path, disk_memory=2**24)
    first = make(model, tiers=tiers)
    answers(first)
    first.close()
    second = make(other, tiers=tiers)
    answers(second)
    assert second.engine.tiering.loaded == 0


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({}, "no tier"),
        ({"host_memory": -1}, "host_memory=-1"),
        ({"host_memory": True}, "host_memory=True"),
        ({"disk_memory": 5}, "disk_memory=5"),
        ({"disk_folder": 3, "disk_memory": 5}, "disk_folder=3"),
        ({"host_memory": 5, "write_through": True}, "write_through"),
        ({"host_memory": 5, "write_through": 1}, "write_through=1"),
    ],
)
def test_bad_settings_are_refused(settings, match) -> None:
    with pytest.raises(ConfigError, match=match):
        TierConfig(**settings)


def test_a_folder_that_cannot_be_written_is_refused_at_the_start(model, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    tiers = TierConfig(disk_folder=tmp_path / "file" / "folder", disk_memory=2**24)
    with pytest.raises(ConfigError, match="cannot be written"):
        make(model, tiers=tiers)


def test_what_is_no_tier_config_is_refused() -> None:
    with pytest.raises(ConfigError, match="TierConfig"):
        LLM("nowhere", tiers={"host_memory": 2**20})


def test_weights_may_be_numbers(model) -> None:
    llm = make(model, scheduling={"policy": "fair", "tenants": {"a": 2, "b": Tenant(0.5)}})
    tenants = dict(llm.engine.core.scheduler.config.tenants)
    assert tenants == {"a": Tenant(weight=2), "b": Tenant(weight=0.5)}
    prompts = [{"prompt_token_ids": p} for p in PROMPTS[:2]]
    assert llm.generate(prompts, SamplingParams(max_tokens=2), tenant="a", priority=3)


def test_a_tier_too_small_for_a_block_is_refused(model) -> None:
    with pytest.raises(ConfigError, match="holds no block"):
        make(model, tiers=TierConfig(host_memory=10))


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_under_pressure_gives_the_same_tokens(model, policy) -> None:
    expected = answers(make(model))
    scheduling = {"policy": policy, "recovery": "swap"}
    llm = make(model, num_blocks=22, scheduling=scheduling, tiers=TierConfig(host_memory=2**24))
    assert answers(llm) == expected
    assert llm.engine.core.scheduler.stats.num_preemptions > 0
    assert llm.engine.tiering.loaded > 0


@pytest.mark.parametrize(
    ("scheduling", "match"),
    [
        ({"policy": "magic"}, "policy='magic'"),
        ({"polices": "fair"}, "scheduling has 'polices'"),
        ({"max_num_seqs": 3}, "scheduling has 'max_num_seqs'"),
        ({"tenants": {"a": "3"}}, "tenant 'a': '3' must be a pagedkv.Tenant"),
        ({"tenants": {"a": -1}}, "tenant 'a': weight=-1"),
        ({"recovery": "hope"}, "recovery='hope'"),
        (["fair"], r"scheduling=\['fair'\]"),
    ],
)
def test_bad_scheduling_is_refused(model, scheduling, match) -> None:
    with pytest.raises(ConfigError, match=match):
        make(model, scheduling=scheduling)
