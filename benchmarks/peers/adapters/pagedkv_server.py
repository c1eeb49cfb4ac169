"""This engine through `pagedkv serve`.

options: program, model, dtype, kv_bytes.
"""

from __future__ import annotations

from typing import Any

from peers.adapters.http import Server
from peers.protocol import Engine, Requests, family, serve


class PagedKVServer(Engine):
    def __init__(self, options: dict[str, Any]) -> None:
        self._model = options["model"]
        command = [options["program"], "serve", self._model, "--dtype", options["dtype"]]
        command += ["--kv-cache-memory", str(options["kv_bytes"]), "--preallocate"]
        command += ["--log-level", "warning"]
        self._server = Server(command)
        self.info = {"command": " ".join(command)}

    def pids(self, workload: str) -> list[int]:
        return family(self._server.pid)

    def close(self) -> None:
        self._server.close()

    def generate(self, workload: str, requests: Requests) -> list[list[int]]:
        bodies = [
            {
                "model": self._model,
                "prompt": prompt,
                "max_tokens": output,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            for prompt, output in requests
        ]
        answers = self._server.post("/v1/completions", bodies)
        return [answer["choices"][0]["token_ids"] for answer in answers]


if __name__ == "__main__":
    serve(PagedKVServer)
