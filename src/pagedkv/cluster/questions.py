"""Questions that several workers are asked at once, and the one answer to each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from pagedkv.cluster.pictures import join_pictures
from pagedkv.engine.wire import Answer, Ask


def _join_texts(texts: Mapping[str, str]) -> str:
    return "\n\n".join(f"worker {worker}: {text}" for worker, text in texts.items())


_JOIN: Mapping[str, Callable[[Mapping[str, Any]], Any]] = MappingProxyType(
    {"pool": join_pictures, "explain": _join_texts}
)


@dataclass(slots=True)
class _Asked:
    ask: Ask
    waits_for: set[str]
    values: dict[str, Any] = field(default_factory=dict)
    error: str = "no worker is there"


class Questions:
    """Answers are put together, those of workers that know nothing left out. answer: is told."""

    def __init__(self, answer: Callable[[Answer], None]) -> None:
        self._answer = answer
        self._numbers = itertools.count()
        self._asked: dict[int, _Asked] = {}

    def put(self, ask: Ask, workers: Sequence[str]) -> list[tuple[str, Ask]]:
        """What each worker is to be asked."""
        if ask.kind not in _JOIN:
            self._answer(Answer(ask.id, error=f"nothing is known of {ask.kind!r:.100}"))
            return []
        number = next(self._numbers)
        self._asked[number] = _Asked(ask, set(workers))
        self._settle(number)
        return [(worker, Ask(number, ask.kind, ask.argument)) for worker in workers]

    def answered(self, worker: str, answer: Answer) -> None:
        """One of them has answered."""
        asked = self._asked.get(answer.id)
        if asked is not None:
            if answer.error is None:
                asked.values[worker] = answer.value
            else:
                asked.error = answer.error
            asked.waits_for.discard(worker)
            self._settle(answer.id)

    def lost(self, worker: str) -> None:
        """One of them answers nothing more."""
        for number, asked in list(self._asked.items()):
            if worker in asked.waits_for:
                asked.error = f"worker {worker} is gone"
                asked.waits_for.discard(worker)
                self._settle(number)

    def _settle(self, number: int) -> None:
        asked = self._asked[number]
        if asked.waits_for:
            return
        del self._asked[number]
        if asked.values:
            self._answer(Answer(asked.ask.id, _JOIN[asked.ask.kind](asked.values)))
        else:
            self._answer(Answer(asked.ask.id, error=asked.error))
