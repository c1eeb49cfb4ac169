"""A request as the bytes that move with its K/V, and back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pagedkv.engine.wire import pack, unpack_to_core
from pagedkv.scheduling.messages import Drawn, Resume
from pagedkv.transfer.messages import MoveId, pack_tokens, unpack_tokens
from pagedkv.transfer.state import (
    Clocks,
    OutputState,
    SequenceState,
    StateError,
    pack_state,
    unpack_state,
)


def pack_resume(resume: Resume, now: float) -> bytes:
    """The request with its times as ages at `now`, on the clock of the request."""
    add = resume.add

    def age(time: float | None) -> float | None:
        return None if time is None else now - time

    rest = replace(
        resume,
        add=replace(add, prompt=(), arrival=0.0, deadline=None),
        outputs=(),
        sent_at=None,
        admitted_at=None,
        first_token_at=None,
        last_token_at=None,
    )
    outputs = [
        OutputState(pack_tokens(np.array(o.tokens, np.int32)), o.finish_reason, o.logprob)
        for o in resume.outputs
    ]
    clocks = Clocks(
        arrival=now - add.arrival,
        admitted=age(resume.admitted_at),
        first_token=age(resume.first_token_at),
        last_token=age(resume.last_token_at),
        deadline=None if add.deadline is None else add.deadline - now,
    )
    prompt = pack_tokens(np.array(add.prompt, np.int32))
    return pack_state(SequenceState(pack(rest), prompt, tuple(outputs), clocks))


def unpack_resume(data: bytes, move: MoveId, now: float) -> Resume:
    """The request, under its id at the new owner; `now` is on that one's clock.

    StateError: the bytes are none that `pack_resume` makes.
    """
    state = unpack_state(data)
    rest = unpack_to_core(state.add)
    if not isinstance(rest, Resume):
        raise StateError(f"a {type(rest).__name__} came as the state of {move.owned_id!r}")
    clocks = state.clocks

    def time(age: float | None) -> float | None:
        return None if age is None else now - age

    add = replace(
        rest.add,
        request_id=move.owned_id,
        prompt=tuple(unpack_tokens(state.prompt).tolist()),
        arrival=now - clocks.arrival,
        deadline=None if clocks.deadline is None else now + clocks.deadline,
    )
    outputs = [
        Drawn(tuple(unpack_tokens(o.tokens).tolist()), o.finish_reason, o.logprob)
        for o in state.outputs
    ]
    return replace(
        rest,
        add=add,
        outputs=tuple(outputs),
        admitted_at=time(clocks.admitted),
        first_token_at=time(clocks.first_token),
        last_token_at=time(clocks.last_token),
    )
