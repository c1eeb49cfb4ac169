"""What is streamed adds up to what comes whole, whatever ends it and wherever characters split."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_llm import byte_tokenizer, toy_engine

from pagedkv.engine.output import OutputProcessor
from pagedkv.engine.requests import text_decoder
from pagedkv.scheduling.messages import Abort, Add, Delta, RequestUsage
from pagedkv.scheduling.params import SamplingParams

DECODER = text_decoder(byte_tokenizer())
CHARACTERS = "ab\n é€😀"  # of one, two, three and four bytes, a token a byte


def encode(text: str) -> list[int]:
    return list(DECODER.encode(text).ids)


def whole(tokens: list[int], stops: list[str], include: bool) -> tuple[str, str | None]:
    """The text cut at the stop string that is complete first, the longest of those."""
    text = DECODER.decode(tokens, skip_special_tokens=True)
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=200)
@given(
    text=st.text(CHARACTERS, min_size=1, max_size=12),
    stops=st.lists(st.text(CHARACTERS, min_size=1, max_size=3), max_size=3),
    include=st.booleans(),
    cut=st.integers(0, 3),
    reason=st.sampled_from(("length", "abort")),
    data=st.data(),
)
def test_what_is_shown_grows_to_the_whole_text_whatever_ends_it(
    text: str, stops: list[str], include: bool, cut: int, reason: str, data: st.DataObject
) -> None:
    """The tokens may end within a character, and come in pieces of any size."""
    tokens = encode(text)
    tokens = tokens[: max(1, len(tokens) - cut)]
    aborts: list[Abort] = []
    processor = OutputProcessor(DECODER, aborts.append)
    params = SamplingParams(stop=stops, include_stop_str_in_output=include, max_tokens=99)
    processor.add(Add("core", (1,), params, 0.0, 0), "mine", None)
    expected, stop = whole(tokens, stops, include)
    shown, last, at = "", None, 0
    while at < len(tokens) and not aborts:
        piece = tokens[at : at + data.draw(st.integers(1, 5))]
        at += len(piece)
        end = reason if at == len(tokens) else None
        usage = None if end is None else RequestUsage()
        delta = Delta("core", 0, tuple(piece), finish_reason=end, usage=usage)
        (last,) = processor.process([delta], 1.0)
        now = last.outputs[0].text
        assert now.startswith(shown) and expected.startswith(now)
        shown = now
    if aborts:  # the loop ends it then, and says what it has taken
        assert not last.finished
        ended = Delta("core", 0, finish_reason="stop", usage=RequestUsage())
        (last,) = processor.process([ended], 1.0)
    assert last.finished and last.usage == RequestUsage()
    sample = last.outputs[0]
    assert (sample.text, sample.stop_reason) == (expected, stop)
    assert sample.finish_reason == ("stop" if stop is not None else reason)
    assert sample.token_ids == tuple(tokens[: len(sample.token_ids)])
    assert bool(aborts) == (stop is not None and at < len(tokens))
    assert len(processor) == 0


@settings(max_examples=25)
@given(
    prompts=st.lists(st.text(CHARACTERS, min_size=1, max_size=6), min_size=1, max_size=4),
    n=st.integers(1, 2),
    stop=st.sampled_from((None, "e", "\ufffd", "t\ufffd")),
    budget=st.integers(2, 16),
)
def test_a_stream_ends_as_the_request_alone_and_unwatched(
    prompts: list[str], n: int, stop: str | None, budget: int
) -> None:
    """Text, tokens and counts of the last output, whoever else runs; increments add up to it."""
    params = SamplingParams(
        n=n, temperature=1.0, seed=3, max_tokens=8, stop=[] if stop is None else [stop]
    )
    engine = toy_engine(max_num_batched_tokens=budget)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    shown = {(str(i), j): "" for i in range(len(prompts)) for j in range(n)}
    last = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            last[output.request_id] = output
            for sample in output.outputs:
                key = output.request_id, sample.index
                assert sample.text.startswith(shown[key])
                shown[key] = sample.text
    for i, prompt in enumerate(prompts):
        alone = toy_engine()
        alone.add_request("alone", prompt, params)
        outputs = []
        while alone.has_unfinished_requests():
            outputs += alone.step()
        assert last[str(i)].outputs == outputs[-1].outputs
        assert last[str(i)].prompt_token_ids == outputs[-1].prompt_token_ids
        assert [shown[str(i), j] for j in range(n)] == [o.text for o in outputs[-1].outputs]
        for sample in outputs[-1].outputs:
            assert whole(list(sample.token_ids), list(params.stop), False)[0] == sample.text
