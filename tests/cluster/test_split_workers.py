"""Prefill apart from decode: moved requests, and deaths of each kind of process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from clustered import Clustered, Load, clustered
from mixed_requests import mixed

_SEEDS = [
    *range(3),
    *(pytest.param(seed, marks=pytest.mark.deep) for seed in range(3, 10)),
]


@pytest.fixture(scope="module")
def load(model: Path) -> Load:
    return Load(model)


def test_requests_move_and_give_the_tokens_of_one_engine(split: Clustered, load: Load) -> None:
    assert load.run(split) == load.expected
    split.nothing_leaked()
    check_prompts_were_computed_once(split.metrics(), load)


@pytest.mark.deep
def test_the_embedded_model_is_one_engine_as_well() -> None:
    model = Path("smollm2-135m-instruct")
    load = Load(model, mixed(200), num_blocks=400, max_model_len=256)
    options = ("--num-blocks", "400", "--max-model-len", "256")
    with clustered(model, "--prefill-workers", "1", "--decode-workers", "1", *options) as server:
        assert load.run(server) == load.expected
        server.nothing_leaked()
        check_prompts_were_computed_once(server.metrics(), load)


def check_prompts_were_computed_once(seen: dict[str, float], load: Load) -> None:
    """Of a server that has served the load and nothing else."""

    def of(name: str) -> float:
        """All series of a counter, added up."""
        series = re.compile(rf"pagedkv:{name}_total(_sum)?({{.*}})?$")
        return sum(number for key, number in seen.items() if series.match(key))

    prompts, recomputed = of("prompt_tokens"), of("recomputed_tokens")
    assert prompts == sum(load.prompt_lengths)
    # One worker looked prompts up, and computed what it did not find. All else that was computed
    # are the tokens drawn, but the last of each sample; and, counted as recomputed, the last token
    # of a prompt where samples part, and of a tail that another request went on in first.
    assert of("prefix_cache_queries") == prompts
    samples, groups = load.num_samples, load.num_groups
    drawn = of("generation_tokens") - samples
    computed = of("iteration_tokens")
    assert computed == prompts - of("prefix_cache_hits") + drawn + recomputed
    # What was moved: requests that had not ended with their first tokens. Their prompts were sent,
    # or there by their names.
    moved = seen['pagedkv:requests_moved_total{outcome="done"}']
    sent, cached = (
        seen[f'pagedkv:moved_tokens_total{{source="{source}"}}'] for source in ("sent", "cached")
    )
    assert moved > len(load.requests) // 2 and sent > 0 and cached > 0
    assert recomputed <= groups + 0.02 * sent
    assert sent + cached >= sum(sorted(load.prompt_lengths)[: int(moved)])
    assert sent + cached <= prompts


@pytest.mark.parametrize("who", ["prefill-0", "decode-0", "router"])
@pytest.mark.parametrize("seed", _SEEDS)
def test_a_death_is_not_seen(split: Clustered, load: Load, who: str, seed: int) -> None:
    """Streams that are open go on behind the tokens that have come: none twice, none left out."""
    restarts = {name: worker["restarts"] for name, worker in split.workers().items()}
    after, pid = load.moment(f"{who} {seed}"), split.pid(who)
    assert load.run(split, after, lambda: split.kill(pid)) == load.expected
    split.nothing_leaked()
    starts = {name: worker["restarts"] for name, worker in split.workers().items()}
    assert starts == {name: before + (name == who) for name, before in restarts.items()}
