"""Workers between which nothing can move say why, by name, before anything is reserved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
from moving_world import LIMITS, NAMING, World, hello

from pagedkv.cache import BlockManager
from pagedkv.errors import ConfigError
from pagedkv.transfer.actions import Reclaimed, Send
from pagedkv.transfer.endpoint import Endpoint
from pagedkv.transfer.events import decode_batch
from pagedkv.transfer.handshake import refusal
from pagedkv.transfer.limits import TransferLimits
from pagedkv.transfer.messages import (
    Commit,
    Data,
    Deny,
    FrameError,
    Grant,
    Hello,
    Message,
    MoveId,
    Nack,
    Naming,
    Part,
    Renew,
    Reserve,
    pack,
    pack_tokens,
    unpack,
)
from pagedkv.transfer.state import StateError, pack_state, unpack_state

TOKENS = np.arange(9, dtype=np.int32)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"protocol": 3}, "'D' speaks transfer protocol 3, this one 2"),
    ({"model": b"other"}, "'D' has model 6f74686572, this one 6d6f64656c"),
    ({"num_layers": 3}, "'D' has num_layers=3, this one 1"),
    ({"num_kv_heads": 2}, "'D' has num_kv_heads=2, this one 1"),
    ({"head_dim": 64}, "'D' has head_dim=64, this one 2"),
    ({"dtype": "int8"}, "'D' has K/V in int8, this one in float32"),
    ({"block_size": 0}, "'D' has block_size=0"),
]


@pytest.mark.parametrize(("change", "why"), REFUSED)
def test_what_cannot_be_moved_is_refused_by_name(change: dict[str, Any], why: str) -> None:
    """TensorRT-LLM#6507, vllm#14952, sglang#15674, llm-d#2433: wrong output, hangs, or crashes."""
    theirs = hello("D", 8, 4)
    theirs = Hello(**{f: getattr(theirs, f) for f in theirs.__struct_fields__} | change)
    said = refusal(hello("P", 8, 4), theirs)
    assert said is not None and why in said
    end = Endpoint(BlockManager(8, 4), hello("P", 8, 4), LIMITS)
    move = MoveId("r", 1)
    (asked,) = end.start(move, "D", TOKENS, NAMING, "live", 0, 0.0)
    assert isinstance(asked, Send) and isinstance(asked.message, Hello)
    reclaimed = [a for a in end.handle("D", theirs, 0.0) if isinstance(a, Reclaimed)]
    assert reclaimed == [Reclaimed(move, said)]
    # Known from now on: at request time, with nothing sent.
    assert end.start(MoveId("q", 1), "D", TOKENS, NAMING, "live", 0, 0.0) == [
        Reclaimed(MoveId("q", 1), said)
    ]
    reserve = Reserve("s", 1, pack_tokens(TOKENS), NAMING)
    assert end.handle("D", reserve, 0.0) == [Send("D", Deny("s", 1, said))]


def test_who_was_refused_may_come_back_as_another() -> None:
    """The one that is started in its place says what it is when it is asked, not before."""
    end = Endpoint(BlockManager(8, 4), hello("P", 8, 4), LIMITS)
    end.handle("D", hello("D", 8, 4, model=b"other"), 0.0)
    end.peer_gone("D", 0.0)
    (asked,) = end.start(MoveId("r", 1), "D", TOKENS, NAMING, "live", 0, 0.0)
    assert isinstance(asked, Send) and isinstance(asked.message, Hello)
    (asked,) = end.handle("D", hello("D", 8, 4, boot=2), 0.0)
    assert isinstance(asked, Send) and isinstance(asked.message, Reserve)


@pytest.mark.parametrize("change", [{"block_size": 7}, {"dtype": "bfloat16"}, {"num_blocks": 3}])
def test_block_sizes_and_dtypes_may_differ(change: dict[str, Any]) -> None:
    theirs = hello("D", 8, 4, **{k: v for k, v in change.items() if k == "dtype"})
    facts = {f: getattr(theirs, f) for f in theirs.__struct_fields__}
    assert refusal(hello("P", 8, 4), Hello(**facts | change)) is None


def test_a_reservation_of_a_stranger_waits_for_the_handshake() -> None:
    end = Endpoint(BlockManager(8, 4), hello("D", 8, 4), LIMITS)
    (answer,) = end.handle("P", Reserve("r", 1, pack_tokens(TOKENS), NAMING), 0.0)
    assert isinstance(answer, Send) and answer.message == hello("D", 8, 4, wants_answer=True)
    assert not end.receiver.moves


def test_a_hello_that_was_lost_is_said_again() -> None:
    world = World([hello("P", 20, 4), hello("D", 20, 4)], {0: "drop", 1: "drop", 2: "corrupt"})
    world.submit("r", "P", [1, 2, 3], 40)
    world.tick()
    world.move("r", "D", "live")
    world.run()
    world.check_end()
    assert world.raised == ["r"]


