"""Stop strings: found across every border, first one wins, never shown."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.engine.stops import StopChecker

Result = tuple[str, str | None]


def reference(text: str, stops: list[str], include: bool) -> Result:
    """The text cut at the stop string that ends first (the longest of those that end there)."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def run(chunks: list[str], stops: list[str], include: bool = False) -> tuple[Result, list[str]]:
    checker = StopChecker(stops, include)
    shown: list[str] = []
    for chunk in chunks:
        result = checker.push(chunk)
        shown.append(result.text)
        if result.stop is not None:
            return ("".join(shown), result.stop), shown
    shown.append(checker.finish())
    return ("".join(shown), None), shown


@settings(max_examples=600, deadline=None, derandomize=True)
@given(
    chunks=st.lists(st.text("ab\n", max_size=4), max_size=8),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=4),
    include=st.booleans(),
)
def test_result_is_that_of_the_whole_text_however_it_is_split(
    chunks: list[str], stops: list[str], include: bool
) -> None:
    assert run(chunks, stops, include)[0] == reference("".join(chunks), stops, include)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    chunks=st.lists(st.text("abc", max_size=3), max_size=8),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_what_is_shown_is_always_a_prefix_of_the_result_and_holds_no_more_than_needed(
    chunks: list[str], stops: list[str]
) -> None:
    (final, _), _ = run(chunks, stops)
    checker, arrived, shown = StopChecker(stops), "", ""
    for chunk in chunks:
        result = checker.push(chunk)
        arrived, shown = arrived + chunk, shown + result.text
        assert final.startswith(shown)
        if result.stop is not None:
            break
        held = arrived[len(shown) :]
        open_ = [k for s in stops for k in range(1, len(s)) if arrived.endswith(s[:k])]
        assert len(held) == max(open_, default=0)


@pytest.mark.parametrize("size", [1, 2, 3, 11])
def test_stop_string_over_several_tokens(size: int) -> None:
    text = "one two END three"
    chunks = [text[i : i + size] for i in range(0, len(text), size)]
    assert run(chunks, ["END"])[0] == ("one two ", "END")
    assert run(chunks, ["END"], include=True)[0] == ("one two END", "END")


def test_false_start_is_shown_late_but_complete() -> None:
    result, shown = run(["xE", "N", "ENDy"], ["END"])
    assert result == ("xEN", "END")
    assert shown == ["x", "", "EN"]
    assert run(["xE", "N"], ["END"])[1] == ["x", "", "EN"]


def test_the_stop_that_is_complete_first_wins() -> None:
    assert run(["abcd"], ["abcd", "bc"])[0] == ("a", "bc")
    assert run(["abc"], ["c", "bc"])[0] == ("a", "bc")


def test_unarmed_matches_do_not_count_and_overlap_with_later_ones() -> None:
    checker = StopChecker(["aa"])
    assert checker.push("aa", armed=False).stop is None
    result = checker.push("a")
    assert result.stop == "aa"
