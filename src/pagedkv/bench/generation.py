"""An engine in this process under requests that are all submitted at once."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pagedkv.bench.process import CoreMeter, peak_memory, reset_peak
from pagedkv.bench.prompts import Job, Workload
from pagedkv.bench.rounds import percentile
from pagedkv.engine.llm import LLM
from pagedkv.engine.output import RequestOutput
from pagedkv.errors import RequestError
from pagedkv.scheduling.messages import StepStats
from pagedkv.scheduling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Run:
    """Requests from their submission to their last token. Times in seconds.

    gaps: between tokens of one request, of all requests. all_started: when the last request had
    its first token; tokens_since: those that came later, of all requests.
    """

    seconds: float
    ttfts: tuple[float, ...]
    gaps: tuple[float, ...]
    all_started: float
    tokens_since: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    steps: int
    preemptions: int

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Once all had started; None where every request wanted one token only."""
        rest = self.seconds - self.all_started
        return self.tokens_since / rest if self.tokens_since and rest > 0 else None

    @property
    def prefill_tokens_per_second(self) -> float:
        """Until all had started."""
        return (self.prompt_tokens - self.cached_tokens) / self.all_started


@dataclass(frozen=True, slots=True)
class Throughput:
    """A run, the peak of this process's memory in it, and processors busy on average."""

    run: Run
    peak_rss_bytes: int
    cores_used: float


def measure_throughput(llm: LLM, jobs: Sequence[Job]) -> Throughput:
    """Runs the jobs once, after a short request that wakes threads and maps memory."""
    run_jobs(llm, [Job(jobs[0].prompt[-1:], 2)])
    reset_peak()
    meter = CoreMeter()
    run = run_jobs(llm, jobs)
    return Throughput(run, peak_memory(), meter.cores())


def measure_latency(
    llm: LLM, workload: Workload, *, warmup: int, iterations: int, seed: int = 0
) -> list[Run]:
    """The runs that count, each with prompts of its own, so that none finds another's cached."""
    vocabulary = plain_tokens(llm)
    rngs = np.random.default_rng(seed).spawn(warmup + iterations)
    runs = [run_jobs(llm, workload.jobs(vocabulary, rng)) for rng in rngs]
    return runs[warmup:]


def run_jobs(llm: LLM, jobs: Sequence[Job]) -> Run:
    """All at once, greedy, each to its full length. RequestError if one of them fails."""
    prepared = llm.prepare(
        [{"prompt_token_ids": job.prompt} for job in jobs],
        [SamplingParams(temperature=0, max_tokens=job.output_len, ignore_eos=True) for job in jobs],
    )
    watch = _Watch()
    start = time.perf_counter()
    outputs = llm.run(prepared, on_step=watch)
    end = time.perf_counter()
    for output, job in zip(outputs, jobs, strict=True):
        sample = output.outputs[0]
        if len(sample.token_ids) != job.output_len:
            raise RequestError(
                f"{output.request_id} ended with {sample.finish_reason} after "
                f"{len(sample.token_ids)} of {job.output_len} tokens: {sample.error}"
            )
    firsts = [times[0] - start for times in watch.times.values()]
    started = max(firsts)
    return Run(
        seconds=end - start,
        ttfts=tuple(firsts),
        gaps=tuple(watch.gaps()),
        all_started=started,
        tokens_since=sum(
            time - start > started for times in watch.times.values() for time in times
        ),
        prompt_tokens=sum(len(job.prompt) for job in jobs),
        cached_tokens=sum(output.num_cached_tokens for output in outputs),
        output_tokens=sum(job.output_len for job in jobs),
        steps=watch.steps,
        preemptions=watch.preemptions,
    )


class _Watch:
    """When each token of each request came."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}
        self.steps = self.preemptions = 0

    def __call__(self, outputs: Sequence[RequestOutput], stats: StepStats | None) -> None:
        now = time.perf_counter()
        for output in outputs:
            times = self.times.setdefault(output.request_id, [])
            times += [now] * (len(output.outputs[0].token_ids) - len(times))
        if stats is not None:
            self.steps += 1
            self.preemptions += stats.num_preempted

    def gaps(self) -> Iterator[float]:
        for times in self.times.values():
            yield from np.diff(times).tolist()


def plain_tokens(llm: LLM) -> list[int]:
    """Ids that begin or end nothing: all but the special ones."""
    tokenizer = llm.get_tokenizer()
    special = set(tokenizer.all_special_ids)
    return [token for token in range(tokenizer.vocab_size) if token not in special]


def spread(seconds: Sequence[float]) -> dict[str, float] | None:
    """Median, P90 and P99 in ms; None of nothing."""
    if not seconds:
        return None
    return {f"p{percent}_ms": percentile(seconds, percent) * 1e3 for percent in (50, 90, 99)}
