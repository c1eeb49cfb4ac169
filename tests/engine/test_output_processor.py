"""Deltas of the loop become text, with stop strings found outside it."""

from __future__ import annotations

import copy
import pickle

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pagedkv.engine.output import OutputProcessor, RequestOutput
from pagedkv.scheduling.messages import Abort, Add, Delta, RequestUsage
from pagedkv.scheduling.params import SamplingParams
from pagedkv.scheduling.step import TokenLogprobs

EOS = 256


def byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


TOKENIZER = byte_tokenizer()


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text).ids)


class Front:
    """An OutputProcessor with one request and the messages it sends."""

    def __init__(self, **params: object) -> None:
        self.sent: list[Abort] = []
        self.processor = OutputProcessor(TOKENIZER, self.sent.append)
        add = Add("core", ids("hi"), SamplingParams(**params), 1.0, seed=9)
        self.processor.add(add, "mine", "hi")
        self.now = 1.0

    def feed(
        self, text: str = "", sample: int = 0, end: str | None = None, **kw: object
    ) -> RequestOutput | None:
        tokens = ids(text) if isinstance(text, str) else text
        self.now += 1.0
        delta = Delta("core", sample, tokens, finish_reason=end, **kw)
        outputs = self.processor.process([delta], self.now)
        return outputs[0] if outputs else None


def test_text_grows_and_the_request_ends() -> None:
    front = Front()
    first = front.feed("ab")
    assert first is not None and first.outputs[0].text == "ab" and not first.finished
    assert first.request_id == "mine" and first.prompt == "hi" and first.seed == 9
    last = front.feed("c", end="length", num_cached_tokens=1)
    assert last is not None and last.finished and last.num_cached_tokens == 1
    sample = last.outputs[0]
    assert (sample.text, sample.finish_reason, sample.stop_reason) == ("abc", "length", None)
    assert sample.token_ids == ids("abc")
    assert last.metrics.ttft == 1.0 and last.metrics.finished_time == 3.0
    assert len(front.processor) == 0 and front.feed("x") is None


def test_stop_string_over_two_deltas_ends_the_sample_and_tells_the_loop() -> None:
    front = Front(stop=["END"])
    shown = front.feed("one E")
    assert shown is not None and shown.outputs[0].text == "one "
    last = front.feed("NDxyz")
    assert last is not None and not last.finished
    sample = last.outputs[0]
    assert (sample.text, sample.finish_reason, sample.stop_reason) == ("one ", "stop", "END")
    assert sample.token_ids == ids("one END")  # what came after the stop string is dropped
    assert front.sent == [Abort("core", 0, reason="stop")]
    taken = RequestUsage(blocks_peak=2)
    assert front.feed("late", error="no matter") is None
    over = front.feed("", end="stop", usage=taken)
    assert over is not None and over.finished and over.outputs == last.outputs
    assert over.usage == taken and over.metrics == last.metrics  # it was over when it was found
    assert len(front.processor) == 0


def test_stop_string_in_the_last_delta_needs_no_message() -> None:
    front = Front(stop="!")
    last = front.feed("a!", end="length")
    assert last is not None and last.outputs[0].finish_reason == "stop"
    assert last.outputs[0].text == "a" and front.sent == []


def test_include_stop_string() -> None:
    front = Front(stop="!", include_stop_str_in_output=True)
    last = front.feed("a!b")
    assert last is not None and last.outputs[0].text == "a!"


def test_held_back_beginning_of_a_stop_string_is_shown_at_the_end() -> None:
    front = Front(stop="END")
    shown = front.feed("aEN")
    assert shown is not None and shown.outputs[0].text == "a"
    last = front.feed("", end="length")
    assert last is not None and last.outputs[0].text == "aEN"


def test_half_a_character_is_held_and_flushed() -> None:
    front = Front()
    euro = ids("€")
    assert front.feed(euro[:2]).outputs[0].text == ""
    assert front.feed(euro[2:]).outputs[0].text == "€"
    last = front.feed(euro[:1], end="length")
    assert last is not None and last.outputs[0].text == "€\ufffd"


