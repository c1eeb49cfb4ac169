"""What stands before a core: requests are read and named on the way in, deltas become text."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from pagedkv.engine.output import OutputProcessor, RequestOutput
from pagedkv.engine.requests import Prepared, RequestReader, text_decoder
from pagedkv.errors import RequestError
from pagedkv.scheduling.messages import Abort, Add, Delta, Message


class FrontEnd:
    """Keeps the requests that are in the core, and the text they have brought.

    All calls may come from any thread. validate: RequestError for a request that cannot run.
    send: takes messages to the core, in order. seed: starts the generator that draws a seed for
    each request that brings none. clock: seconds; arrival times are on it.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        validate: Callable[[Add], None],
        send: Callable[[Message], None],
        *,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self.reader = RequestReader(tokenizer, validate)
        self._send = send
        self._processor = OutputProcessor(text_decoder(tokenizer), send)
        self._seeds = np.random.default_rng(seed % 2**64)
        self._lock = threading.Lock()  # of all below, and of the processor
        self._live: dict[str, str] = {}  # the client's id -> the id in the core, never reused
        self._num_added = 0

    def __len__(self) -> int:
        """Requests whose end has not been handed out."""
        return len(self._live)

    def submit(self, prepared: Prepared) -> None:
        """Sends what the reader has checked.

        RequestError: the id is that of a request whose last output has not been handed out yet.
        """
        add, request_id = prepared.add, prepared.add.request_id
        with self._lock:
            if request_id in self._live:
                raise RequestError(
                    f"request_id {request_id!r} is in use: choose another, or wait for its last "
                    "output"
                )
            seed = add.params.seed
            if seed is None:
                seed = int(self._seeds.integers(2**63))
            core_id = f"{request_id}#{self._num_added}"
            add = replace(add, request_id=core_id, seed=seed)
            self._processor.add(add, request_id, prepared.prompt)
            self._live[request_id] = core_id
            self._num_added += 1
            self._send(add)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests in any state; their ends are reported. Unknown ids are ignored."""
        with self._lock:
            for live in [self._live[i] for i in request_ids if i in self._live]:
                self._send(Abort(live))

    def discard(self, request_ids: Iterable[str]) -> None:
        """Ends requests and reports nothing more of them. Unknown ids are ignored."""
        with self._lock:
            for request_id in request_ids:
                core_id = self._live.pop(request_id, None)
                if core_id is not None:
                    self._processor.discard(core_id)
                    self._send(Abort(core_id))

    def process(self, deltas: Sequence[Delta]) -> list[RequestOutput]:
        """What the core has brought: an output for each request that has something new."""
        with self._lock:
            outputs = self._processor.process(deltas, self.clock())
            for output in outputs:
                if output.finished:
                    del self._live[output.request_id]
        return outputs
