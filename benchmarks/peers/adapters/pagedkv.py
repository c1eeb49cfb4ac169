"""This engine, in process, as a user of `LLM` has it.

options: model, dtype, and the size of the pool: kv_bytes or num_blocks.
"""

from __future__ import annotations

from typing import Any

import pagedkv
from pagedkv import LLM, SamplingParams
from peers.protocol import Engine, Requests, serve


class PagedKV(Engine):
    def __init__(self, options: dict[str, Any]) -> None:
        self._llm = LLM(
            options["model"],
            dtype=options["dtype"],
            kv_cache_memory=options.get("kv_bytes"),
            num_blocks=options.get("num_blocks"),
            preallocate=True,
        )
        self.info = {"version": pagedkv.__version__, "report": "; ".join(self._llm.report.lines())}

    def generate(self, workload: str, requests: Requests) -> list[list[int]]:
        outputs = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt, _ in requests],
            [
                SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
                for _, output in requests
            ],
        )
        return [list(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    serve(PagedKV)
