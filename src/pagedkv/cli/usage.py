"""What a run used, and what contiguous reservation would have used instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from pagedkv.engine.output import RequestOutput
from pagedkv.scheduling.messages import StepStats


@dataclass(slots=True)
class Meter:
    """Adds up the numbers of all steps."""

    block_size: int
    blocks_peak: int = 0
    preemptions: int = 0
    slots_filled: int = 0  # sums over steps
    slots_in_blocks: int = 0
    slots_unshared: int = 0
    slots_reserved: int = 0
    shared_spans: int = 0

    def add(self, stats: StepStats) -> None:
        self.blocks_peak = max(self.blocks_peak, stats.blocks_peak)
        self.preemptions += stats.num_preempted
        self.slots_filled += stats.slots_filled
        self.slots_in_blocks += stats.blocks_peak * self.block_size
        self.slots_unshared += stats.slots_unshared
        self.slots_reserved += stats.slots_reserved
        self.shared_spans += stats.shared_spans

    @property
    def waste_paged(self) -> float:
        """Share of the held slots that hold no token, averaged over steps by size."""
        return _waste(self.slots_filled, self.slots_in_blocks)

    @property
    def waste_contiguous(self) -> float:
        """The same, had each sample reserved max_model_len slots of its own on admission."""
        return _waste(self.slots_unshared, self.slots_reserved)


@dataclass(frozen=True, slots=True)
class Usage:
    """Totals of a run; times in seconds, waste as shares from 0 to 1."""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    seconds: float
    tokens_per_second: float
    ttft_mean: float | None
    ttft_max: float | None
    blocks_peak: int
    num_blocks: int
    preemptions: int
    waste_paged: float
    waste_contiguous: float
    shared_spans: int

    @classmethod
    def of(
        cls, outputs: Sequence[RequestOutput], meter: Meter, num_blocks: int, seconds: float
    ) -> Usage:
        generated = sum(len(sample.token_ids) for o in outputs for sample in o.outputs)
        ttfts = [o.metrics.ttft for o in outputs if o.metrics.ttft is not None]
        return cls(
            requests=len(outputs),
            prompt_tokens=sum(len(o.prompt_token_ids) for o in outputs),
            cached_tokens=sum(o.num_cached_tokens for o in outputs),
            generated_tokens=generated,
            seconds=seconds,
            tokens_per_second=generated / seconds if seconds > 0 else 0.0,
            ttft_mean=sum(ttfts) / len(ttfts) if ttfts else None,
            ttft_max=max(ttfts, default=None),
            blocks_peak=meter.blocks_peak,
            num_blocks=num_blocks,
            preemptions=meter.preemptions,
            waste_paged=meter.waste_paged,
            waste_contiguous=meter.waste_contiguous,
            shared_spans=meter.shared_spans,
        )

    def table(self, max_model_len: int) -> Table:
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        cached = f" ({self.cached_tokens:,} from the prefix cache)" if self.cached_tokens else ""
        rows = [
            ("prompt tokens", f"{self.prompt_tokens:,}{cached}"),
            ("generated tokens", f"{self.generated_tokens:,}"),
            ("tokens/s", f"{self.tokens_per_second:.1f}"),
            ("TTFT", self._ttft()),
            ("blocks held at peak", f"{self.blocks_peak:,} of {self.num_blocks:,}"),
            ("KV waste, paged", f"{self.waste_paged:.1%}"),
            (f"KV waste, {max_model_len:,} slots reserved", f"{self.waste_contiguous:.1%}"),
        ]
        if self.shared_spans:
            rows.append(("KV spans read once for several rows", f"{self.shared_spans:,}"))
        if self.preemptions:
            rows.insert(5, ("preemptions", f"{self.preemptions:,}"))
        for name, value in rows:
            table.add_row(name, value)
        return table

    def _ttft(self) -> str:
        if self.ttft_mean is None or self.ttft_max is None:
            return "no token"
        mean = f"{self.ttft_mean * 1000:.0f} ms"
        if self.requests == 1:
            return mean
        return f"{mean} mean, {self.ttft_max * 1000:.0f} ms max"


def _waste(filled: int, held: int) -> float:
    return 1.0 - filled / held if held else 0.0
