"""`LLM`: a model, its paged cache and an engine, in one call."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from pagedkv.attention.backends import (
    REBUILD,
    backend_kernels,
    choose_backend,
    make_backend,
    stored_block_bytes,
)
from pagedkv.cache import SanitizerError
from pagedkv.cache.sanitizer import asked_for_by_environment
from pagedkv.engine.build import make_manager, scheduler_settings, set_threads
from pagedkv.engine.core import EngineCore
from pagedkv.engine.executor import ModelExecutor
from pagedkv.engine.grammar import model_grammars
from pagedkv.engine.json_lines import DECISIONS, LineWriter
from pagedkv.engine.llm_engine import LLMEngine
from pagedkv.engine.machine import machine_memory
from pagedkv.engine.memory import StartupReport, pool_blocks
from pagedkv.engine.output import RequestOutput
from pagedkv.engine.processor import huge_page_mode
from pagedkv.engine.recording import Recorder
from pagedkv.engine.requests import ChatMessages, Prepared, Prompt, read_prefixes
from pagedkv.engine.sanitized import SanitizedBackend
from pagedkv.engine.tiers import TierConfig, check_tiers, open_tiers
from pagedkv.errors import ConfigError, ModelError, RequestError
from pagedkv.models.linear import linear_kernels
from pagedkv.models.loader import load_model
from pagedkv.models.native import find_native
from pagedkv.scheduling.config import (
    MAX_NUM_SEQS,
    SchedulerConfig,
    check_flag,
    check_integer,
)
from pagedkv.scheduling.messages import StepStats
from pagedkv.scheduling.params import BeamSearchParams, SamplingParams
from pagedkv.scheduling.scheduler import Scheduler

# None: the checkpoint's own, bfloat16 or float32.
DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}

_LOG = logging.getLogger("pagedkv")

_PROMPTS = "a prompt or a list of prompts; one of token ids is {'prompt_token_ids': [...]}"

AnyParams = SamplingParams | BeamSearchParams
OnStep = Callable[[Sequence[RequestOutput], StepStats | None], None]


class LLM:
    """Generates text with a model whose K/V live in fixed-size blocks.

    model: "smollm2-135m-instruct" (embedded), a local Hugging Face folder, or a hub id.
    dtype: "float32", "bfloat16", or "auto": the checkpoint's own (float32 if it is neither).
    num_blocks / kv_cache_memory: size of the pool in blocks or bytes; by default a share of the
        memory that the container has left (`pagedkv.engine.memory.KV_SHARE`).
    preallocate: take the pool's memory from the system at the start, not as blocks are used for
        the first time: a slower start, and no step that waits for pages.
    max_model_len: most tokens of prompt and output together; by default what the model was
        trained for. A sequence that outgrows the pool even alone ends with "length".
    max_num_seqs: samples that run at once, at most max_num_batched_tokens of them.
    max_num_batched_tokens: token budget of a step.
    kernels: what computes the layers around attention: "native", "torch" (the plain path, to
        compare with), or "auto": native where the extension is built.
    deterministic: results are bit-identical whatever else runs; with the native backend and
        kernels only.
    scheduling: further settings of `SchedulerConfig` by name, such as {"policy": "fair"}: policy,
        admission, watermark, recovery, bounds of the queue, overload; tenants, also as a dict from
        their names to a weight or a `pagedkv.Tenant`.
    public_prefixes: beginnings of prompts, as prompts are given, whose K/V all tenants share.
    seed: from it the seeds of requests that bring none are drawn.
    sanitize: check every use of a block (`pagedkv.cache.sanitizer`): a wrong block table raises
        SanitizerError, with a report. For tests and debugging. PAGEDKV_SANITIZE=1 asks for it too.
        The LLM is not to be used any more then.
    replay_log: file for the calls that led to such an error, for `pagedkv replay`.
    decision_log: file for every decision of the scheduler, for `pagedkv explain`.
    record: file for all that the scheduler is told, token ids included, and decides, for
        `pagedkv simulate replay`.
    tiers: where blocks go that leave the pool, see `TierConfig`; `close` completes what is on disk.
    max_moves: sequences that may be on their way here from other workers at once, see `open_moves`:
        one for a request with one sample, n + 1 for one with n.
    engines: so many start on this machine, and divide by default what one alone would have.

    `engine` is the LLMEngine, `report` what was chosen, `folder` where the model lies, `tier` the
    uppermost one below the pool, or None; `tier.off` says why one is not used any more. The logger
    "pagedkv" gets the report's lines (INFO), and a warning when the native kernels are missing and
    gather does their work.
    Sets torch's number of threads if it is larger than what the container grants, or to
    PAGEDKV_NUM_THREADS.
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
        preallocate: bool = False,
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 512,
        enable_prefix_caching: bool = True,
        attention_backend: str = "auto",
        kernels: str = "auto",
        deterministic: bool = False,
        scheduling: Mapping[str, Any] | None = None,
        public_prefixes: Sequence[Prompt] = (),
        seed: int = 0,
        sanitize: bool = False,
        replay_log: str | Path | None = None,
        decision_log: str | Path | None = None,
        record: str | Path | None = None,
        tiers: TierConfig | None = None,
        max_moves: int = 0,
        engines: int = 1,
    ) -> None:
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise ConfigError(f"dtype={dtype!r}: use one of {', '.join(DTYPES)}")
        check_integer("block_size", block_size, 1)
        check_integer("max_num_seqs", max_num_seqs, 1, MAX_NUM_SEQS)
        check_integer("max_num_batched_tokens", max_num_batched_tokens, 1, 2**31 - 1)
        check_integer("seed", seed, -(2**63))
        check_integer("max_moves", max_moves, 0, MAX_NUM_SEQS)
        check_integer("engines", engines, 1)
        for name, value, low in (
            ("num_blocks", num_blocks, 1),
            ("kv_cache_memory", kv_cache_memory, 0),
            ("max_model_len", max_model_len, 2),
        ):
            if value is not None:
                check_integer(name, value, low)
        check_flag("preallocate", preallocate)
        check_flag("enable_prefix_caching", enable_prefix_caching)
        check_flag("deterministic", deterministic)
        check_flag("sanitize", sanitize)
        sanitize = sanitize or asked_for_by_environment()
        if replay_log is not None and not sanitize:
            raise ConfigError(
                f"replay_log={str(replay_log)!r} is written by the sanitizer: set sanitize=True"
            )
        settings = scheduler_settings({} if scheduling is None else scheduling)
        check_tiers(tiers)
        backend_name, reason = choose_backend(attention_backend)
        if deterministic and backend_name != "native":
            raise ConfigError(
                f"deterministic=True needs the native backend ({reason}): set "
                "attention_backend='native', or deterministic=False"
            )
        layer_kernels = linear_kernels(find_native(kernels, deterministic))
        threads = set_threads()
        loaded = load_model(
            model, DTYPES[dtype], deterministic, device, machine_memory().available, kernels
        )
        config, memory = loaded.config, machine_memory()
        kv_dtype = loaded.decoder.dtype
        if max_model_len is None:
            max_model_len = config.max_position_embeddings
        if max_model_len > config.max_position_embeddings:
            raise ConfigError(
                f"max_model_len={max_model_len} must be from 2 to the model's "
                f"max_position_embeddings={config.max_position_embeddings}"
            )
        one_block = config.kv_spec(1, block_size, kv_dtype)
        block_bytes = stored_block_bytes(backend_name, one_block)
        blocks = pool_blocks(
            block_bytes,
            memory,
            num_blocks=num_blocks,
            kv_cache_memory=kv_cache_memory,
            engines=engines,
        )
        width = min(blocks, -(-max_model_len // block_size))
        limits = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            eos_token_ids=config.eos_token_ids,
            vocab_size=config.vocab_size,
            public_prefixes=read_prefixes(loaded.tokenizer, public_prefixes),
            **settings,
        )
        for i, prefix in enumerate(limits.public_prefixes):
            if len(prefix) < block_size:
                _LOG.warning(
                    "public_prefixes[%d] has %d tokens, no whole block of %d: not shared",
                    i,
                    len(prefix),
                    block_size,
                )
        manager = make_manager(
            limits,
            blocks,
            block_size,
            width,
            memory.available,
            more_rows=max_moves,
            prefix_caching=enable_prefix_caching,
            sanitize=sanitize,
            replay_log=replay_log,
        )
        backend = make_backend(
            backend_name,
            config.kv_spec(blocks, block_size, kv_dtype),
            deterministic=deterministic,
            preallocate=preallocate,
        )
        if manager.sanitizer is not None:
            _LOG.warning("the sanitizer is on: every use of a block is checked, at a price")
            backend = SanitizedBackend(backend, manager.sanitizer)
        tier, lower = None, None
        if tiers is not None:
            computed_by = f"attention {backend_kernels(backend_name)}, layers {layer_kernels}"
            tier, lower = open_tiers(tiers, loaded.decoder, backend.spec, computed_by)
        grammars = model_grammars(loaded.tokenizer, config.vocab_size, config.eos_token_ids)
        executor = ModelExecutor(loaded.decoder, backend, tier, grammars)
        scheduler = Scheduler(manager, limits, lower)
        self.tier = tier
        self._decisions: LineWriter | None = None
        with ExitStack() as opened:  # closed again if one of the files cannot be written
            if tier is not None:
                opened.callback(tier.close)
            self._recorder = None if record is None else Recorder(record, scheduler)
            if decision_log is not None:
                self._decisions = writer = LineWriter(decision_log, DECISIONS, "decision_log")
                scheduler.log.follow(lambda entry: writer.write(entry.line()))
            opened.pop_all()
        core = EngineCore(scheduler, executor, self._recorder, clock=time.perf_counter)
        self.engine = LLMEngine(core, loaded.tokenizer, seed=seed)
        self.report = StartupReport(
            model=str(model),
            dtype=str(kv_dtype).removeprefix("torch."),
            bytes_per_token=block_bytes // block_size,
            block_size=block_size,
            num_blocks=blocks,
            block_bytes=block_bytes,
            max_model_len=max_model_len,
            max_num_seqs=limits.seats,
            memory=memory,
            num_threads=threads,
            backend=backend_name,
            backend_reason=reason,
            linear_kernels=layer_kernels,
            sanitize=sanitize,
            huge_pages=huge_page_mode(),
        )
        for line in self.report.lines():
            _LOG.info("%s", line)
        if attention_backend == "auto" and backend_name != "native":
            _LOG.warning("%s; %s", reason, REBUILD)
        self._num_requests = 0
        self._tokenizer, self.folder = loaded.tokenizer, loaded.path

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's own tokenizer. ModelError if its folder has none."""
        if self._tokenizer is None:
            raise ModelError(f"{self.folder} has no tokenizer: put tokenizer.json there")
        return self._tokenizer

    def explain(self, request_id: str) -> str:
        """Why a request waited or was preempted: see `LLMEngine.explain`."""
        return self.engine.explain(request_id)

    def close(self) -> None:
        """Completes the files that were asked for. Nothing is to be run any more."""
        if self._recorder is not None:
            self._recorder.close()
        else:
            self.engine.core.scheduler.finish()
        if self._decisions is not None:
            self._decisions.close()
        if self.tier is not None:
            self.tier.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tenant: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        ttft_slo: float | None = None,
        tpot_slo: float | None = None,
        deadline: float | None = None,
        on_step: OnStep | None = None,
    ) -> list[RequestOutput]:
        """Runs prompts to their end; results are in the order of the prompts.

        prompts: text, {"prompt": text}, {"prompt_token_ids": [...]}, or a list of these.
        sampling_params: one for all or one a prompt. on_step: see `run`.
        tenant, cache_salt, priority, ttft_slo, tpot_slo, deadline: of all the prompts, see
        `LLMEngine.add_request`; a deadline is a time such as `llm.engine.clock()` gives.
        RequestError names the prompt that cannot run; none of the list has been started then.
        When the call is interrupted its requests are aborted and their blocks released.
        """
        prepared = self.prepare(
            prompts,
            sampling_params,
            tenant=tenant,
            cache_salt=cache_salt,
            priority=priority,
            ttft_slo=ttft_slo,
            tpot_slo=tpot_slo,
            deadline=deadline,
        )
        return self.run(prepared, on_step=on_step)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | Sequence[BeamSearchParams],
        *,
        tenant: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        ttft_slo: float | None = None,
        tpot_slo: float | None = None,
        deadline: float | None = None,
        on_step: OnStep | None = None,
    ) -> list[RequestOutput]:
        """Like `generate`; the outputs of a prompt are its hypotheses, best first, with `score`.

        params: one for all or one a prompt. Nothing is reported before a search has ended. One
        that outgrows the pool even alone gives what it has finished, then its running beams.
        """
        wanted = [params] if isinstance(params, BeamSearchParams) else params
        for given in _listed("params", wanted, "BeamSearchParams, or one for each prompt"):
            if not isinstance(given, BeamSearchParams):
                raise RequestError(f"params must be BeamSearchParams, not {type(given).__name__}")
        prepared = self.prepare(
            prompts,
            params,
            tenant=tenant,
            cache_salt=cache_salt,
            priority=priority,
            ttft_slo=ttft_slo,
            tpot_slo=tpot_slo,
            deadline=deadline,
        )
        return self.run(prepared, on_step=on_step)

    def chat(
        self,
        messages: ChatMessages | Sequence[ChatMessages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tenant: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        ttft_slo: float | None = None,
        tpot_slo: float | None = None,
        deadline: float | None = None,
        on_step: OnStep | None = None,
    ) -> list[RequestOutput]:
        """Like `generate`, for one conversation or several.

        A conversation is a list of {"role": ..., "content": ...}; the model's chat template makes
        the prompt. RequestError if it has none. A content is text, or parts of text, each
        {"type": "text", "text": ...}, which line feeds join.
        """
        conversations = _listed(
            "messages", messages, "a list of {'role': ..., 'content': ...}, or a list of lists"
        )
        if all(isinstance(message, Mapping) for message in conversations):
            conversations = [conversations]
        prompts = [self.engine.chat_prompt(conversation) for conversation in conversations]
        return self.generate(
            prompts,
            sampling_params,
            tenant=tenant,
            cache_salt=cache_salt,
            priority=priority,
            ttft_slo=ttft_slo,
            tpot_slo=tpot_slo,
            deadline=deadline,
            on_step=on_step,
        )

    def prepare(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: AnyParams | Sequence[AnyParams] | None = None,
        *,
        tenant: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        ttft_slo: float | None = None,
        tpot_slo: float | None = None,
        deadline: float | None = None,
    ) -> list[Prepared]:
        """The requests of `generate` or `beam_search`, checked; nothing runs yet.

        RequestError as there.
        """
        if isinstance(prompts, (str, Mapping)):
            prompts = [prompts]
        prompts = _listed("prompts", prompts, _PROMPTS)
        params = sampling_params
        if params is None or isinstance(params, AnyParams):
            params = [params or SamplingParams()] * len(prompts)
        params = _listed("sampling_params", params, "SamplingParams, or one for each prompt")
        if len(params) != len(prompts):
            raise RequestError(f"{len(params)} params for {len(prompts)} prompts: give one each")
        prepared = []
        for i, (prompt, wanted) in enumerate(zip(prompts, params, strict=True)):
            try:
                request_id = f"generate-{self._num_requests + i}"
                prepared.append(
                    self.engine.prepare(
                        request_id,
                        prompt,
                        wanted,
                        tenant=tenant,
                        cache_salt=cache_salt,
                        priority=priority,
                        ttft_slo=ttft_slo,
                        tpot_slo=tpot_slo,
                        deadline=deadline,
                    )
                )
            except RequestError as error:
                if len(prompts) == 1:
                    raise
                raise RequestError(f"prompt {i}: {error}") from error
        self._num_requests += len(prepared)
        return prepared

    def run(
        self, prepared: Sequence[Prepared], *, on_step: OnStep | None = None
    ) -> list[RequestOutput]:
        """Runs prepared requests to their end, and gives up all of them when interrupted.

        `on_step` gets what each step of the engine has brought for them, and the step's numbers
        (None: nothing was computed).
        """
        ids = [request.add.request_id for request in prepared]
        try:
            for request in prepared:
                self.engine.submit(request)
            return self._finish(ids, on_step)
        except SanitizerError:
            raise  # nothing is cleaned up in a state that is not to be trusted
        except BaseException:
            self.engine.cancel(ids)
            raise

    def _finish(self, ids: Sequence[str], on_step: OnStep | None) -> list[RequestOutput]:
        """Steps until the requests have ended; outputs of others are left to the next `step`."""
        engine, mine = self.engine, set(ids)
        finished: dict[str, RequestOutput] = {}
        others: list[RequestOutput] = []
        try:
            while len(finished) < len(ids):
                before = engine.last_stats
                outputs = engine.step()
                others += [output for output in outputs if output.request_id not in mine]
                own = [output for output in outputs if output.request_id in mine]
                finished |= {output.request_id: output for output in own if output.finished}
                if on_step is not None:
                    on_step(own, engine.last_stats if engine.last_stats is not before else None)
        finally:
            engine.put_back(others)
        return [finished[i] for i in ids]


def _listed(name: str, values: object, want: str) -> Sequence[Any]:
    if isinstance(values, (str, bytes, bytearray)) or not isinstance(values, Sequence):
        raise RequestError(f"{name}={values!r:.200} must be {want}")
    return values
