"""An interrupt at any place of a step is seen between steps, and the engine goes on."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_llm import save_tiny_llm

from pagedkv import LLM, SamplingParams
from pagedkv.engine.interrupts import deferred_interrupt
from pagedkv.errors import PagedKVError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-llm")
    save_tiny_llm(path)
    return path


@pytest.fixture(autouse=True)
def python_handles_interrupts() -> Iterator[None]:
    """A job in the background of a shell starts with SIGINT ignored; these tests need a handler."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_waits_for_the_end_of_the_block() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), deferred_interrupt():
        interrupt()
        done.append("rest of the block")
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_does_not_wait() -> None:
    with pytest.raises(KeyboardInterrupt), deferred_interrupt():
        interrupt()
        with pytest.raises(KeyboardInterrupt):
            interrupt()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_ignored_interrupt_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with deferred_interrupt():
            interrupt()
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("place", ["plan", "commit"])
def test_generate_interrupted_in_the_bookkeeping_leaves_a_usable_engine(
    place: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(folder, num_blocks=64, block_size=4)
    scheduler = llm.engine.core.scheduler
    original = getattr(scheduler, place)
    calls = []

    def interrupted(*args: object) -> object:
        calls.append(place)
        if len(calls) == 2:
            interrupt()
        return original(*args)

    params = SamplingParams(temperature=0, max_tokens=6)
    prompt = {"prompt_token_ids": [3, 5, 7]}
    (want,) = llm.generate(prompt, params)
    with monkeypatch.context() as patch:
        patch.setattr(scheduler, place, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompt, params)
    assert llm.engine.block_manager.num_held_blocks == 0
    llm.engine.block_manager.check()
    (again,) = llm.generate(prompt, params)
    assert again.outputs[0].token_ids == want.outputs[0].token_ids


def test_a_second_thread_may_not_step_at_the_same_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(folder, num_blocks=64, block_size=4)
    errors: list[Exception] = []

    def other() -> None:
        try:
            llm.engine.step()
        except PagedKVError as error:
            errors.append(error)

    original = llm.engine.core.step

    def stepping(now: float) -> object:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return original(now)

    monkeypatch.setattr(llm.engine.core, "step", stepping)
    llm.generate({"prompt_token_ids": [1, 2]}, SamplingParams(max_tokens=1))
    assert errors and "another thread" in str(errors[0])
