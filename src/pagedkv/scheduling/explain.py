"""The decision log in words: why a request waited, was preempted, or ended."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from pagedkv.errors import RequestError
from pagedkv.scheduling.decisions import WAIT, Decision

_BEGINNINGS = ("arrive", "resume", "refuse")
_LIMITS = {
    "budget": "that was what the step's budget had left",
    "share": "half of the step was left to others who wait for their first token",
    "slack": "more would have made running requests late",
}
_RULES = {
    "first_chunk": "its first chunk and this step's rows take",
    "prompt": "its known tokens, beside what the running requests still need, take",
    "max_tokens": "it and all that run would take, at their max_tokens,",
    "expected_peak": "it and all that run are expected to take, at most,",
}


def explain(log: Iterable[Decision], name: str, num_dropped: int = 0) -> str:
    """What happened to a request and why, one line an event, times since its arrival.

    name: as the log has it, or without the `#number`s that were added to make it unique; all
    requests of that name are told of. num_dropped: entries that the log does not have any more.
    RequestError: it has none of such a request.
    """
    stories: list[list[Decision]] = []
    shortages: list[int] = []  # steps
    last: dict[str, list[Decision]] = {}
    for entry in log:
        if entry.kind == "preempt":
            shortages.append(entry.step)
        if not entry.request or not f"{entry.request}#".startswith(f"{name}#"):
            continue
        if entry.kind in _BEGINNINGS or entry.request not in last:
            last[entry.request] = []
            stories.append(last[entry.request])
        last[entry.request].append(entry)
    if not stories:
        gone = f", or its entries are among the {num_dropped:,} that have fallen out of the log"
        raise RequestError(
            f"request {name!r:.200} is not in the decision log: no request had this name"
            + (f"{gone} (decision_log keeps more, a file keeps all)" if num_dropped else "")
        )
    return "\n\n".join(_tell(story, shortages) for story in stories)


def describe(entry: Decision) -> str:
    """One entry in words. ValueError: a number is missing, or is none."""
    try:
        return _WORDS.get(entry.kind, _other)(entry, entry.numbers)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"the numbers of {entry.kind!r:.40} are not what it has ({error!r:.100})"
        ) from error


def _tell(story: Sequence[Decision], shortages: Sequence[int]) -> str:
    start = story[0].now
    lines = [f"request {story[0].request}"]
    if story[0].kind not in _BEGINNINGS:
        lines.append("  what was before this has fallen out of the log")
    for _, group in groupby(story, key=_chapter):
        entries = list(group)
        text = describe(entries[0]) if len(entries) == 1 else _chunks(entries)
        lines.append(f"{entries[0].now - start:9.3f} s  {text}")
    return "\n".join([*lines, *_summary(story, shortages)])


def _chapter(entry: Decision) -> object:
    """Consecutive chunks that were limited by the same are told in one line."""
    return ("chunk", entry.numbers.get("limit")) if entry.kind == "chunk" else id(entry)


def _chunks(entries: Sequence[Decision]) -> str:
    tokens = sum(entry.numbers["tokens"] for entry in entries)
    why = _LIMITS.get(entries[0].numbers["limit"])
    text = f"{_count(len(entries), 'chunk')} of {tokens:,} tokens together in steps "
    text += f"{entries[0].step} to {entries[-1].step}"
    return f"{text}: {why}" if why else text


def _summary(story: Sequence[Decision], shortages: Sequence[int]) -> list[str]:
    """How long it waited, and for what: from arrival or preemption to admission.

    It waits for the same reason until something else happens to it.
    """
    lines = []
    since: Decision | None = None
    reasons: dict[str, float] = {}
    for entry, after in zip(story, [*story[1:], None], strict=True):
        if entry.kind in ("arrive", "resume", "preempt"):
            since, reasons = entry, {}
        elif entry.kind == WAIT and since is not None:
            reason, end = entry.numbers["reason"], entry.numbers["last_now"]
            end = end if after is None else after.now
            reasons[reason] = reasons.get(reason, 0.0) + end - entry.now
        elif since is not None and entry.kind in ("admit", "end"):
            lines.append("  " + _waiting(since, entry, reasons, shortages))
            since = None
    if since is not None:
        lines.append("  it has not been admitted since")
    if story[-1].kind == "end":
        lines.append(f"  in all {story[-1].now - story[0].now:.3f} s")
    return lines


def _waiting(
    since: Decision, until: Decision, reasons: dict[str, float], shortages: Sequence[int]
) -> str:
    seconds = until.now - since.now
    event = "its preemption" if since.kind == "preempt" else "its arrival"
    end = "it ran" if until.kind == "admit" else "it ended"
    text = f"{seconds:.3f} s from {event} until {end}"
    first = sum(reasons.values())
    if reasons:
        parts = ", ".join(f"{value:.3f} s for {_NOUNS.get(k, k)}" for k, value in reasons.items())
        text += f"; first in line: {parts}"
    if since.numbers.get("waiting") and seconds > first:
        text += f"; behind others {seconds - first:.3f} s"
    times = len({step for step in shortages if since.step < step <= until.step})
    if times and until.kind == "admit":
        text += f"; nobody is let in while blocks run short, as in {_count(times, 'step')} of these"
    return text


_NOUNS = {
    "seats": "a seat",
    "blocks": "blocks",
    "watermark": "blocks above the watermark",
    "sibling": "what another request computes",
    "budget": "tokens of the step",
    "quota": "its tenant's others",
}


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _arrive(entry: Decision, n: dict[str, Any]) -> str:
    came = "arrived"
    if entry.kind == "resume":
        came = f"came from elsewhere with {_count(n['tokens'], 'token')} drawn"
    tenant = "" if n.get("tenant") is None else f" (tenant {n['tenant']})"
    return (
        f"{came}{tenant}: {_count(n['prompt'], 'prompt token')}, "
        f"{_count(n['samples'], 'sample')}; {n['waiting']:,} waiting, {n['running']:,} running"
    )


def _wait(entry: Decision, n: dict[str, Any]) -> str:
    reason = n["reason"]
    if reason == "seats":
        aside = f" and {n['aside']:,} set aside" if n["aside"] else ""
        why = f"it needs {n['wanted']:,}, and {n['taken']:,}{aside} of {n['seats']:,} were taken"
    elif reason in ("blocks", "watermark"):
        why = f"{_RULES.get(n['rule'], n['rule'])} {_count(n['blocks'], 'block')}"
        why += f" (its own {n['demand']:,}), and there was room for {n['room']:,}"
        why += f" ({n['free']:,} free, {n['cached']:,} cached"
        why += f", less {n['aside']:,} set aside for others" if n["aside"] else ""
        why += f", less a watermark of {n['watermark']:,})" if n["watermark"] else ")"
    elif reason == "sibling":
        why = "another request was computing the beginning of its prompt"
    elif reason == "quota":
        why = f"its tenant runs {n['max_running']:,}, as many as it may (max_running)"
    elif reason == "budget":
        why = f"all {n['budget']:,} tokens of the step went to others; {n['pending']:,} pending"
    else:
        why = ", ".join(f"{key} {value}" for key, value in n.items() if key != "reason")
    plans = f"step {entry.step}" if n["count"] == 1 else f"steps {entry.step} to {n['last_step']}"
    seconds = n["last_now"] - entry.now
    noun = _NOUNS.get(reason, reason)
    return f"waited for {noun} in {_count(n['count'], 'plan')} ({plans}, {seconds:.3f} s): {why}"


def _admit(entry: Decision, n: dict[str, Any]) -> str:
    below = f", {n['below_tokens']:,} in a lower tier" if n.get("below_tokens") else ""
    return (
        f"{'resumed' if n['again'] else 'admitted'} in step {entry.step}: "
        f"{n['cached_tokens']:,} of {_count(n['tokens'], 'token')} found in the cache{below}; "
        f"takes {_count(n['demand'], 'block')} more ({n['free']:,} free, {n['cached']:,} cached); "
        f"{n['running']:,} running"
    )


def _chunk(entry: Decision, n: dict[str, Any]) -> str:
    text = f"{n['tokens']:,} of {n['pending']:,} pending tokens in step {entry.step}"
    return f"{text}: {_LIMITS.get(n['limit'], n['limit'])}" if n["limit"] else text


def _preempt(entry: Decision, n: dict[str, Any]) -> str:
    how = n["how"].replace("_", " ")
    text = (
        f"preempted in step {entry.step} ({how}): {_count(n['rows'], 'row')} needed "
        f"{_count(n['demand'], 'block')}, and {n['available']:,} were free or cached; its "
        f"{_count(n['tokens'], 'token')} gave {_count(n['freed'], 'block')} back"
    )
    seconds = ", ".join(f"{way} {value:.4f} s" for way, value in n.get("seconds", {}).items())
    return f"{text}; predicted: {seconds}" if seconds else text


def _end(entry: Decision, n: dict[str, Any]) -> str:
    pairs = zip(n["reasons"], n["tokens"], strict=True)
    return "ended: " + ", ".join(f"{why} after {_count(k, 'token')}" for why, k in pairs)


def _park(entry: Decision, n: dict[str, Any]) -> str:
    return f"stood still from step {entry.step} on with {_count(n['tokens'], 'token')}, to be moved"


def _unpark(entry: Decision, n: dict[str, Any]) -> str:
    return f"was not moved and went on in step {entry.step}"


def _release(entry: Decision, n: dict[str, Any]) -> str:
    return "went elsewhere after " + ", ".join(_count(k, "token") for k in n["tokens"])


def _cut_short(entry: Decision, n: dict[str, Any]) -> str:
    return (
        f"cut short in step {entry.step} at {_count(n['tokens'], 'token')}: alone it takes more "
        f"than the {n['blocks']:,} blocks of the pool"
    )


def _stand_back(entry: Decision, n: dict[str, Any]) -> str:
    return (
        f"stands back from step {entry.step} on: not all first tokens can come in time, and of "
        f"its own {n['prefill']:.3f} s are left to compute in {n['spare']:.3f} s"
    )


def _come_back(entry: Decision, n: dict[str, Any]) -> str:
    return (
        f"takes its place again in step {entry.step}: its first token can come in time after all, "
        f"in {n['spare']:.3f} s"
    )


def _message(entry: Decision, n: dict[str, Any]) -> str:
    return f"{entry.kind}: {n['message']}"


def _other(entry: Decision, n: dict[str, Any]) -> str:
    numbers = ", ".join(f"{key} {value}" for key, value in n.items())
    return f"{entry.kind} in step {entry.step}" + (f": {numbers}" if numbers else "")


_WORDS = {
    "arrive": _arrive,
    "resume": _arrive,
    "refuse": _message,
    WAIT: _wait,
    "admit": _admit,
    "chunk": _chunk,
    "preempt": _preempt,
    "cut_short": _cut_short,
    "stand_back": _stand_back,
    "come_back": _come_back,
    "error": _message,
    "deadline": _message,
    "fail": _message,
    "end": _end,
    "park": _park,
    "unpark": _unpark,
    "release": _release,
}
