"""Which tokens an output of a given form may go on with: grammars, by llguidance.

A mask is a function of the grammar and of the output's tokens. What is kept from one step to the
next only saves computing that anew: it is found by exactly these two, so no preemption, fork or
abort can put one sample's state under another.

Symbol: V vocabulary size.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from pagedkv.errors import GrammarError, RequestError
from pagedkv.scheduling.step import Int32, Sample
from pagedkv.scheduling.structured import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer
    from llguidance._lib import JsonCompileOptions
    from transformers import PreTrainedTokenizerBase

Bool = npt.NDArray[np.bool_]
T = TypeVar("T")

# Grammars that are kept ready for further samples.
_MAX_READY = 16
# Whatever a schema says of itself: every keyword counts, and white space between two tokens has an
# end, which small models do not always find.
JSON_OPTIONS: JsonCompileOptions = {"lenient": False, "whitespace_pattern": r"[ \n\t]{1,32}"}
# The last options of a grammar count. What may only go on in one way is not written out beforehand,
# to its end: "(((a{100}){100}){100}){100}" is a text of 100 MB.
_OPTIONS = '%llguidance {"no_forcing": true}'
_MOST_SECONDS = 0.5  # of a thread's own time
_DEEP_STACK = 256 * 2**20  # bytes of address space, of which a usual grammar touches little
_STACK_SIZE = threading.Lock()  # of the size for new threads, which is the whole process's


@dataclass(slots=True)
class Constraint:
    """A sample's place in its grammar, to be used for one draw: `allowed` tokens (bool [V])."""

    key: tuple[StructuredOutputs, bytes]  # the form, and the output's tokens as int32
    matcher: LLMatcher
    allowed: Bool
    last: bool  # whether the next token is the last that max_tokens grants


class Grammars:
    """The grammars of a model's samples. Of one executor, in one thread.

    make_tokenizer: of the model's tokens as llguidance wants them; called once, when needed.
    """

    def __init__(self, make_tokenizer: Callable[[], LLTokenizer], vocab_size: int) -> None:
        self._make_tokenizer, self._vocab_size = make_tokenizer, vocab_size
        self._tokenizer: LLTokenizer | None = None
        self._ready: OrderedDict[StructuredOutputs, LLMatcher] = OrderedDict()
        # Matchers by what they have read, as the last step left them and as this one does.
        self._before: dict[tuple[StructuredOutputs, bytes], list[LLMatcher]] = {}
        self._after: dict[tuple[StructuredOutputs, bytes], list[LLMatcher]] = {}

    @property
    def num_kept(self) -> int:
        """Matchers that the next step may go on with: at most one a sample of the last step."""
        return sum(map(len, self._after.values()))

    def begin(self) -> None:
        """A step begins to draw: what the one before left is for it, older matchers go."""
        self._before, self._after = self._after, {}

    def constraint(self, sample: Sample) -> Constraint:
        """What the sample may draw next. GrammarError if it cannot be found out."""
        params, output = sample.params, sample.output
        form = params.structured_outputs
        if form is None or output is None:
            raise GrammarError("the sample comes without its form, or without its output")
        key = form, output.tobytes()
        with _contained():
            kept = self._before.get(key)
            matcher = kept.pop() if kept else self._matcher(form, output)
            allowed = self._mask(matcher)
            if params.ignore_eos:
                allowed[self._tokens.eos_tokens] = False
        last = params.max_tokens is not None and len(output) + 1 >= params.max_tokens
        return Constraint(key, matcher, allowed, last)

    def advance(self, constraint: Constraint, token: int) -> bool:
        """The sample draws `token`. Returns whether nothing may follow it. GrammarError."""
        matcher, (form, output) = constraint.matcher, constraint.key
        with _contained():
            matcher.consume_token(token)
            _check(matcher)
            if matcher.is_stopped() or self._can_only_end(matcher):
                return True
        if not constraint.last:
            key = form, output + np.int32(token).tobytes()
            self._after.setdefault(key, []).append(matcher)
        return False

    def _matcher(self, form: StructuredOutputs, output: Int32) -> LLMatcher:
        """A matcher that has read the output."""
        if form not in self._ready:
            tokens = self._tokens
            self._ready[form] = _on_deep_stack(lambda: _compile(form, tokens))
        self._ready.move_to_end(form)
        if len(self._ready) > _MAX_READY:
            self._ready.popitem(last=False)
        matcher = self._ready[form].deep_copy()
        matcher.consume_tokens(output.tolist())
        _check(matcher)
        return matcher

    def _mask(self, matcher: LLMatcher) -> Bool:
        """Tokens that may follow, the end tokens among them where the grammar accepts."""
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        _check(matcher)
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)

    def _can_only_end(self, matcher: LLMatcher) -> bool:
        """Whether the grammar accepts, and no token goes on; some grammars find that out late."""
        if not matcher.is_accepting():
            return False
        allowed = self._mask(matcher)
        allowed[self._tokens.eos_tokens] = False
        return not allowed.any()

    @property
    def _tokens(self) -> LLTokenizer:
        if self._tokenizer is None:
            self._tokenizer = self._make_tokenizer()
        return self._tokenizer


