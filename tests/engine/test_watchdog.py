"""Steps that take too long, and what is said of them."""

from __future__ import annotations

import logging
import threading

import pytest
from serving import GatedExecutor, toy_core
from tiny_llm import VOCAB

from pagedkv.engine.core_loop import CoreLoop
from pagedkv.engine.toy import ToyExecutor
from pagedkv.engine.watchdog import Watchdog, watching
from pagedkv.engine.wire import Batch, Close, FromCore
from pagedkv.scheduling.messages import Add
from pagedkv.scheduling.params import SamplingParams

PATIENCE = 60.0


def test_a_slow_step_is_reported_once_with_what_the_core_does() -> None:
    executor = GatedExecutor(ToyExecutor(64, 4, vocab_size=VOCAB))
    now = [100.0]
    over = threading.Semaphore(0)

    def post(frame: FromCore) -> None:
        if isinstance(frame, Batch) and frame.stats is not None:
            over.release()

    loop = CoreLoop(toy_core(executor=executor), post, clock=lambda: now[0])
    watchdog = Watchdog(loop, 5.0)
    assert watchdog.look() is None
    thread = threading.Thread(target=loop.run)
    thread.start()
    loop.send(Add("a", (1, 2, 3, 4, 5), SamplingParams(max_tokens=3), 0.0, 0))
    assert executor.reached.acquire(timeout=PATIENCE)
    now[0] = 104.9
    assert watchdog.look() is None
    now[0] = 105.5
    report = watchdog.look()
    assert report is not None
    for said in (
        "5.5 seconds",
        "step 0: 1 rows, 5 tokens",
        "1 running, 0 waiting",
        "64 blocks, 2 held",
        "serving.py",
        "self._allowed.acquire",
    ):
        assert said in report
    assert watchdog.look() is None
    executor.allow()
    assert over.acquire(timeout=PATIENCE) and executor.reached.acquire(timeout=PATIENCE)
    assert watchdog.look() is None
    now[0] = 111.0
    assert "step 1" in (watchdog.look() or "")
    executor.allow(None)
    for _ in range(2):
        assert over.acquire(timeout=PATIENCE)
    loop.send(Close())
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_reports_are_logged_while_the_step_runs(caplog: pytest.LogCaptureFixture) -> None:
    loop = CoreLoop(toy_core(), lambda frame: None)
    logged = threading.Event()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.set()

    handler = Handler()
    logging.getLogger("pagedkv.engine").addHandler(handler)
    try:
        with watching(loop, 0.01):
            loop.step_began = loop.clock()
            assert logged.wait(PATIENCE)
    finally:
        logging.getLogger("pagedkv.engine").removeHandler(handler)
    assert "none in flight" in caplog.text
