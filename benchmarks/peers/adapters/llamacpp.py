"""llama.cpp's server over HTTP: a server for each workload, with as many slots as requests.

options: program (llama-server), model (GGUF), threads, kv_type (f16, f32, ...), arguments (more of
the server's), cached (workloads in which it may share prefixes).
"""

from __future__ import annotations

from typing import Any

from peers.adapters.http import Server
from peers.protocol import Engine, Requests, serve

ROUND = 256  # the context of a slot is a multiple of it, as in llama.cpp itself


class LlamaCpp(Engine):
    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._servers: dict[str, Server] = {}
        self.info = {"arguments": " ".join(options["arguments"]), "kv": options["kv_type"]}

    def prepare(self, workload: str, requests: Requests) -> None:
        if workload in self._servers:
            return
        options, threads = self._options, str(self._options["threads"])
        longest = max(len(prompt) + output for prompt, output in requests)
        context = len(requests) * -(-(longest + 1) // ROUND) * ROUND
        command = [options["program"], "-m", options["model"], "-t", threads, "-tb", threads]
        command += ["-np", str(len(requests)), "-c", str(context), "--no-warmup"]
        command += ["-ctk", options["kv_type"], "-ctv", options["kv_type"]]
        self._servers[workload] = Server([*command, *options["arguments"]])

    def pids(self, workload: str) -> list[int]:
        return [self._servers[workload].pid]

    def close(self) -> None:
        for server in self._servers.values():
            server.close()

    def generate(self, workload: str, requests: Requests) -> list[list[int]]:
        bodies = [
            {
                "prompt": prompt,
                "n_predict": output,
                "ignore_eos": True,
                "return_tokens": True,
                "cache_prompt": workload in self._options["cached"],
                "temperature": 0,
                "samplers": ["top_k"],
                "top_k": 1,
            }
            for prompt, output in requests
        ]
        return [answer["tokens"] for answer in self._servers[workload].post("/completion", bodies)]


if __name__ == "__main__":
    serve(LlamaCpp)
