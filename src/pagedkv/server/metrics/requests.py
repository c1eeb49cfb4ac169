"""What requests and steps take, as seen where the core's batches come out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Histogram

from pagedkv.engine.wire import Batch
from pagedkv.scheduling.messages import Add, Delta, Message, StepStats

# Seconds. Those of TTFT and of whole requests reach as far as vLLM's do.
_LATENCIES = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300, 600, 1200, 2560)
_FIRST_TOKEN = (0.001, 0.0025, 0.005, *_LATENCIES)
_BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_PARTS = (1e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5)
_SAMPLES = (1, 2, 5, 10, 20, 50, 100)


@dataclass(slots=True)
class _Live:
    """A request in the core."""

    add: Add
    admitted: float | None = None
    first: float | None = None
    last: dict[int, float] = field(default_factory=dict)  # by sample: its latest token
    tokens: int = 0
    ended: int = 0  # samples

    @property
    def latest(self) -> float | None:
        return max(self.last.values(), default=None)


class RequestMeter:
    """Histograms of requests and steps. clock: that of the requests' arrivals.

    A request that was refused is in none of them. Times end when the front has the tokens.
    """

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._live: dict[str, _Live] = {}

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"pagedkv:{name}", text, registry=registry, buckets=buckets)

        self._ttft = histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN
        )
        self._itl = histogram(
            "inter_token_latency_seconds", "Between two tokens of a sample.", _BETWEEN_TOKENS
        )
        self._e2e = histogram(
            "e2e_request_latency_seconds", "From arrival to the end of a request.", _LATENCIES
        )
        self._queue = histogram(
            "request_queue_time_seconds", "From arrival to the first start.", _FIRST_TOKEN
        )
        self._prefill = histogram(
            "request_prefill_time_seconds", "From the first start to the first token.", _FIRST_TOKEN
        )
        self._decode = histogram(
            "request_decode_time_seconds", "From the first token to the last.", _LATENCIES
        )
        self._prompt = histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._generated = histogram(
            "request_generation_tokens", "Tokens drawn for a request, all samples'.", _TOKENS
        )
        self._n = histogram("request_params_n", "Samples that a request asks for.", _SAMPLES)
        self._max_tokens = histogram(
            "request_params_max_tokens", "max_tokens of requests that give one.", _TOKENS
        )
        self._step_tokens = histogram(
            "iteration_tokens_total", "Tokens that a step computes.", _TOKENS
        )
        self._step_time = Histogram(
            "pagedkv:step_time_seconds",
            "What a step takes, by part: schedule, execute, sample, deliver.",
            ("part",),
            registry=registry,
            buckets=_PARTS,
        )
        self._parts = {
            name: self._step_time.labels(name)
            for name in ("schedule", "execute", "sample", "deliver")
        }

    def sent(self, message: Message) -> None:
        """A message goes to the core."""
        if isinstance(message, Add):
            self._live[message.request_id] = _Live(message)

    def take(self, batch: Batch) -> None:
        """What has come from the core."""
        now = self._clock()
        for delta in batch.deltas:
            live = self._live.get(delta.request_id)
            if live is not None:
                self._take(live, delta, now)
        if batch.stats is not None:
            self._take_step(batch.stats)

    def _take(self, live: _Live, delta: Delta, now: float) -> None:
        live.admitted = delta.admitted_at
        if delta.token_ids:
            live.tokens += len(delta.token_ids)
            if live.first is None:
                live.first = now
                self._ttft.observe(now - live.add.arrival)
            before = live.last.get(delta.sample)
            if before is not None:
                each = (now - before) / len(delta.token_ids)
                for _ in delta.token_ids:
                    self._itl.observe(each)
            live.last[delta.sample] = now
        live.ended += delta.finish_reason is not None
        if live.ended == live.add.params.n or delta.usage is not None:
            del self._live[delta.request_id]
            if delta.usage is not None:
                self._end(live, now)

    def _end(self, live: _Live, now: float) -> None:
        add, admitted, first, latest = live.add, live.admitted, live.first, live.latest
        self._e2e.observe(now - add.arrival)
        self._prompt.observe(len(add.prompt))
        self._generated.observe(live.tokens)
        self._n.observe(add.params.n)
        if add.params.max_tokens is not None:
            self._max_tokens.observe(add.params.max_tokens)
        if admitted is not None:
            self._queue.observe(admitted - add.arrival)
        if first is not None and latest is not None:
            self._decode.observe(latest - first)
            if admitted is not None:
                self._prefill.observe(first - admitted)

    def _take_step(self, stats: StepStats) -> None:
        self._step_tokens.observe(stats.num_tokens)
        self._parts["schedule"].observe(stats.schedule_seconds)
        self._parts["execute"].observe(stats.execute_seconds)
        self._parts["sample"].observe(stats.sample_seconds)
        self._parts["deliver"].observe(stats.deliver_seconds)
