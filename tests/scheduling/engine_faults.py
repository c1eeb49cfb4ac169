"""An executor that goes wrong on demand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from harness import VOCAB

from pagedkv.engine.toy import ToyExecutor
from pagedkv.scheduling.step import Result, Step

FAULTS = ("submit", "collect", "interrupt", "samples", "tokens", "type", "row", "silent")


class Interrupt(BaseException):
    """Stands for Ctrl-C, which would end the test run as well."""


class FaultyExecutor(ToyExecutor):
    """Goes wrong in the next step, in the way that `fault` names, and then no more."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size, VOCAB)
        self.fault: str | None = None
        self.row = 0
        self.step: Step | None = None

    def submit(self, step: Step):
        self.step = step
        if self.fault == "submit":
            self.fault = None
            raise RuntimeError("submit")
        return super().submit(step)

    def collect(self, ticket):
        result = replace(super().collect(ticket), duration=self.duration())
        fault, self.fault = self.fault, None
        if fault == "collect":
            raise RuntimeError("collect")
        if fault == "interrupt":
            raise Interrupt
        return result if fault is None else self.spoiled(fault, result)

    def duration(self) -> float:
        """Of a step: a linear model's, or nonsense."""
        assert self.step is not None
        if self.step.index % 7 == 3:
            return (math.nan, -1.0, 0.0, 1e300)[self.step.index % 4]
        context = int(self.step.context_lens.sum())
        return 1e-3 + 1e-4 * self.step.num_tokens + 1e-6 * context

    def spoiled(self, fault: str, result: Result) -> Result:
        if fault == "samples":
            return replace(result, indptr=result.indptr[:-1])
        if fault == "tokens":
            return replace(result, tokens=np.append(result.tokens, np.int32(VOCAB)))
        if fault == "type":
            return replace(result, tokens=result.tokens.tolist())
        if fault == "row":
            return replace(result, errors={**result.errors, self.row: "row"})
        return replace(  # silent: the first sample draws nothing
            result,
            tokens=result.tokens[1:],
            indptr=np.maximum(result.indptr - 1, 0),
            logprobs=result.logprobs[1:],
        )

    def failing(self, fault: str, step: Step) -> list[int] | None:
        """Rows that the fault ends; None for the whole step."""
        if fault == "row":
            return [self.row]
        if fault == "silent":
            return [step.samples[0].row] if step.samples else []
        return None
