"""Faults in what the endpoints make of a body, and of what the engine brings."""

from __future__ import annotations

from kinds import Mutant

_ENDPOINTS = "server/test_openai_endpoints.py::test_"
_FIELDS = "server/test_openai_fields.py::test_"
_STREAMS = "server/test_openai_streams.py::test_"

MUTANTS = (
    Mutant(
        "samples of several prompts share their choices",
        ("groups",),
        "server/openai/answers.py",
        "index = i * self._n + sample.index",
        "index = i + sample.index",
        (_ENDPOINTS + "choices_of_many_prompts_are_in_order",),
    ),
    Mutant(
        "a piece brings what was sent before",
        ("streaming",),
        "server/openai/completions.py",
        "sent.chars, sent.tokens = len(sample.text), len(sample.token_ids)",
        "sent.tokens = len(sample.token_ids)",
        (_STREAMS + "any_bytes", _ENDPOINTS + "choices_of_many_prompts_are_in_order"),
    ),
    Mutant(
        "a stream that failed ends as if it had not",
        ("terminal once",),
        "server/openai/answers.py",
        "            if (failed := failure(self._outputs.values())) is not None:",
        "            if (failed := failure(())) is None:",
        (_STREAMS + "a_choice_that_fails_beside_one_that_does_not_is_no_error",),
    ),
    Mutant(
        "the end of a choice does not wait for what the request has taken",
        ("mirrors",),
        "server/openai/answers.py",
        "waits = not output.finished and",
        "waits = output.finished and",
        (_FIELDS + "a_stop_string_is_cut_off_and_counted",),
    ),
    Mutant(
        "a prompt counts once for each of its samples",
        ("mirrors",),
        "server/openai/answers.py",
        "prompt += len(output.prompt_token_ids)",
        "prompt += len(output.prompt_token_ids) * len(output.outputs)",
        (_ENDPOINTS + "choices_of_many_prompts_are_in_order",),
    ),
    Mutant(
        "what is not known is left to the models",
        ("refusal",),
        "server/openai/protocol.py",
        "        if name not in kind.model_fields:",
        "        if not name:",
        (_FIELDS + "unknown_fields_are_refused_with_the_nearest_known_one",),
    ),
    Mutant(
        "a body may ask for one more than is allowed",
        ("refusal",),
        "server/openai/limits.py",
        "if asked > most:",
        "if asked > most + 1:",
        (_FIELDS + "the_operator_may_allow_less",),
    ),
    Mutant(
        "the engine knows requests by the names that clients give them",
        ("input totality",),
        "server/openai/completions.py",
        'api.engine.new_id(f"cmpl-{call.id}")',
        'f"cmpl-{call.id}"',
        (_FIELDS + "ids_are_the_clients_and_may_be_in_use",),
    ),
    Mutant(
        "the first in the queue cannot be asked for",
        ("fairness",),
        "server/openai/parameters.py",
        "priority=slo.priority if body.priority is None else body.priority,",
        "priority=body.priority or slo.priority,",
        (_FIELDS + "the_operator_may_promise_what_nobody_asked_for",),
    ),
    Mutant(
        "a deadline is a time of the clock",
        ("deadlines",),
        "server/openai/parameters.py",
        "arrival + deadline,",
        "deadline,",
        (_FIELDS + "the_operator_may_promise_what_nobody_asked_for",),
    ),
    Mutant(
        "a text of any length is tokenised",
        ("refusal",),
        "engine/requests.py",
        "if most is not None and len(text) > most * self._longest_token:",
        "if most is not None and not text:",
        (_FIELDS + "a_text_that_can_never_fit_is_not_tokenised",),
    ),
)