@pytest.mark.parametrize(("min_tokens", "text"), [(0, ""), (1, ""), (2, "ab"), (3, "ab")])
def test_min_tokens_keeps_stop_strings_from_ending_too_early(min_tokens: int, text: str) -> None:
    front = Front(stop=["ab"], min_tokens=min_tokens)
    last = front.feed("abab", end="length")
    assert last is not None and last.outputs[0].text == text
    assert last.outputs[0].stop_reason == "ab"


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({}, "ab"),
        ({"skip_special_tokens": False}, "ab"),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "ab<|end|>"),
        ({"include_stop_str_in_output": True}, "ab"),
    ],
)
def test_end_token_is_reported_but_is_no_text(params: dict[str, bool], text: str) -> None:
    front = Front(**params)
    last = front.feed((*ids("ab"), EOS), end="stop")
    assert last is not None and last.outputs[0].text == text
    assert last.outputs[0].token_ids == (*ids("ab"), EOS)


def test_stop_token_is_named_and_is_no_text() -> None:
    front = Front()
    stop = ids("b")[0]
    last = front.feed("ab", end="stop", stop_reason=stop)
    assert last is not None and last.outputs[0].text == "a"
    assert last.outputs[0].stop_reason == stop


def test_samples_end_apart_and_the_request_with_the_last() -> None:
    front = Front(n=3, stop="!")
    first = front.feed("a!", sample=1)
    assert first is not None and not first.finished
    assert front.sent == [Abort("core", 1, reason="stop")]
    assert front.feed("zzz", sample=1) is None
    assert front.feed("", sample=1, end="stop") is None
    front.feed("b", sample=0, end="length")
    last = front.feed("c", sample=2, end="stop", stop_reason=None, usage=RequestUsage())
    assert last is not None and last.finished
    assert [o.text for o in last.outputs] == ["b", "a", ""]
    assert [o.index for o in last.outputs] == [0, 1, 2]


def test_one_output_a_request_and_step() -> None:
    front = Front(n=2)
    deltas = [Delta("core", 0, ids("a")), Delta("core", 1, ids("b")), Delta("gone", 0, ids("c"))]
    outputs = front.processor.process(deltas, 5.0)
    assert [[o.text for o in out.outputs] for out in outputs] == [["a", "b"]]


def test_errors_are_carried_to_the_sample() -> None:
    last = Front().feed("", end="error", error="boom")
    assert last is not None and last.finished
    assert (last.outputs[0].finish_reason, last.outputs[0].error) == ("error", "boom")


def scored(token: int, value: float, rank: int, top: dict[int, float]) -> TokenLogprobs:
    return TokenLogprobs(
        np.array([token, *top], np.int32), np.array([value, *top.values()], np.float32), rank
    )


def test_logprobs_by_token_id_with_rank_text_and_sum() -> None:
    front = Front(logprobs=2, prompt_logprobs=1)
    a, b = ids("a")[0], ids("b")[0]
    entry = scored(b, -2.0, 2, {a: -0.5, b: -2.0})
    front.feed("", prompt_logprobs=(scored(ids("i")[0], -1.0, 7, {a: -0.25}),))
    last = front.feed("b", end="length", logprobs=(entry,))
    assert last is not None and last.outputs[0].logprobs is not None
    (first,) = last.outputs[0].logprobs
    assert list(first) == [b, a]
    assert (first[b].logprob, first[b].rank, first[b].decoded_token) == (-2.0, 2, "b")
    assert (first[a].logprob, first[a].rank) == (-0.5, 1)
    assert last.outputs[0].cumulative_logprob == -2.0
    assert last.prompt_logprobs is not None and len(last.prompt_logprobs) == 2
    none, second = last.prompt_logprobs
    assert none is None and second is not None and second[ids("i")[0]].rank == 7


def test_an_output_can_be_copied_sent_and_made_a_dict() -> None:
    front, (a,) = Front(logprobs=1), ids("a")
    entry = scored(a, -0.5, 1, {a: -0.5})
    output = front.feed("a", end="length", logprobs=(entry,), usage=RequestUsage(1))
    assert output is not None and output.outputs[0].logprobs
    assert copy.deepcopy(output) == output == pickle.loads(pickle.dumps(output))
    plain = msgspec.to_builtins(output)
    assert plain["metrics"]["finished_time"] == 2.0
    assert plain["outputs"][0]["logprobs"][0][a]["decoded_token"] == "a"
    with pytest.raises(AttributeError):
        output.finished = False


def test_without_logprobs_there_are_none() -> None:
    last = Front().feed("b", end="length")
    assert last is not None and last.prompt_logprobs is None
    assert last.outputs[0].logprobs is None and last.outputs[0].cumulative_logprob is None
