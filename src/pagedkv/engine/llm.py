"""`LLM`: a model, its paged cache and an engine, in one call."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

import torch

from pagedkv.attention.backends import choose_backend, make_backend, stored_block_bytes
from pagedkv.cache import BlockManager
from pagedkv.engine.core import EngineCore
from pagedkv.engine.executor import ModelExecutor
from pagedkv.engine.llm_engine import LLMEngine
from pagedkv.engine.machine import THREADS_VARIABLE, machine_memory, num_threads
from pagedkv.engine.memory import StartupReport, pool_blocks
from pagedkv.engine.output import RequestOutput
from pagedkv.engine.requests import ChatMessages, Prompt
from pagedkv.errors import ConfigError, RequestError
from pagedkv.models.loader import load_model
from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.params import SamplingParams
from pagedkv.scheduling.scheduler import Scheduler

# None: the checkpoint's own, bfloat16 or float32.
DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}

Progress = Callable[[int, int], None]


class LLM:
    """Generates text with a model whose K/V live in fixed-size blocks.

    model: "smollm2-135m-instruct" (embedded), a local Hugging Face folder, or a hub id.
    dtype: "float32", "bfloat16", or "auto": the checkpoint's own (float32 if it is neither).
    num_blocks / kv_cache_memory: size of the pool in blocks or bytes; by default a share of the
        memory that the container has left (`pagedkv.engine.memory.KV_SHARE`).
    max_model_len: most tokens of prompt and output together; by default what the model was
        trained for. A sequence that outgrows the pool even alone ends with "length".
    max_num_batched_tokens: token budget of a step.
    deterministic: results are bit-identical whatever else runs; not with the gather backend.
    seed: from it the seeds of requests that bring none are drawn.

    `engine` is the LLMEngine, `report` what was chosen. Sets torch's number of threads if it is
    larger than what the container grants, or to PAGEDKV_NUM_THREADS.
    Raises ConfigError or ModelError.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str = "auto",
        device: str = "cpu",
        block_size: int = 16,
        num_blocks: int | None = None,
        kv_cache_memory: int | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 512,
        enable_prefix_caching: bool = True,
        attention_backend: str = "auto",
        deterministic: bool = False,
        seed: int = 0,
    ) -> None:
        if dtype not in DTYPES:
            raise ConfigError(f"dtype={dtype!r}: use one of {', '.join(DTYPES)}")
        if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
            raise ConfigError(f"block_size={block_size!r} must be a positive integer")
        backend_name, reason = choose_backend(attention_backend)
        if deterministic and backend_name == "gather":
            raise ConfigError(
                f"deterministic=True needs the native or the reference backend ({reason}): set "
                "attention_backend, or deterministic=False"
            )
        threads = _set_threads()
        loaded = load_model(model, DTYPES[dtype], deterministic, device)
        config, memory = loaded.config, machine_memory()
        kv_dtype = loaded.decoder.dtype
        if max_model_len is None:
            max_model_len = config.max_position_embeddings
        if not 2 <= max_model_len <= config.max_position_embeddings:
            raise ConfigError(
                f"max_model_len={max_model_len} must be from 2 to the model's "
                f"max_position_embeddings={config.max_position_embeddings}"
            )
        one_block = config.kv_spec(1, block_size, kv_dtype)
        block_bytes = stored_block_bytes(backend_name, one_block)
        blocks = pool_blocks(
            block_bytes, memory, num_blocks=num_blocks, kv_cache_memory=kv_cache_memory
        )
        scheduling = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            eos_token_ids=config.eos_token_ids,
            vocab_size=config.vocab_size,
        )
        manager = BlockManager(
            blocks,
            block_size,
            prefix_caching=enable_prefix_caching,
            max_seqs=max_num_seqs,
            max_blocks_per_seq=min(blocks, -(-max_model_len // block_size)),
        )
        backend = make_backend(
            backend_name,
            config.kv_spec(blocks, block_size, kv_dtype),
            deterministic=deterministic,
        )
        executor = ModelExecutor(loaded.decoder, backend)
        core = EngineCore(Scheduler(manager, scheduling), executor)
        self.engine = LLMEngine(core, loaded.tokenizer, seed=seed)
        self.report = StartupReport(
            model=str(model),
            dtype=str(kv_dtype).removeprefix("torch."),
            bytes_per_token=block_bytes // block_size,
            block_size=block_size,
            num_blocks=blocks,
            block_bytes=block_bytes,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            memory=memory,
            num_threads=threads,
            backend=backend_name,
            backend_reason=reason,
        )
        self._num_requests = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: Progress | None = None,
    ) -> list[RequestOutput]:
        """Runs prompts to their end; results are in the order of the prompts.

        prompts: text, {"prompt": text}, {"prompt_token_ids": [...]}, or a list of these.
        params: one for all or one a prompt. `progress(done, total)` is called as they finish.
        RequestError names the prompt that cannot run; none of the list has been started then.
        When the call is interrupted its requests are aborted and their blocks released.
        """
        if isinstance(prompts, (str, Mapping)):
            prompts = [prompts]
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise RequestError(f"{len(params)} params for {len(prompts)} prompts: give one each")
        prepared = []
        for i, (prompt, wanted) in enumerate(zip(prompts, params, strict=True)):
            try:
                request_id = f"generate-{self._num_requests + i}"
                prepared.append(self.engine.prepare(request_id, prompt, wanted))
            except RequestError as error:
                raise RequestError(f"prompt {i}: {error}") from error
        self._num_requests += len(prepared)
        ids = [request.add.request_id for request in prepared]
        try:
            for request in prepared:
                self.engine.submit(request)
            return self._run(ids, progress)
        except BaseException:
            self.engine.cancel(ids)
            raise

    def chat(
        self,
        messages: ChatMessages | Sequence[ChatMessages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: Progress | None = None,
    ) -> list[RequestOutput]:
        """Like `generate`, for one conversation or several.

        A conversation is a list of {"role": ..., "content": ...}; the model's chat template makes
        the prompt. RequestError if it has none.
        """
        one = all(isinstance(message, Mapping) for message in messages)
        conversations = cast("Sequence[ChatMessages]", [messages] if one else messages)
        prompts = [self.engine.chat_prompt(conversation) for conversation in conversations]
        return self.generate(prompts, params, progress=progress)

    def _run(self, ids: Sequence[str], progress: Progress | None) -> list[RequestOutput]:
        finished: dict[str, RequestOutput] = {}
        mine = set(ids)
        others: list[RequestOutput] = []
        try:
            while len(finished) < len(ids):
                before = len(finished)
                for output in self.engine.step():
                    if output.request_id not in mine:
                        others.append(output)
                    elif output.finished:
                        finished[output.request_id] = output
                if progress is not None and len(finished) > before:
                    progress(len(finished), len(ids))
        finally:
            self.engine.put_back(others)
        return [finished[i] for i in ids]


def _set_threads() -> int:
    """Lowers torch's threads to what the container grants; a smaller number of the user's stays."""
    threads = num_threads()
    if THREADS_VARIABLE not in os.environ:
        threads = min(threads, torch.get_num_threads())
    torch.set_num_threads(threads)
    return threads
