"""Faults in outputs of a given form."""

from __future__ import annotations

from kinds import Mutant

_GRAMMAR = "engine/test_grammar.py::test_"
_TOOLS = "server/test_tools.py::test_"

MUTANTS = (
    Mutant(
        "a matcher goes to any sample",
        ("isolation",),
        "engine/grammar.py",
        "kept = self._before.get(key)",
        "kept = next(iter(self._before.values()), None)",
        (
            _GRAMMAR + "a_matcher_is_for_the_output_that_it_has_read",
            _GRAMMAR + "a_crowd_under_pressure_draws_what_each_draws_alone",
        ),
    ),
    Mutant(
        "samples of one output share a matcher",
        ("isolation", "groups"),
        "engine/grammar.py",
        "matcher = kept.pop() if kept",
        "matcher = kept[-1] if kept",
        (_GRAMMAR + "a_matcher_is_for_the_output_that_it_has_read",),
    ),
    Mutant(
        "a new matcher does not read the output",
        ("preemption",),
        "engine/grammar.py",
        "        matcher.consume_tokens(output.tolist())\n",
        "",
        (
            _GRAMMAR + "a_matcher_is_for_the_output_that_it_has_read",
            _GRAMMAR + "a_crowd_under_pressure_draws_what_each_draws_alone",
        ),
    ),
    Mutant(
        "matchers of ended samples stay",
        ("no leak",),
        "engine/grammar.py",
        "self._before, self._after = self._after, {}",
        "self._before = self._after",
        (_GRAMMAR + "nothing_is_kept_of_samples_that_have_ended",),
    ),
    Mutant(
        "a panic of the grammar library is not contained",
        ("input totality",),
        "engine/grammar.py",
        "    except BaseException as error:  # a panic",
        "    except Exception as error:  # a panic",
        (_GRAMMAR + "a_fault_in_a_grammar_ends_its_samples_alone",),
    ),
    Mutant(
        "the end token is forbidden where nothing else may follow",
        ("progress",),
        "engine/grammar.py",
        "            if matcher.is_stopped() or self._can_only_end(matcher):\n",
        "            if False:\n",
        (_GRAMMAR + "what_forbids_the_end_token_does_so_until_nothing_may_follow",),
    ),
    Mutant(
        "the last token of a complete output is no text",
        ("streaming",),
        "engine/output.py",
        'delta.finish_reason == "stop" and not delta.complete',
        'delta.finish_reason == "stop"',
        (_GRAMMAR + "an_output_ends_with_its_last_token_where_nothing_may_follow",),
    ),
    Mutant(
        "a form that the library refuses enters",
        ("refusal",),
        "engine/requests.py",
        "            check_grammar(params.structured_outputs)\n",
        "",
        (_GRAMMAR + "a_form_that_cannot_be_had_is_refused",),
    ),
    Mutant(
        "what may become a call is shown as text",
        ("streaming",),
        "server/openai/tools.py",
        "text[at:] if ended else text[at : len(text) - _begun(text)]",
        "text[at:]",
        (_TOOLS + "what_is_streamed_adds_up_to_the_whole",),
    ),
    Mutant(
        "a brace in an argument's text ends the call",
        ("streaming",),
        "server/openai/tools.py",
        """r'"(?:[^"\\\\]|\\\\.)*"?|[{}\\[\\]]'""",
        """r'[{}\\[\\]]'""",
        (_TOOLS + "calls_in_a_text",),
    ),
    Mutant(
        "a demanded call is not demanded",
        ("input totality",),
        "server/openai/chat.py",
        "return replace(params, structured_outputs=form)",
        "return params",
        (_TOOLS + "a_demanded_call_is_one_of_the_tools", _TOOLS + "a_named_tool_is_called_once"),
    ),
)
