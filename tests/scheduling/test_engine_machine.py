"""Whatever happens to an engine in whatever order, its requests notice nothing of each other."""

from __future__ import annotations

import pytest
from engine_machine import EngineMachine
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test


def test_any_sequence_of_events_keeps_every_property() -> None:
    run_state_machine_as_test(
        EngineMachine, settings=settings(max_examples=120, stateful_step_count=50)
    )


class SanitizedEngineMachine(EngineMachine):
    """What the engine does with blocks is watched: the sanitizer finds nothing."""

    sanitize = True


def test_any_sequence_of_events_is_clean_to_the_sanitizer() -> None:
    run_state_machine_as_test(
        SanitizedEngineMachine, settings=settings(max_examples=20, stateful_step_count=50)
    )


@pytest.mark.deep
def test_long_sequences_of_events_keep_every_property() -> None:
    run_state_machine_as_test(
        EngineMachine, settings=settings(max_examples=5000, stateful_step_count=80)
    )
