"""Equal names are equal content, whatever a checksum says of them."""

from __future__ import annotations

import random

import pytest
from harness import Run, solo

from pagedkv.cache import BlockManager


@pytest.mark.parametrize("digest", [0, 1, -1], ids=["zero", "two values", "as it is"])
@pytest.mark.parametrize("block_size", [1, 4])
def test_outputs_are_those_of_a_cold_run_whatever_the_checksums_of_names(
    digest: int, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every checksum is the same, or one of two. The toy's attention refuses a foreign entry."""
    if digest >= 0:
        monkeypatch.setattr(
            "pagedkv.cache.index.crc32", lambda data, before=0: sum(data) % (digest + 1)
        )
    rng = random.Random(0)
    run = Run(num_blocks=64, block_size=block_size, budget=32)
    prompts: dict[str, list[int]] = {}
    for i in range(90):
        prompt = [rng.randint(1, 2) for _ in range(rng.randint(1, 9 * block_size))]
        prompts[str(i)] = prompt
        run.add(str(i), prompt, max_tokens=2, tenant=rng.choice([None, "a"]))
        run.step()
    run.finish()
    index = run.manager.index
    assert len(set(index.digests)) == digest + 1 or digest < 0
    assert index.next_serial - len(index) > 100, "hardly anything was evicted"
    assert sum(run.cached(name) > 0 for name in prompts) > 20
    for name, prompt in prompts.items():
        assert run.tokens[name, 0] == solo(prompt, max_tokens=2)


@pytest.mark.parametrize("namespace", [None, "a"])
def test_cached_tokens_are_the_common_prefix_whatever_the_checksums(
    namespace: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagedkv.cache.index.crc32", lambda data, before=0: 0)
    rng = random.Random(1)
    m = BlockManager(512, 4)
    known: dict[str | None, list[list[int]]] = {None: [], "a": []}
    for _ in range(60):
        tokens = [rng.randint(1, 2) for _ in range(rng.randint(2, 30))]
        name = rng.choice([None, namespace])
        longest = max((common(tokens, other) for other in known[name]), default=0)
        assert m.match(tokens, namespace=name).cached_tokens == min(longest, len(tokens) - 1)
        seq = m.open(tokens, namespace=name)
        rest = tokens[m.length(seq) :]
        m.reserve([seq], [len(rest)])
        m.commit([seq], [rest])
        m.close(seq)
        known[name].append(tokens)


def common(one: list[int], other: list[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
