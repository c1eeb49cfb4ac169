"""A recorded run again: the same loop, scheduler and block manager, without the model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pagedkv.cache import BlockManager, Misuse, SanitizerError
from pagedkv.engine.core import EngineCore
from pagedkv.engine.json_lines import read_lines
from pagedkv.engine.recording import POOL, RECORDING
from pagedkv.engine.values import from_json
from pagedkv.errors import ConfigError
from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.decisions import STEP, Decision
from pagedkv.scheduling.messages import Abort, Add, Drain, Message, Resume
from pagedkv.scheduling.scheduler import Scheduler
from pagedkv.scheduling.step import Result, Step, Ticket
from pagedkv.scheduling.tiering import LowerTiers
from pagedkv.tiers.names import BlockName, Namer

_MESSAGES = {kind.__name__: kind for kind in (Add, Abort, Drain, Resume)}
Observer = Callable[[float, Step, Result], None]


class Difference(NamedTuple):
    """The first entry in which the decision logs differ; None: one has ended there.

    line: of the recording, where its entry stands, or after which it is missing.
    """

    line: int
    recorded: str | None
    replayed: str | None


@dataclass(slots=True)
class ReplayedRun:
    """What a replay has come to. difference: None if every decision was the recorded one.

    cut_off: the recording was not closed, as of a run that was killed.
    """

    num_steps: int = 0
    num_requests: int = 0
    num_decisions: int = 0  # compared, those of steps among them
    difference: Difference | None = None
    cut_off: bool = False


class _Interrupted(BaseException):
    """Stands for an interrupt that was recorded."""

    def __repr__(self) -> str:
        return str(self)


class _EndOfRecording(BaseException):
    """The recorded run was killed in the middle of a step."""


class RecordedExecutor:
    """An Executor that gives back what was recorded: `outcome`, of the step planned at `now`."""

    def __init__(self, observe: Observer | None = None) -> None:
        self.outcome: Result | BaseException | None = None
        self.now = 0.0
        self._observe = observe
        self._step: Step | None = None

    def submit(self, step: Step) -> Ticket:
        self._step = step
        return Ticket(step.index)

    def collect(self, ticket: Ticket) -> Result:
        outcome, self.outcome = self.outcome, None
        if outcome is None:
            raise _EndOfRecording
        if isinstance(outcome, BaseException):
            raise outcome
        if self._observe is not None and self._step is not None:
            self._observe(self.now, self._step, outcome)
        return outcome


class RecordedBelow:
    """Lower tiers that say they have what was recorded. `answers`: to the looks of a plan."""

    def __init__(self) -> None:
        self.answers = deque[list[bool]]()

    def contains(self, names: Sequence[BlockName]) -> list[bool]:
        if not self.answers:
            raise _EndOfRecording
        found = self.answers.popleft()
        # Of another length only after a decision that differs, which is found when all is compared.
        return [i < len(found) and found[i] for i in range(len(names))]


@dataclass(slots=True)
class _Iteration:
    """What was recorded from one look at the clock to the next. now: None before the first."""

    line: int  # its last one
    now: float | None = None
    messages: list[Message] = field(default_factory=list)
    found: list[list[bool]] = field(default_factory=list)
    # After the step: a request that was released and when, or None: the cached prefixes went.
    between: list[tuple[str, float] | None] = field(default_factory=list)
    outcome: Result | BaseException | None = None
    decisions: list[tuple[int, str]] = field(default_factory=list)
    end: bool = False  # the run was closed
    cut_off: bool = False  # the last one of a run that was not


def replay_run(path: Path, observe: Observer | None = None) -> ReplayedRun:
    """Replays a recording up to the first decision that differs.

    observe: told of the `now` of every step, the step, and its recorded Result. ConfigError names
    the line of the file that cannot be read. A run that was killed is replayed as far as it goes.
    """
    lines = read_lines(path, RECORDING)
    number, settings = next(lines, (2, {}))
    executor, below = RecordedExecutor(observe), RecordedBelow()
    with _line(path, number):
        core = _core(settings, executor, below)
    run, produced = ReplayedRun(), deque[Decision]()
    core.scheduler.log.follow(produced.append)
    for iteration in _iterations(path, lines):
        with _line(path, iteration.line):
            _iterate(core, executor, below, iteration)
        run.cut_off = iteration.cut_off
        run.num_requests += sum(
            isinstance(message, (Add, Resume)) for message in iteration.messages
        )
        for line, recorded in iteration.decisions:
            entry = produced.popleft() if produced else None
            replayed = None if entry is None else entry.line()
            if recorded != replayed:
                run.difference = Difference(line, recorded, replayed)
                return run
            run.num_decisions += 1
            run.num_steps += entry is not None and entry.kind == STEP
        if produced and not iteration.cut_off:
            run.difference = Difference(iteration.line, None, produced[0].line())
            return run
    return run


def _iterate(
    core: EngineCore, executor: RecordedExecutor, below: RecordedBelow, iteration: _Iteration
) -> None:
    """Runs one iteration. ValueError: what was recorded of it cannot be run."""
    if iteration.now is not None:
        for message in iteration.messages:
            core.send(message)
        executor.outcome, executor.now = iteration.outcome, iteration.now
        below.answers = deque(iteration.found)
        try:
            core.step(iteration.now)
        except (_Interrupted, SanitizerError):
            pass  # recorded as well
        except _EndOfRecording:
            if not iteration.cut_off:
                raise ValueError("the step has no result, or its plan no look below") from None
    for released in iteration.between:
        if released is None:
            core.reset_prefix_cache()
        else:
            core.release(*released)
    if iteration.end:
        core.scheduler.finish()


def _core(settings: dict[str, Any], executor: RecordedExecutor, below: RecordedBelow) -> EngineCore:
    given = settings["settings"]
    config = from_json(SchedulerConfig, given["scheduler"])
    manager = BlockManager(**{name: given["pool"][name] for name in POOL})
    size = given["tier_block_bytes"]
    lower = None if size is None else LowerTiers(below, Namer(b""), from_json(int, size))
    return EngineCore(Scheduler(manager, config, lower), executor)


def _iterations(path: Path, lines: Iterator[tuple[int, dict[str, Any]]]) -> Iterator[_Iteration]:
    """The recording, iteration by iteration."""
    current = _Iteration(1)
    for number, values in lines:
        if "at" in values or "end" in values:
            yield current
            current = _Iteration(number, end="end" in values)
        current.line = number
        with _line(path, number):
            _take(current, values)
    current.cut_off = not current.end
    yield current


def _take(iteration: _Iteration, values: dict[str, Any]) -> None:
    """One line. ValueError, KeyError: it is none that a Recorder writes."""
    if "kind" in values:
        iteration.decisions.append((iteration.line, Decision.of(values).line()))
        return
    (name,) = values
    value = values[name]
    if name == "at":
        iteration.now = from_json(float, value)
    elif name in _MESSAGES:
        iteration.messages.append(from_json(_MESSAGES[name], value))
    elif name == "found":
        iteration.found.append([bool(there) for there in from_json(list[bool], value)])
    elif name == "reset_cache":
        iteration.between.append(None)
    elif name == "release":
        iteration.between.append((from_json(str, value["id"]), from_json(float, value["now"])))
    elif name == "result":
        iteration.outcome = from_json(Result, value)
    elif name == "failure":
        iteration.outcome = _failure(value)
    elif name != "end":
        raise ValueError(f"{name!r:.100} is nothing that is recorded")


def _failure(recorded: dict[str, str]) -> BaseException:
    """What leads to the same message as the error that was recorded."""
    kind, name, text = (from_json(str, recorded[key]) for key in ("kind", "type", "text"))
    if kind == "sanitizer":
        return SanitizerError(next(iter(Misuse)), text, None, None, None)
    if kind == "interrupt":
        return _Interrupted(text)
    error: Exception = type(name, (Exception,), {})(text)  # messages have the type's name
    return error


@contextmanager
def _line(path: Path, number: int) -> Iterator[None]:
    """Says which line of the file is wrong."""
    try:
        yield
    except (KeyError, TypeError, ValueError, OverflowError, MemoryError) as error:
        text = str(error) if isinstance(error, ValueError) else repr(error)
        raise ConfigError(f"{path}, line {number}: {text}") from error
