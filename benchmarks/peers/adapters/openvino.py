"""OpenVINO GenAI's continuous batching pipeline, in process.

options: model (IR folder), precision (bf16, f32), kv_precision ("" leaves its own), kv_bytes,
threads, batch_tokens, prefix_caching.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

from peers.protocol import Engine, Requests, serve


class OpenVINO(Engine):
    def __init__(self, options: dict[str, Any]) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = options["kv_bytes"] // 2**30  # GiB
        scheduler.max_num_batched_tokens = options["batch_tokens"]
        scheduler.enable_prefix_caching = options["prefix_caching"]
        properties = {
            "INFERENCE_NUM_THREADS": options["threads"],
            "INFERENCE_PRECISION_HINT": options["precision"],
        }
        if options["kv_precision"]:
            properties["KV_CACHE_PRECISION"] = options["kv_precision"]
        self._pipeline = genai.ContinuousBatchingPipeline(
            options["model"], scheduler, "CPU", properties
        )
        self._made = 0
        self.info = {"version": genai.__version__, "scheduler": scheduler.to_string()}

    def generate(self, workload: str, requests: Requests) -> list[list[int]]:
        handles = []
        for prompt, output in requests:
            config = genai.GenerationConfig()
            config.max_new_tokens, config.ignore_eos, config.do_sample = output, True, False
            ids = ov.Tensor(np.array([prompt], dtype=np.int64))
            handles.append(self._pipeline.add_request(self._made, ids, config))
            self._made += 1
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        return [list(handle.read_all()[0].generated_ids) for handle in handles]


if __name__ == "__main__":
    serve(OpenVINO)
