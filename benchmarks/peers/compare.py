"""Engines in turn: every round runs every workload once in each, in another order each round."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from peers.engines import EngineDied, EngineProcess, Setting
from peers.workloads import Workload, marked

# Threads that wait actively for more work, as those of OpenMP do for a while, have gone to sleep.
SETTLE_SECONDS = 0.4
# A setting that takes so many times as long as its engine's best in the warm-up runs no more.
HOPELESS = 1.5

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Run:
    """One workload, once.

    others_cpu: CPU seconds that all other engines used meanwhile. alike: share of the output tokens
    that are those of the first engine, up to a request's first difference; None: it has failed.
    """

    seconds: float
    peak_bytes: int
    cpu_seconds: float
    others_cpu: float
    alike: float | None


@dataclass(slots=True)
class Comparison:
    """runs[workload][setting]: one a round. failed: settings that gave up, and why."""

    runs: dict[str, dict[Setting, list[Run]]] = field(default_factory=dict)
    failed: dict[Setting, str] = field(default_factory=dict)

    def best(self, workload: str, engine: str) -> Setting | None:
        """The fastest setting of an engine, by the median; None: it has no complete runs."""
        all_runs = self.runs.get(workload, {})
        rounds = max(map(len, all_runs.values()), default=0)
        complete = [
            setting
            for setting, runs in all_runs.items()
            if setting.engine == engine and len(runs) == rounds and setting not in self.failed
        ]
        return min(complete, key=lambda setting: self.seconds(workload, setting), default=None)

    def seconds(self, workload: str, setting: Setting) -> float:
        return statistics.median(run.seconds for run in self.runs[workload][setting])

    def peak_bytes(self, workload: str, setting: Setting) -> int | None:
        """The most memory of all rounds; None: it has no runs."""
        runs = self.runs[workload].get(setting, [])
        return max((run.peak_bytes for run in runs), default=None)

    def leanest(self, workload: str) -> int | None:
        """The least that a setting has taken; None: none has run."""
        peaks = (self.peak_bytes(workload, setting) for setting in self.runs[workload])
        return min((peak for peak in peaks if peak is not None), default=None)

    def ratio(self, workload: str, ours: Setting, other: Setting) -> float:
        """How many times as fast ours is: the median over rounds, each with its own ratio."""
        pairs = zip(self.runs[workload][ours], self.runs[workload][other], strict=True)
        return statistics.median(theirs.seconds / mine.seconds for mine, theirs in pairs)

    @property
    def engines(self) -> list[str]:
        every = [setting.engine for runs in self.runs.values() for setting in runs]
        return list(dict.fromkeys(every))


def compare(
    engines: Sequence[EngineProcess],
    workloads: Mapping[str, Workload],
    rounds: int,
    say: Say,
    between: Callable[[], None] = lambda: None,
    settle: float = SETTLE_SECONDS,
) -> Comparison:
    """Runs `rounds` rounds after one that warms up.

    between: called before every round but the first. settle: seconds to wait before each run.

    An engine that dies, or gives outputs of a wrong length, is left out from there on.
    """
    result = Comparison({name: {} for name in workloads})
    hopeless: set[tuple[str, Setting]] = set()
    for turn in range(rounds + 1):
        if turn:
            between()
        for number, workload in enumerate(workloads.values()):
            requests = marked(workload, turn * len(workloads) + number)
            answers: dict[Setting, dict[str, Any]] = {}
            for engine in in_order(engines, turn):
                setting = engine.setting
                skipped = (workload.name, setting) in hopeless or setting in result.failed
                if skipped or not setting.runs(workload.name):
                    continue
                others = [other for other in engines if other is not engine]
                time.sleep(settle)
                before = sum(other.cpu_seconds() for other in others)
                try:
                    answer = engine.run(workload.name, requests)
                except (EngineDied, ValueError) as error:
                    result.failed[setting] = str(error)
                    say(f"{setting} in {workload.name}: {error}")
                    continue
                answer["others_cpu"] = sum(other.cpu_seconds() for other in others) - before
                answers[setting] = answer
                say(f"round {turn} {workload.name} {setting}: {answer['seconds']:.2f} s")
            if turn:
                for setting, run in as_runs(answers, engines[0].setting).items():
                    result.runs[workload.name].setdefault(setting, []).append(run)
            else:
                taken = {setting: answer["seconds"] for setting, answer in answers.items()}
                hopeless |= {(workload.name, setting) for setting in slow(taken)}
    return result


def in_order(engines: Sequence[EngineProcess], turn: int) -> list[EngineProcess]:
    """Every second round runs backwards, and the next begins with another engine."""
    first = turn // 2 % len(engines)
    order = [*engines[first:], *engines[:first]]
    return order[::-1] if turn % 2 else order


def slow(taken: Mapping[Setting, float]) -> list[Setting]:
    """Settings that are far from the best of their engine."""
    best: dict[str, float] = {}
    for setting, seconds in taken.items():
        best[setting.engine] = min(seconds, best.get(setting.engine, seconds))
    return [s for s, seconds in taken.items() if seconds > HOPELESS * best[s.engine]]


def as_runs(answers: Mapping[Setting, Mapping[str, Any]], first: Setting) -> dict[Setting, Run]:
    """What engines have answered to the same requests."""
    reference = answers[first]["tokens"] if first in answers else None
    return {
        setting: Run(
            answer["seconds"],
            answer["peak_bytes"],
            answer["cpu_seconds"],
            answer["others_cpu"],
            None if reference is None else alike(answer["tokens"], reference),
        )
        for setting, answer in answers.items()
    }


def alike(tokens: list[list[int]], reference: list[list[int]]) -> float:
    """Share of output tokens that come before the first difference of their request."""
    equal = 0
    for given, wanted in zip(tokens, reference, strict=True):
        for one, other in zip(given, wanted, strict=True):
            if one != other:
                break
            equal += 1
    return equal / sum(map(len, reference))
