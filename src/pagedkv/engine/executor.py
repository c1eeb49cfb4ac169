"""The executor that runs a real model: plan once, forward, sample."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
import torch

from pagedkv.attention.interface import AttentionBackend, AttentionBatch, KVSpec
from pagedkv.engine.grammar import Grammars
from pagedkv.engine.sampler import draw_all, log_softmax, score_token
from pagedkv.engine.transfers import Mover
from pagedkv.models.decoder import Decoder
from pagedkv.models.fingerprint import model_digest
from pagedkv.scheduling.step import (
    Float32,
    Int32,
    Int64,
    PromptScore,
    Result,
    Step,
    TableMirror,
    Ticket,
)
from pagedkv.scheduling.step import TokenLogprobs as Scored
from pagedkv.tiers.interface import Tier, UInt8

# Rows whose log-softmax is computed at a time: bounds the float64 scratch, not the result.
_SCORE_ROWS = 32
# Rows of logits whose memory is kept: more are wanted by prompts that are scored, now and then.
_KEPT_ROWS = 256


class ModelExecutor:
    """Owns the decoder and, through the backend, the K/V tensors. One step is in flight.

    `submit` takes the changed table rows at once, so that they are not lost if the step fails;
    `collect` does the work and raises whatever made the step as a whole fail. A step that was
    never collected, as after an interrupt, is dropped by the next `submit`.
    tier: the uppermost one below the device; None for none. grammars: what outputs of a form are
    drawn with; None: the model has no tokenizer.
    """

    def __init__(
        self,
        decoder: Decoder,
        backend: AttentionBackend,
        tier: Tier | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self._decoder, self._backend, self._grammars = decoder, backend, grammars
        self.payloads = BackendPayloads(backend)
        self._mover = None if tier is None else Mover(self.payloads, tier)
        self._mirror = TableMirror()
        self._pending: tuple[Step, AttentionBatch] | None = None
        self._logits = torch.empty(0, decoder.config.vocab_size)
        self._best = torch.empty(0, dtype=torch.int64)  # of each row

    @property
    def spec(self) -> KVSpec:
        """The shape of the K/V store."""
        return self._backend.spec

    def model_digest(self) -> bytes:
        """What K/V depend on beside the tokens and `spec`. Reads every weight once."""
        return model_digest(self._decoder)

    def submit(self, step: Step) -> Ticket:
        tables = self._mirror.apply(step, self._backend.spec.block_size)
        batch = AttentionBatch(step.query_lens, step.context_lens, tables, step.slots, step.seqs)
        self._pending = step, batch
        return Ticket(step.index)

    def collect(self, ticket: Ticket) -> Result:
        if self._pending is None or self._pending[0].index != ticket:
            raise RuntimeError(f"step {ticket} is not in flight")
        (step, batch), self._pending = self._pending, None
        transfers = () if self._mover is None else self._mover.store(step)
        if len(step.copies):
            self._backend.copy_blocks(step.copies)
        if self._mover is not None:
            transfers += self._mover.load(step)
        if not step.num_tokens:
            none = np.zeros(0, np.int32)
            return Result(none, np.zeros(1, np.int32), none, transfers=transfers)
        start = time.perf_counter()
        plan = self._backend.plan(batch)
        wanted = _Wanted.of(step)
        rows = len(wanted.tokens)
        if rows > len(self._best):
            self._best = torch.empty(2 * rows, dtype=torch.int64)
        logits = self._decoder.forward(
            torch.from_numpy(step.tokens),
            torch.from_numpy(step.positions),
            self._backend,
            plan,
            torch.from_numpy(wanted.tokens),
            self._room(rows),
            self._best,
        )
        sampling = time.perf_counter()
        draws = draw_all(
            logits, wanted.drawn, step.samples, self._grammars, self._best, wanted.plain
        )
        scores = tuple(
            _score_prompt(score, logits, first)
            for score, first in zip(step.prompt_scores, wanted.scored, strict=True)
        )
        end = time.perf_counter()
        bounds = np.arange(len(step.samples) + 1, dtype=np.int32)
        if draws.errors:
            bounds -= np.searchsorted(list(draws.errors), bounds).astype(np.int32)
        return Result(
            tokens=draws.tokens,
            indptr=bounds,
            parents=wanted.rows,
            logprobs=draws.logprobs,
            prompt_logprobs=scores,
            complete=draws.complete,
            errors={step.samples[i].row: why for i, why in draws.errors.items()},
            duration=end - start,
            shared_spans=plan.num_shared_spans,
            transfers=transfers,
            sample_duration=end - sampling,
        )

    def _room(self, rows: int) -> torch.Tensor | None:
        """Memory for the logits of so many rows, kept from step to step; None: too many."""
        if rows > _KEPT_ROWS:
            return None
        if rows > len(self._logits):
            self._logits = torch.empty(min(2 * rows, _KEPT_ROWS), self._logits.shape[1])
        return self._logits


class BackendPayloads:
    """The blocks of an attention backend as bytes, in the canonical layout."""

    def __init__(self, backend: AttentionBackend) -> None:
        self._backend = backend

    def read(self, blocks: Int32) -> UInt8:
        data = self._backend.read_blocks(blocks).cpu().contiguous().view(torch.uint8)
        payloads: UInt8 = data.numpy().reshape(len(blocks), -1)
        return payloads

    def copy(self, copies: Int32) -> None:
        self._backend.copy_blocks(copies)

    def write(self, blocks: Int32, data: UInt8) -> None:
        spec = self._backend.spec
        shape = (spec.num_layers, 2, spec.block_size, spec.num_kv_heads, spec.head_dim)
        values = torch.from_numpy(data).view(spec.dtype).reshape(len(blocks), *shape)
        self._backend.write_blocks(blocks, values)


class _Wanted(NamedTuple):
    """Tokens of a step whose logits are sampled or scored, and where among them each stands."""

    rows: Int32  # of each sample
    tokens: Int64  # indices into the step's tokens, ascending
    drawn: Int64  # place in `tokens` of each sample's last token
    scored: list[int]  # and of the first token of each prompt score
    plain: bool  # whether every sample takes the best token

    @classmethod
    def of(cls, step: Step) -> _Wanted:
        rows = np.array([sample.row for sample in step.samples], np.int32)
        ends = step.query_lens.cumsum(dtype=np.int64)
        lasts = ends[rows]
        lasts -= 1
        plain = all(sample.best for sample in step.samples)
        each = np.arange(len(step.seqs))
        if not step.prompt_scores and np.array_equal(rows, each):
            return cls(rows, lasts, each, [], plain)
        starts = (ends - step.query_lens)[[score.row for score in step.prompt_scores]]
        scored = [
            np.arange(start, start + len(score.targets))
            for start, score in zip(starts.tolist(), step.prompt_scores, strict=True)
        ]
        tokens = np.unique(np.concatenate([lasts, *scored]))
        drawn = np.searchsorted(tokens, lasts)
        return cls(rows, tokens, drawn, np.searchsorted(tokens, starts).tolist(), plain)


def _score_prompt(score: PromptScore, logits: torch.Tensor, first: int) -> tuple[Scored, ...]:
    """first: row of the logits that belongs to the first target."""
    host: Float32 = logits.cpu().numpy()
    entries: list[Scored] = []
    for start in range(0, len(score.targets), _SCORE_ROWS):
        targets = score.targets[start : start + _SCORE_ROWS].tolist()
        rows = log_softmax(host[first + start : first + start + len(targets)])
        entries += [
            score_token(row, token, score.top) for row, token in zip(rows, targets, strict=True)
        ]
    return tuple(entries)
