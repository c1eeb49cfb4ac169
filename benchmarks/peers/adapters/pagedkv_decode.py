"""This engine's decoding alone: the measured part begins when every request has its first token.

options: model, dtype, kv_bytes.
"""

from __future__ import annotations

from typing import Any

import pagedkv
from pagedkv import LLM, SamplingParams
from peers.protocol import Engine, Requests, serve

PREFILL = 256  # tokens of a step that prefills, at least, with no more than as many rows decoding


class PagedKVDecode(Engine):
    def __init__(self, options: dict[str, Any]) -> None:
        llm = LLM(
            options["model"],
            dtype=options["dtype"],
            kv_cache_memory=options["kv_bytes"],
            preallocate=True,
        )
        self._engine, self._made = llm.engine, 0
        self._tokens: dict[str, tuple[int, ...]] = {}
        self.info = {"version": pagedkv.__version__, "report": "; ".join(llm.report.lines())}

    def prepare(self, workload: str, requests: Requests) -> None:
        """Prefills. Rows that come first decode until the last has been prefilled."""
        self._engine.abort_request(self._tokens)
        while self._engine.has_unfinished_requests():
            self._engine.step()
        self._tokens.clear()
        spare = sum(len(prompt) for prompt, _ in requests) // PREFILL
        for prompt, output in requests:
            name, self._made = f"decode-{self._made}", self._made + 1
            self._tokens[name] = ()
            params = SamplingParams(temperature=0, max_tokens=output + spare + 2, ignore_eos=True)
            self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
        while not all(self._tokens.values()):
            self._step()

    def generate(self, workload: str, requests: Requests) -> list[list[int]]:
        output = requests[0][1]
        starts = {name: len(tokens) for name, tokens in self._tokens.items()}
        for _ in range(output):
            self._step()
        return [list(self._tokens[name][start:]) for name, start in starts.items()]

    def _step(self) -> None:
        for output in self._engine.step():
            self._tokens[output.request_id] = output.outputs[0].token_ids


if __name__ == "__main__":
    serve(PagedKVDecode)
