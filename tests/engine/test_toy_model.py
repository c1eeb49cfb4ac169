"""The toy refuses everything that a paged cache can get wrong."""

from __future__ import annotations

import numpy as np
import pytest

from pagedkv.engine.toy import ToyError, ToyExecutor
from pagedkv.scheduling.params import SamplingParams
from pagedkv.scheduling.step import PromptScore, Result, Sample, Step

B = 4


def step(
    index: int,
    rows: list[tuple[int, list[int], list[int], int]],
    copies: tuple[tuple[int, int, int], ...] = (),
    slots: list[int] | None = None,
    samples: tuple[Sample, ...] = (),
    scores: tuple[PromptScore, ...] = (),
) -> Step:
    """rows: (sequence, its block table, new tokens, position of the first of them)."""
    tables = np.zeros((len(rows), max(len(table) for _, table, _, _ in rows)), np.int32)
    for i, (_, table, _, _) in enumerate(rows):
        tables[i, : len(table)] = table
    positions = [start + j for _, _, new, start in rows for j in range(len(new))]
    expected = [
        table[(start + j) // B] * B + (start + j) % B
        for _, table, new, start in rows
        for j in range(len(new))
    ]
    numbers = np.array([seq for seq, _, _, _ in rows])
    return Step(
        index=index,
        seqs=numbers.astype(np.int64),
        table_rows=numbers.astype(np.int32),
        query_lens=np.array([len(new) for _, _, new, _ in rows], np.int32),
        context_lens=np.array([start + len(new) for _, _, new, start in rows], np.int32),
        tokens=np.array([t for _, _, new, _ in rows for t in new], np.int32),
        positions=np.array(positions, np.int32),
        slots=np.array(expected if slots is None else slots, np.int64),
        copies=np.array(copies, np.int32).reshape(-1, 3),
        changed_rows=numbers.astype(np.int32),
        changed_tables=tables,
        samples=samples,
        prompt_scores=scores,
    )


def compute(toy: ToyExecutor, work: Step) -> Result:
    return toy.collect(toy.submit(work))


def greedy(row: int, position: int, **fields) -> Sample:
    return Sample(row, SamplingParams(temperature=0.0), 0, position, **fields)


def drawn(context: list[int], table: list[int], **toy) -> int:
    """The token after a context that is computed in one step."""
    work = step(0, [(1, table, context, 0)], samples=(greedy(0, len(context)),))
    return int(compute(ToyExecutor(8, B, **toy), work).tokens[0])


@pytest.fixture
def toy() -> ToyExecutor:
    """Sequence 1 has tokens 1..6 in blocks 1 and 2."""
    toy = ToyExecutor(8, B)
    compute(toy, step(0, [(1, [1, 2], [1, 2, 3, 4, 5, 6], 0)]))
    return toy


def test_the_token_does_not_depend_on_blocks_or_chunks(toy):
    work = step(1, [(1, [1, 2], [7], 6)], samples=(greedy(0, 7),))
    assert compute(toy, work).tokens.tolist() == [drawn([1, 2, 3, 4, 5, 6, 7], [5, 3])]


def test_the_token_depends_on_every_entry():
    """Ten changes of one entry each; a collision of two in 10,000 tokens is unlikely enough."""
    context = list(range(1, 11))
    base = drawn(context, [1, 2, 3], vocab_size=10_000)
    for i in range(10):
        other = context.copy()
        other[i] += 20
        assert drawn(other, [1, 2, 3], vocab_size=10_000) != base
    assert drawn(context, [1, 2, 3], vocab_size=10_000, weights=1) != base


def test_another_order_of_blocks_is_refused(toy):
    with pytest.raises(ToyError, match="unwritten"):
        compute(toy, step(1, [(1, [2, 1], [7], 6)]))


def test_a_foreign_block_is_refused(toy):
    compute(toy, step(1, [(2, [3, 4], [9, 9, 9, 9, 9, 9], 0)]))
    with pytest.raises(ToyError, match="position 4 is of another prefix"):
        compute(toy, step(2, [(1, [1, 4], [7], 6)]))


def test_a_whole_foreign_prefix_of_a_known_sequence_is_refused(toy):
    compute(toy, step(1, [(2, [3, 4], [9, 9, 9, 9, 9, 9], 0)]))
    with pytest.raises(ToyError, match="not the 6 computed before"):
        compute(toy, step(2, [(1, [3, 4], [7], 6)]))


def test_an_unwritten_slot_is_refused(toy):
    with pytest.raises(ToyError, match="position 6 reads an unwritten slot"):
        compute(toy, step(1, [(1, [1, 2], [8], 7)]))


def test_poisoned_blocks_are_refused(toy):
    toy.poison(np.array([1], np.int32))
    with pytest.raises(ToyError, match="position 0 reads an unwritten slot"):
        compute(toy, step(1, [(1, [1, 2], [7], 6)]))


def test_what_a_reused_block_held_before_is_gone(toy):
    compute(toy, step(1, [(2, [1], [9], 0)]))
    with pytest.raises(ToyError, match="position 1 reads an unwritten slot"):
        compute(toy, step(2, [(3, [1], [9], 2)]))


def test_other_weights_are_refused(toy):
    other = ToyExecutor(8, B, weights=1)
    other.tokens, other.prints, other.written = toy.tokens, toy.prints, toy.written
    with pytest.raises(ToyError, match="position 0 is of another prefix"):
        compute(other, step(1, [(1, [1, 2], [7], 6)]))


def test_two_writes_to_a_slot_are_refused(toy):
    with pytest.raises(ToyError, match="written twice"):
        compute(toy, step(1, [(1, [1, 2], [7], 6), (2, [1, 2], [8], 6)]))


def test_a_write_into_what_another_row_reads_is_refused(toy):
    rows = [(1, [1, 2], [7], 6), (2, [1, 2], [8], 5)]
    with pytest.raises(ToyError, match="another row writes"):
        compute(toy, step(1, rows))


def test_a_slot_outside_the_table_is_refused(toy):
    with pytest.raises(ToyError, match="slots and block tables disagree"):
        compute(toy, step(1, [(1, [1, 2], [7], 6)], slots=[3 * B]))


def test_the_null_block_is_refused(toy):
    with pytest.raises(ToyError, match="null block"):
        compute(toy, step(1, [(1, [1, 0], [7], 6)]))


def test_a_position_that_does_not_follow_is_refused(toy):
    good = step(1, [(1, [1, 2], [7], 6)])
    good.positions[0] = 7
    with pytest.raises(ToyError, match=r"positions are not 6\.\.6"):
        compute(toy, good)


def test_copies_are_done_before_the_writes(toy):
    work = step(
        1,
        [(1, [1, 2], [7], 6), (2, [1, 3], [8], 6)],
        copies=((2, 3, 2),),
        samples=(greedy(0, 7), greedy(1, 7)),
    )
    expected = [drawn([1, 2, 3, 4, 5, 6, last], [1, 2]) for last in (7, 8)]
    assert compute(toy, work).tokens.tolist() == expected


@pytest.mark.parametrize(
    ("copies", "words"),
    [
        (((2, 3, 3),), "reads unwritten"),
        (((2, 3, 2), (1, 3, 2)), "disturb"),
        (((2, 3, 2), (3, 4, 2)), "disturb"),
    ],
)
def test_wrong_copies_are_refused(toy, copies, words):
    with pytest.raises(ToyError, match=words):
        compute(toy, step(1, [(2, [1, 3], [8], 6)], copies=copies))


def test_a_missing_copy_is_refused(toy):
    with pytest.raises(ToyError, match="position 4 reads an unwritten slot"):
        compute(toy, step(1, [(2, [1, 3], [8], 6)]))


def test_sampling_depends_on_key_and_position_alone():
    params = SamplingParams(temperature=1.0)
    work = step(
        0,
        [(1, [1], [1, 2], 0)],
        samples=tuple(Sample(0, params, key, 2) for key in (5, 6, 5)),
    )
    tokens = compute(ToyExecutor(8, B, vocab_size=10_000), work).tokens.tolist()
    assert tokens[0] == tokens[2] != tokens[1]


def test_forbidden_tokens_and_lengths_of_the_end_token():
    toy = ToyExecutor(8, B, vocab_size=3, eos_token_id=2, eos_positions=(2,))
    samples = (
        greedy(0, 2),
        greedy(0, 2, forbidden=(2,)),
        greedy(0, 2, forbidden=(1, 2)),
        greedy(1, 2, forbidden=(0, 1, 2)),
    )
    result = compute(toy, step(0, [(1, [1], [1, 2], 0), (2, [2], [1, 2], 0)], samples=samples))
    assert result.tokens[0] == 2 and result.tokens[1] != 2 and result.tokens[2] == 0
    assert result.errors == {1: "every token is forbidden"}
    assert result.indptr.tolist() == [0, 1, 2, 3, 3]


def test_logprobs_are_of_a_distribution():
    params = SamplingParams(temperature=0.0, logprobs=5)
    scores = (PromptScore(0, np.array([2, 3], np.int32), 5),)
    work = step(0, [(1, [1], [1, 2, 3], 0)], samples=(Sample(0, params, 0, 3),), scores=scores)
    result = compute(ToyExecutor(8, B, vocab_size=5), work)
    (drawn_score,) = result.logprobs
    assert drawn_score.ids[0] == drawn_score.ids[1] == result.tokens[0] and drawn_score.rank == 1
    assert np.exp(drawn_score.values[1:]).sum() == pytest.approx(1.0)
    (prompt,) = result.prompt_logprobs
    assert [int(s.ids[0]) for s in prompt] == [2, 3]
    for s in prompt:
        assert s.ids[s.rank] == s.ids[0]
