"""Prompts of load tests: lengths, shared prefixes, files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pagedkv.errors import ConfigError
from pagedkv.loadtest.datasets import (
    WORDS,
    prefix_questions,
    random_questions,
    read_questions,
    trace_questions,
)
from pagedkv.simulation.trace import read_trace


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def words(prompt: str) -> list[str]:
    return prompt.split(" ")


def test_words_are_different_and_have_no_space() -> None:
    assert len(set(WORDS)) == len(WORDS) > 100
    assert all(word.isalpha() for word in WORDS)


def test_random_prompts_have_the_length_and_nothing_in_common() -> None:
    questions = random_questions(50, 40, 7, rng())
    assert {len(words(q.prompt)) for q in questions} == {40}
    assert {q.output_tokens for q in questions} == {7}
    assert len({tuple(words(q.prompt)[:4]) for q in questions}) == 50
    assert questions == random_questions(50, 40, 7, rng())


def test_lengths_spread_as_far_as_the_ratio_says() -> None:
    questions = random_questions(2000, 40, 10, rng(), 0.5)
    lengths = [len(words(q.prompt)) for q in questions]
    assert (min(lengths), max(lengths)) == (20, 60)
    assert {q.output_tokens for q in questions} == set(range(5, 16))


@pytest.mark.parametrize(
    ("arguments", "why"),
    [((0, 1, 0.0), "input_len=0"), ((1, 0, 0.0), "output_len=0"), ((1, 1, 1.0), "range_ratio=1")],
)
def test_random_lengths_that_cannot_be(arguments: tuple[int, int, float], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        random_questions(2, arguments[0], arguments[1], rng(), arguments[2])


def test_prefixes_are_shared_by_equally_many() -> None:
    questions = prefix_questions(12, 3, 20, 5, 9, rng())
    prefixes = [tuple(words(q.prompt)[:20]) for q in questions]
    assert sorted(prefixes.count(p) for p in set(prefixes)) == [4, 4, 4]
    assert len({tuple(words(q.prompt)[20:]) for q in questions}) == 12
    assert {len(words(q.prompt)) for q in questions} == {25}
    with pytest.raises(ConfigError, match="num_prefixes=0"):
        prefix_questions(12, 0, 20, 5, 9, rng())


def test_a_file_of_prompts_is_read_again_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(
        '{"prompt": "one", "output_tokens": 3}\n{"prompt": "two", "output_tokens": 4}\n'
    )
    asked = [(q.prompt, q.output_tokens) for q in read_questions(path, 3, 9)]
    assert asked == [("one", 3), ("two", 4), ("one", 3)]
    assert len(read_questions(path, None, 9)) == 2
    path.write_text('{"prompt": "one"}\n{"prompt": " "}\n')
    with pytest.raises(ConfigError, match="line 2: prompt=' ' is no text"):
        read_questions(path, None, 9)


def test_prompts_of_a_trace_share_its_blocks(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        "arrival_s,prompt_tokens,output_tokens,tenant,block4_ids\n"
        "0,9,5,a,0-2\n1,9,0,b,0-1 3\n2,6,2,a,4-5\n"
    )
    first, second, third = trace_questions(read_trace(path), 0)
    assert [len(words(q.prompt)) for q in (first, second, third)] == [9, 9, 6]
    assert words(first.prompt)[:8] == words(second.prompt)[:8]
    assert first.prompt != second.prompt
    assert words(third.prompt)[:4] != words(first.prompt)[:4]
    assert [q.output_tokens for q in (first, second, third)] == [5, 1, 2]
    assert [q.tenant for q in (first, second, third)] == ["a", "b", "a"]
    assert trace_questions(read_trace(path), 1)[0].prompt != first.prompt