def test_a_dtype_that_cannot_be_moved_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="kv dtype 'int8' cannot be moved"):
        Endpoint(BlockManager(8, 4), hello("P", 8, 4, dtype="int8"))


def test_frames_that_are_not_as_they_were_sent_are_no_messages() -> None:
    frame = pack(Reserve("r", 1, pack_tokens(TOKENS), NAMING, 3))
    assert unpack(frame) == Reserve("r", 1, pack_tokens(TOKENS), NAMING, 3)
    for i in range(len(frame)):
        with pytest.raises(FrameError):
            unpack(frame[:i] + bytes([frame[i] ^ 1]) + frame[i + 1 :])
        with pytest.raises(FrameError):
            unpack(frame[:i])


IMPOSSIBLE = [
    Reserve("r", 1, b"", NAMING, headroom=-1),
    Reserve("r", 1, b"", NAMING, own=(3, -1)),
    Reserve("r", 1, b"", Naming(public=-1)),
    Grant("r", 1, lease=1, have=-4),  # pieces would be sent without end
    Grant("r", 1, lease=1, have=2**31),
    Deny("r", 1, "no", retry_after=-1.0),
    Deny("r", 1, "no", retry_after=float("nan")),
    Data("r", 1, lease=1, number=1, start=-4, stop=4, tokens=b"", dtype="float32"),
    Data("r", 1, lease=1, number=1, start=0, stop=2**40, tokens=b"", dtype="float32"),
    Data("r", 1, lease=1, number=1, start=0, stop=4, tokens=b"", dtype="float32", line=-1),
    Part("r", 1, lease=1, number=1, common=-1, own=()),
    Commit("r", 1, lease=1, number=1, total=-1, state=b"", counts=(), ended=()),
    Commit("r", 1, lease=1, number=1, total=0, state=b"", counts=(-1,), ended=(False,)),
    Renew("r", 1, lease=1, have=-1),
    Nack("r", 1, lease=1, number=1, first_bad=-1),
]


@pytest.mark.parametrize("message", IMPOSSIBLE, ids=str)
def test_numbers_that_cannot_be_are_no_message(message: Message) -> None:
    with pytest.raises(FrameError, match="no message: Expected"):
        unpack(pack(message))


@pytest.mark.parametrize(
    ("unpacks", "error"),
    [
        (lambda body: unpack(xxhash.xxh3_64_digest(body) + body), FrameError),
        (lambda body: unpack_state(b"\x01" + body, Hello), StateError),
        (decode_batch, ValueError),
    ],
    ids=["message", "state", "events"],
)
def test_what_is_nested_without_end_is_refused(
    unpacks: Callable[[bytes], object], error: type[Exception]
) -> None:
    """In a field that is not looked at."""
    maps = b"\x81\xa1x" * 100_000 + b"\x00"
    for body in (maps, b"\x94\x00\x90\xc0" + b"\x91" * 100_000 + b"\x00"):
        with pytest.raises(error):
            unpacks(body)


@pytest.mark.parametrize("change", [{"dtype": "int8"}, {"block_size": 0}, {"block_size": 2}])
def test_who_says_to_be_another_has_sent_nothing(change: dict[str, Any]) -> None:
    """Without having been started again: what is under way was of the one that was known."""
    end = Endpoint(BlockManager(8, 4), hello("D", 8, 4), LIMITS)
    end.handle("P", hello("P", 8, 4), 0.0)
    end.handle("P", Reserve("r", 1, pack_tokens(TOKENS), NAMING), 0.0)
    assert end.receiver.moves
    end.handle("P", msgspec.structs.replace(hello("P", 8, 4), **change), 0.0)
    assert not end.receiver.moves


def test_a_state_of_another_version_is_refused() -> None:
    packed = pack_state(([1, 2], "x"))
    assert unpack_state(packed, tuple[list[int], str]) == ([1, 2], "x")
    with pytest.raises(StateError, match="version 2 of a sequence's state, this worker reads 1"):
        unpack_state(b"\x02" + packed[1:], tuple[list[int], str])
    with pytest.raises(StateError, match="version missing"):
        unpack_state(b"", tuple[list[int], str])
    with pytest.raises(StateError, match="no sequence's state"):
        unpack_state(packed, tuple[int, str])


@pytest.mark.parametrize(
    "change",
    [
        {"lease": 0.0},
        {"retry": float("inf")},
        {"retries": 0},
        {"window": True},
        {"spare_blocks": -1},
        {"lease": 2.0, "retry": 1.0},
    ],
)
def test_limits_that_cannot_work_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        TransferLimits(**change)
