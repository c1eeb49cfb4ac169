"""vLLM's CPU backend, in process.

options: model (folder), dtype, kv_bytes, threads, block_size (0 leaves its own). Prefix caching is
on, as it is by default.
"""

from __future__ import annotations

import os
from typing import Any

from peers.protocol import Engine, Requests, serve


class VLLM(Engine):
    def __init__(self, options: dict[str, Any]) -> None:
        processors = sorted(os.sched_getaffinity(0))[: options["threads"]]
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, processors)),
            "VLLM_CPU_KVCACHE_SPACE": str(options["kv_bytes"] // 2**30),  # GiB
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        import vllm  # reads these

        more = {"block_size": options["block_size"]} if options["block_size"] else {}
        self._params = vllm.SamplingParams
        self._llm = vllm.LLM(
            options["model"],
            dtype=options["dtype"],
            max_model_len=2048,
            enable_prefix_caching=True,
            seed=0,
            **more,
        )
        config = self._llm.llm_engine.vllm_config
        self._made = 0
        self.info = {
            "version": vllm.__version__,
            "block size": str(config.cache_config.block_size),
            "step budget": str(config.scheduler_config.max_num_batched_tokens),
            "kv": str(config.cache_config.cache_dtype),
        }

    def generate(self, workload: str, requests: Requests) -> list[list[int]]:
        engine, tokens = self._llm.llm_engine, dict[str, list[int]]()
        for prompt, output in requests:
            name, self._made = str(self._made), self._made + 1
            tokens[name] = []
            params = self._params(
                temperature=0, max_tokens=output, ignore_eos=True, detokenize=False
            )
            engine.add_request(name, {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            for result in engine.step():
                tokens[result.request_id] = list(result.outputs[0].token_ids)
        return list(tokens.values())


if __name__ == "__main__":
    serve(VLLM)
