"""Outputs of a given form, from a tiny random model whose tokens are bytes."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_llm import EOS, VOCAB, byte_tokenizer, save_tiny_llm

from pagedkv import (
    LLM,
    BeamSearchParams,
    CompletionOutput,
    SamplingParams,
    StructuredOutputs,
    TierConfig,
)
from pagedkv.engine import grammar
from pagedkv.engine.grammar import Grammars, model_grammars
from pagedkv.errors import GrammarError, RequestError
from pagedkv.scheduling.messages import Add
from pagedkv.scheduling.step import Sample
from pagedkv.scheduling.structured import MAX_CHOICES, MAX_GRAMMAR_BYTES
from pagedkv.simulation.replay_run import replay_run

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "of": {"enum": ["x", "y"]}},
    "required": ["n", "of"],
    "additionalProperties": False,
}
NAMES = ["yes", "no", 'it\'s "so"', "Zoë\n", "\t🎉"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-llm")
    save_tiny_llm(path)
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, num_blocks=200, block_size=4)


def wanted(max_tokens: int = 120, seed: int = 1, n: int = 1, **form: Any) -> SamplingParams:
    structured = StructuredOutputs(**form)
    return SamplingParams(max_tokens=max_tokens, seed=seed, n=n, structured_outputs=structured)


def run(llm: LLM, params: SamplingParams, prompt: str = "hello") -> Sequence[CompletionOutput]:
    return llm.generate(prompt, params)[0].outputs


# ---- forms


def test_an_output_of_a_schema_is_valid_json_of_it(llm: LLM) -> None:
    for output in run(llm, wanted(json=SCHEMA, n=6)):
        assert output.finish_reason == "stop"
        found = json.loads(output.text)
        assert found.keys() == {"n", "of"}
        assert isinstance(found["n"], int) and found["of"] in ("x", "y")


def test_a_schema_is_text_or_a_dict(llm: LLM) -> None:
    outputs = [run(llm, wanted(json=s))[0].text for s in (SCHEMA, json.dumps(SCHEMA))]
    assert outputs[0] == outputs[1]


def test_a_json_object_is_one(llm: LLM) -> None:
    ends = [o for o in run(llm, wanted(json_object=True, n=8)) if o.finish_reason == "stop"]
    assert ends
    assert all(isinstance(json.loads(output.text), dict) for output in ends)


@pytest.mark.parametrize("regex", [r"\d{3}-[é]{2}", "ab?c*d", "^a{2,4}$", "(?i:yes|no)"])
def test_an_output_matches_its_regex(llm: LLM, regex: str) -> None:
    for output in run(llm, wanted(regex=regex, n=4)):
        assert output.finish_reason == "stop"
        assert re.fullmatch(regex, output.text)


def test_an_output_is_one_of_the_choices(llm: LLM) -> None:
    outputs = run(llm, wanted(choice=NAMES, n=16))
    assert {output.finish_reason for output in outputs} == {"stop"}
    found = {output.text for output in outputs}
    assert found <= set(NAMES)
    assert len(found) > 1


def test_an_output_follows_a_lark_grammar(llm: LLM) -> None:
    text = 'start: "<" item ("," item)~1..2 ">"\nitem: /[xy]{3}/'
    for output in run(llm, wanted(grammar=text.replace("~1..2", "{1,2}"), n=4)):
        assert re.fullmatch(r"<[xy]{3}(,[xy]{3}){1,2}>", output.text)


def test_white_space_in_json_has_an_end(llm: LLM) -> None:
    """A bias towards line feeds gives at most 32 of them together."""
    line_feed = byte_tokenizer().encode("\n")[0]
    schema = {"type": "array", "items": {"const": "x"}, "minItems": 2, "maxItems": 2}
    params = replace(wanted(json=schema, max_tokens=250), logit_bias={line_feed: 100.0})
    (output,) = run(llm, params)
    assert "\n" * 32 in output.text and "\n" * 33 not in output.text
    assert output.finish_reason == "stop"


# ---- how outputs end


def test_the_end_token_may_be_drawn_where_the_form_is_complete_and_nowhere_else(llm: LLM) -> None:
    likely = replace(wanted(regex="a{3}b*"), logit_bias={EOS: 100.0})
    (output,) = run(llm, likely)
    assert (output.text, output.token_ids[-1], output.finish_reason) == ("aaa", EOS, "stop")


def test_an_output_ends_with_its_last_token_where_nothing_may_follow(llm: LLM) -> None:
    (output,) = run(llm, wanted(choice=["abc"]))
    assert (output.text, len(output.token_ids), output.finish_reason) == ("abc", 3, "stop")


@pytest.mark.parametrize("setting", [{"min_tokens": 8}, {"ignore_eos": True}], ids=str)
def test_what_forbids_the_end_token_does_so_until_nothing_may_follow(
    llm: LLM, setting: dict[str, Any]
) -> None:
    short, long = wanted(choice=["ab", "abcd"]), wanted(regex="a+", max_tokens=9)
    biased = {"logit_bias": {EOS: 100.0}, **setting}
    (output,) = run(llm, replace(short, **biased))
    assert (output.text, output.finish_reason) == ("abcd", "stop")
    (output,) = run(llm, replace(long, **biased))
    least = setting.get("min_tokens", 9)
    assert (len(output.text), output.finish_reason) == (least, "length" if least == 9 else "stop")


def test_max_tokens_cuts_short_unless_the_form_is_complete_there(llm: LLM) -> None:
    ends = {n: run(llm, wanted(choice=["abc"], max_tokens=n))[0] for n in (2, 3)}
    assert [(o.text, o.finish_reason) for o in ends.values()] == [("ab", "length"), ("abc", "stop")]


def test_stop_tokens_and_stop_strings_end_where_the_form_allows_them(llm: LLM) -> None:
    token = byte_tokenizer().encode("b")[0]
    (output,) = run(llm, replace(wanted(choice=["abc"]), stop_token_ids=[token]))
    assert (output.text, output.stop_reason) == ("a", token)
    (output,) = run(llm, replace(wanted(choice=["abc"]), stop=["bc"]))
    assert (output.text, output.stop_reason) == ("a", "bc")


def test_log_probabilities_are_the_models_own(llm: LLM) -> None:
    (free,) = run(llm, SamplingParams(temperature=0.0, max_tokens=1, logprobs=1))
    (bound,) = run(llm, replace(wanted(choice=["abc"]), temperature=0.0, logprobs=1))
    assert free.logprobs is not None and bound.logprobs is not None
    best = free.token_ids[0]
    assert bound.token_ids[0] != best
    assert bound.logprobs[0][best] == free.logprobs[0][best]


# ---- what is refused

DEEP: dict[str, Any] = {}
DEEP["items"] = DEEP


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ({}, "gives nothing"),
        ({"json": {}, "regex": "a"}, "json and regex"),
        ({"json_object": 1}, "json_object"),
        ({"json": 5}, "must be text"),
        ({"json": DEEP}, "no JSON schema"),
        ({"json": {"enum": [object()]}}, "no JSON schema"),
        ({"json": ""}, "not empty"),
        ({"json": "{"}, "not a JSON schema"),
        ({"json": "[]"}, "object"),
        ({"json": '{"items":' * 3000 + "{}" + "}" * 3000}, "recursion"),
        ({"json": {"type": "nonsense"}}, "nonsense"),
        ({"json": {"not": {}}}, "not"),
        ({"json": {"x-guidance": {"lenient": True}, "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"$ref": "https://example.com/schema"}}, "not fetch"),
        ({"json": {"title": "x" * MAX_GRAMMAR_BYTES}}, f"at most {MAX_GRAMMAR_BYTES}"),
        ({"json": {"const": "\ud800"}}, "hex escape"),
        ({"json": {"$ref": "#"}}, "NoExtension"),
        ({"regex": r"[^\s\S]"}, "NoExtension"),
        ({"regex": "("}, "unclosed group"),
        ({"regex": "a(?=b)"}, "look-ahead"),
        ({"regex": "a\ud800"}, "Unicode"),
        ({"regex": "(" * 5000 + ")" * 5000}, "regex"),
        ({"choice": "yes"}, "list of texts"),
        ({"choice": []}, f"1 to {MAX_CHOICES}"),
        ({"choice": ["a"] * (MAX_CHOICES + 1)}, f"1 to {MAX_CHOICES}"),
        ({"choice": ["a" * 20_000] * 2}, "at most"),
        ({"choice": [""]}, "not empty"),
        ({"choice": [5]}, "must be text"),
        ({"grammar": "start: nonsense"}, "nonsense"),
        ({"grammar": "start: " + "(" * 9000 + '"a"' + ")" * 9000}, "too deeply nested"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, dict) else "",
)
def test_a_form_that_cannot_be_had_is_refused(llm: LLM, form: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError, match=re.escape(reason)):
        run(llm, wanted(**form))
    assert not llm.engine.has_unfinished_requests()


@pytest.mark.parametrize(
    "form",
    [
        {"$defs": {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(900)}},
        {
            "$defs": {
                f"a{i}": {"properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}} for i in range(580)
            }
        },
    ],
    ids=["references", "objects"],
)
def test_definitions_that_lead_from_one_to_the_next_do_not_end_the_process(
    llm: LLM, form: dict[str, Any]
) -> None:
    """As deep as the bound of bytes allows: the library recurses, an ordinary stack overflows."""
    defs = {**form["$defs"], f"a{len(form['$defs'])}": {"type": "integer"}}
    schema = json.dumps({"$defs": defs, "$ref": "#/$defs/a0"}, separators=(",", ":"))
    (output,) = run(llm, wanted(json=schema, max_tokens=4))
    assert output.token_ids


def test_rules_that_lead_from_one_to_the_next_do_not_end_the_process(llm: LLM) -> None:
    rules = [f"r{i}:r{i + 1}" for i in range(2600)]
    (output,) = run(llm, wanted(grammar="\n".join(["start:r0", *rules, 'r2600:"a"'])))
    assert output.text == "a"


LONG = "(((a{100}){100}){100}){100}"  # one text, of 100 MB


@pytest.mark.parametrize(
    "form",
    [
        {"regex": LONG},
        {"json": {"type": "string", "pattern": f"^{LONG}$"}},
        {"grammar": f"start: /{LONG}/"},
        {"grammar": f'%llguidance {{"no_forcing": false}}\nstart: /{LONG}/ //'},
    ],
    ids=["regex", "json", "grammar", "options"],
)
def test_a_long_text_in_few_words_is_not_written_out(llm: LLM, form: dict[str, Any]) -> None:
    (output,) = run(llm, wanted(**form, max_tokens=6))
    assert output.text in ("aaaaaa", '"aaaaa')


def test_a_form_that_takes_too_long_to_compile_is_refused(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "_MOST_SECONDS", 0.0)
    with pytest.raises(RequestError, match="to compile"):
        run(llm, wanted(json=SCHEMA))


def test_without_the_library_the_request_is_refused(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"pip install .pagedkv\[server\]"):
        run(llm, wanted(regex="a"))
    assert run(llm, SamplingParams(max_tokens=2))[0].token_ids


def test_without_a_tokenizer_the_request_is_refused(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        if "token" not in file.name:
            (tmp_path / file.name).symlink_to(file)
    llm = LLM(tmp_path, num_blocks=20, block_size=4)
    with pytest.raises(RequestError, match="no tokenizer"):
        llm.generate({"prompt_token_ids": [5]}, wanted(regex="a"))


def test_beams_have_no_form(llm: LLM) -> None:
    beam = BeamSearchParams(2, 4)
    params = replace(beam.sampling, structured_outputs=StructuredOutputs(regex="a"))
    add = Add("r", (1, 2), params, 0.0, 0, beam=beam)
    with pytest.raises(RequestError, match="beam search"):
        llm.engine.core.scheduler.validate(add)


# ---- containment


class Broken:
    """A matcher that goes wrong at its third mask, as a library may: not even with an Exception."""

    class Panic(BaseException):
        pass

    def __init__(self, matcher: Any, masks: int = 0) -> None:
        self.matcher, self.masks = matcher, masks

    def deep_copy(self) -> Broken:
        return Broken(self.matcher.deep_copy())

    def compute_bitmask(self) -> bytes:
        self.masks += 1
        if self.masks == 3:
            raise Broken.Panic("internal error")
        return bytes(self.matcher.compute_bitmask())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.matcher, name)


OTHERS = [
    (wanted(json=SCHEMA, seed=7), "one"),
    (SamplingParams(max_tokens=30, seed=8), "two"),
    (wanted(regex="(ab)+", seed=9, n=3, max_tokens=30), "three"),
]


def together(llm: LLM, *more: tuple[SamplingParams, str]) -> list[Sequence[CompletionOutput]]:
    all_params, prompts = zip(*OTHERS, *more, strict=True)
    return [output.outputs for output in llm.generate(list(prompts), list(all_params))]


def test_a_fault_in_a_grammar_ends_its_samples_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_whole = grammar._compile

    def compile_one(form: StructuredOutputs, tokenizer: Any) -> Any:
        matcher = compile_whole(form, tokenizer)
        return Broken(matcher) if form.regex == "x{9}" else matcher

    monkeypatch.setattr(grammar, "_compile", compile_one)
    llm = LLM(folder, num_blocks=200, block_size=4, deterministic=True)
    expected = together(llm)
    *others, broken = together(llm, (wanted(regex="x{9}", n=2), "four"))
    assert [(o.text, o.finish_reason) for o in broken] == [("xx", "error")] * 2
    assert "Panic: internal error" in str(broken[0].error)
    assert others == expected
    assert llm.engine.block_manager.num_held_blocks == 0


def test_a_form_without_a_way_on_ends_its_samples_alone(folder: Path) -> None:
    """The check in front knows more tokens than this model has."""
    llm = LLM(folder, num_blocks=200, block_size=4, deterministic=True)
    expected = together(llm)
    dead = wanted(grammar='start: "xx" <[258]> "x"', n=2)
    *others, ended = together(llm, (dead, "four"))
    assert [(o.text, o.finish_reason) for o in ended] == [("", "error")] * 2
    assert "Token range" in str(ended[0].error)
    assert others == expected


def test_a_form_that_stop_tokens_and_min_tokens_leave_no_way_on_ends_its_sample(llm: LLM) -> None:
    token = byte_tokenizer().encode("b")[0]
    params = replace(wanted(choice=["abc"]), stop_token_ids=[token], min_tokens=5)
    (output,) = run(llm, params)
    assert (output.text, output.finish_reason) == ("a", "error")
    assert "forbidden" in str(output.error)


# ---- the same whatever else runs

FORMS: list[dict[str, Any]] = [
    {"json": SCHEMA},
    {"regex": "[a-d ]{20,40}"},
    {"choice": ["abcdefghijklmnopqrstuvwxyz", "abcdefghijklm nopqr"]},
    {"grammar": 'start: ("x" | "yy" | "(" start ")"){8,30}'},
    {"json": {"type": "array", "items": {"type": "boolean"}, "minItems": 6}},
]
CROWD = [
    (wanted(max_tokens=40, seed=i % 3, n=1 + i % 3, **FORMS[i % len(FORMS)]), f"number {i}, hello")
    for i in range(10)
]


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[Sequence[CompletionOutput]]:
    llm = LLM(folder, num_blocks=200, block_size=4, deterministic=True)
    return [run(llm, params, prompt) for params, prompt in CROWD]


@pytest.mark.parametrize("recovery", ["recompute", "swap"])
def test_a_crowd_under_pressure_draws_what_each_draws_alone(
    folder: Path, alone: list[Sequence[CompletionOutput]], recovery: str
) -> None:
    llm = LLM(
        folder,
        num_blocks=48,
        block_size=4,
        max_num_seqs=12,
        max_num_batched_tokens=16,
        deterministic=True,
        scheduling={"recovery": recovery},
        tiers=TierConfig(host_memory=2**24) if recovery == "swap" else None,
    )
    params, prompts = zip(*CROWD, strict=True)
    outputs = [output.outputs for output in llm.generate(list(prompts), list(params))]
    assert llm.engine.core.scheduler.stats.num_preemptions > 0
    assert outputs == alone
    llm.close()


def test_sample_i_of_seed_s_is_sample_0_of_seed_s_plus_i(llm: LLM) -> None:
    group = run(llm, wanted(regex="[ab]{30}", seed=3, n=3))
    single = [run(llm, wanted(regex="[ab]{30}", seed=3 + i))[0] for i in range(3)]
    assert [o.token_ids for o in group] == [o.token_ids for o in single]
    assert len({o.token_ids for o in group}) == 3


# ---- what is kept between steps


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    made = model_grammars(byte_tokenizer(), VOCAB, (EOS,))
    assert made is not None
    yield made


def sample(params: SamplingParams, output: Sequence[int]) -> Sample:
    return Sample(0, params, key=1, position=0, output=np.array(output, np.int32))


def test_a_kept_matcher_and_a_new_one_give_the_same_masks(grammars: Grammars) -> None:
    params = wanted(json=SCHEMA)
    text = byte_tokenizer().encode('{"n": -12, "of": "y"}')
    for i, token in enumerate(text):
        grammars.begin()
        going_on = grammars.constraint(sample(params, text[:i]))
        anew = model_grammars(byte_tokenizer(), VOCAB, (EOS,))
        assert anew is not None
        fresh = anew.constraint(sample(params, text[:i]))
        assert np.array_equal(going_on.allowed, fresh.allowed)
        assert going_on.allowed[token] and not going_on.allowed[EOS]
        assert grammars.advance(going_on, token) == (i + 1 == len(text))


def test_a_matcher_is_for_the_output_that_it_has_read(grammars: Grammars) -> None:
    """Two samples of one form."""
    a, b, c = byte_tokenizer().encode("abc")
    params = wanted(regex="a{4}|b{4}|ac{3}")
    for outputs, follow, drawn in [
        (([], []), ({a, b}, {a, b}), (a, a)),
        (([a], [a]), ({a, c}, {a, c}), (a, c)),  # of one output, then of two
        (([a, c], [a, a]), ({c}, {a}), (c, a)),
        (([a], [a, c, c]), ({a, c}, {c}), (a, c)),  # cut back
        (([b, b, b], [a, a]), ({b}, {a}), (b, a)),  # out of nowhere
    ]:
        grammars.begin()
        for output, expected, token in zip(outputs, follow, drawn, strict=True):
            found = grammars.constraint(sample(params, output))
            assert set(np.flatnonzero(found.allowed)) == expected
            grammars.advance(found, token)


def test_nothing_is_kept_of_samples_that_have_ended(llm: LLM, grammars: Grammars) -> None:
    (a,) = byte_tokenizer().encode("a")
    for params, kept in [(wanted(regex="a{9}"), 1), (wanted(regex="a{9}", max_tokens=1), 0)]:
        grammars.begin()
        grammars.advance(grammars.constraint(sample(params, [])), a)
        assert grammars.num_kept == kept
    engine, executor = llm.engine, llm.engine.core.executor
    llm.generate("others", SamplingParams(max_tokens=1))
    long = replace(wanted(regex="a*", n=3, max_tokens=100), ignore_eos=True)
    engine.add_request("long", "hello", long)
    engine.add_request("other", "hello", SamplingParams(max_tokens=30, ignore_eos=True))
    for _ in range(5):
        engine.step()
    assert executor._grammars.num_kept == 3
    engine.abort_request("long")
    while engine.has_unfinished_requests():
        engine.step()
    assert executor._grammars.num_kept == 0


def test_an_output_that_its_grammar_does_not_allow_is_an_error(grammars: Grammars) -> None:
    with pytest.raises(GrammarError, match="doesn't satisfy the grammar"):
        grammars.constraint(sample(wanted(regex="a+"), byte_tokenizer().encode("ab")))


def test_a_run_with_forms_is_recorded_and_replayed(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    llm = LLM(folder, num_blocks=48, block_size=4, max_num_seqs=8, record=path)
    params, prompts = zip(*CROWD, strict=True)
    llm.generate(list(prompts), list(params))
    llm.close()
    replayed = replay_run(path)
    assert replayed.difference is None
    assert replayed.num_requests == len(CROWD)