def check_grammar(form: StructuredOutputs) -> None:
    """RequestError with the library's reason if it cannot use the grammar, or is not installed.

    Tried out with a token a byte: what allows no beginning at all is refused as well, and what
    takes so long to compile that it would hold up a step.
    """
    try:
        from llguidance import LLTokenizer
    except ModuleNotFoundError:
        raise RequestError(
            f"structured_outputs ({form.kind}) needs llguidance, which is not installed: "
            'pip install "pagedkv[server]"'
        ) from None

    def time_beginning() -> float:
        start = time.thread_time()
        matcher = _compile(form, LLTokenizer("byte"))
        matcher.compute_bitmask()
        _check(matcher)
        return time.thread_time() - start

    try:
        with _contained():
            seconds = _on_deep_stack(time_beginning)
    except GrammarError as error:
        raise RequestError(f"structured_outputs ({form.kind}) cannot be used: {error}") from error
    if seconds > _MOST_SECONDS:
        raise RequestError(
            f"structured_outputs ({form.kind}) takes {seconds:.1f} s to compile, and at most "
            f"{_MOST_SECONDS} s are granted: give a simpler form"
        )


def model_grammars(
    tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, end_tokens: Sequence[int]
) -> Grammars | None:
    """The grammars of a model with this tokenizer; None without one.

    end_tokens: of the model; none: the tokenizer's.
    """
    if tokenizer is None:
        return None

    def make() -> LLTokenizer:
        from llguidance.hf import from_tokenizer

        fast = cast(Any, tokenizer)  # a slow one is refused
        return from_tokenizer(fast, n_vocab=vocab_size, eos_token=list(end_tokens) or None)

    return Grammars(make, vocab_size)


def _limits() -> LLParserLimits:
    """Bounds of the time and memory that one grammar takes."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_lexer_states=50_000,  # of 1 to 2 kB each
        initial_lexer_fuel=200_000,  # a fifth of the usual
        precompute_large_lexemes=False,  # seconds, over a large vocabulary
        verbose_errors=False,
    )


def _source(form: StructuredOutputs) -> str:
    """The grammar as llguidance takes it."""
    from llguidance import LLMatcher, grammar_from

    if form.json_object or form.json is not None:
        schema = '{"type": "object"}' if form.json_object else str(form.json)
        try:
            given = LLMatcher.grammar_from_json_schema(schema, overrides=JSON_OPTIONS)
        except ValueError as error:
            raise GrammarError(f"not a JSON schema: {error}") from error
        text = "start: %json " + json.dumps(json.loads(given)["grammars"][0]["json_schema"])
    elif form.choice is not None:
        text = grammar_from("choice", json.dumps(form.choice))
    elif form.regex is not None:
        given = LLMatcher.grammar_from_regex(form.regex)
        text = json.loads(given)["grammars"][0]["lark_grammar"]
    else:
        text = str(form.grammar)
    return f"{text}\n{_OPTIONS}"


def _compile(form: StructuredOutputs, tokenizer: LLTokenizer) -> LLMatcher:
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, _source(form), log_level=0, limits=_limits())
    _check(matcher)
    return matcher


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise GrammarError(f"the grammar of the output: {_short(matcher.get_error())}")


def _short(why: str) -> str:
    """The library's reason in one line."""
    return " ".join(why.partition("\n<")[0].split())[:300]


@contextmanager
def _contained() -> Iterator[None]:
    """Whatever the library raises becomes a GrammarError."""
    try:
        yield
    except (GrammarError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic of the library is no Exception
        raise GrammarError(
            f"the grammar library failed: {type(error).__name__}: {_short(str(error))}"
        ) from error


def _on_deep_stack(function: Callable[[], T]) -> T:
    """Calls it in a thread whose stack holds the deepest grammar of MAX_GRAMMAR_BYTES.

    The library reads grammars by recursion; 700 definitions that lead from one to the next are
    more than an ordinary stack holds, and that would be the end of the process.
    """
    with ThreadPoolExecutor(1) as pool:
        with _STACK_SIZE:
            before = threading.stack_size(_DEEP_STACK)
            try:
                future = pool.submit(function)
            finally:
                threading.stack_size(before)
        return future.result()
