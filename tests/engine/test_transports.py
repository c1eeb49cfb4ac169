"""Payloads come out as they went in, and nothing is left of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import msgspec
import numpy as np
import pytest

from pagedkv.engine.transports import InlineTransport, LocalTransport, SharedMemoryTransport
from pagedkv.transfer.messages import MoveId

MOVE = MoveId("a", 1)
BLOCKS = np.arange(3 * 5000, dtype=np.uint32).view(np.uint8).reshape(3, -1)

SENDER = """
import sys, numpy as np
from pagedkv.engine.transports import SharedMemoryTransport
from pagedkv.transfer.messages import MoveId
transport = SharedMemoryTransport()
blocks = np.arange(3 * 5000, dtype=np.uint32).view(np.uint8).reshape(3, -1)
print(transport.put(MoveId("a", 1), 1, blocks).hex(), flush=True)
for line in sys.stdin:
    transport.free(MoveId("a", 1), 1)
    transport.put(MoveId("b", 1), 1, blocks[::-1])
    print("again", flush=True)
"""


def test_shared_memory_is_read_where_it_was_written_and_used_again() -> None:
    sender, receiver = SharedMemoryTransport(), SharedMemoryTransport()
    reference = sender.put(MOVE, 1, BLOCKS)
    assert len(reference) < 48
    found = receiver.get(reference)
    assert found is not None and found.tobytes() == BLOCKS.tobytes()
    assert not found.flags.owndata
    found[0] += 1
    again = SharedMemoryTransport().get(reference)
    assert again is not None and again.tobytes() == BLOCKS.tobytes()
    sender.put(MOVE, 2, BLOCKS)
    sender.free(MOVE, 1)
    assert sender.num_segments == 2
    sender.put(MOVE, 3, BLOCKS[:1])
    assert sender.num_segments == 2
    sender.free(MOVE, 3)
    sender.close()
    receiver.close()
    assert sender.num_segments == 0


def test_shared_memory_between_processes_ends_with_them() -> None:
    before = set(os.listdir("/dev/shm"))
    process = subprocess.Popen(
        [sys.executable, "-c", SENDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    reference = bytes.fromhex(process.stdout.readline())
    receiver = SharedMemoryTransport()
    found = receiver.get(reference)
    assert found is not None and found.tobytes() == BLOCKS.tobytes() and receiver.is_intact()
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "again\n"
    # The sender has used the segment again: what is there now is what it wrote.
    assert found.tobytes() == BLOCKS[::-1].tobytes()
    assert not receiver.is_intact()
    assert receiver.get(reference) is not None and not receiver.is_intact()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert SharedMemoryTransport().get(reference) is None
    assert found[:4].tobytes() == BLOCKS[-1][:4].tobytes()  # what is mapped stays
    process.stdin.close()
    process.stdout.close()
    assert set(os.listdir("/dev/shm")) <= before


def test_many_payloads_leave_no_descriptor_behind() -> None:
    sender = SharedMemoryTransport()
    descriptors = len(os.listdir("/proc/self/fd"))
    for number in range(40):
        sender.put(MOVE, number, BLOCKS)
    sender.free(MOVE, 39)
    assert sender.num_segments <= 16
    sender.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize(
    "reference", [b"", b"\xc1", b"no place", bytes([0x95, 1, 99, 7, 8, 1])], ids=lambda r: r.hex()
)
def test_what_is_no_reference_is_not_found(reference: bytes) -> None:
    for transport in (InlineTransport(), LocalTransport({}, "p"), SharedMemoryTransport()):
        assert transport.get(reference) is None


def test_a_descriptor_that_is_another_files_by_now_is_not_waited_for() -> None:
    """Such as that of a pipe, which opens when somebody writes to it."""
    reading, writing = os.pipe()
    os.close(writing)
    place = [os.getpid(), reading, os.fstat(reading).st_ino, BLOCKS.nbytes, 1]
    assert SharedMemoryTransport().get(msgspec.msgpack.encode(place)) is None
    os.close(reading)


def test_in_one_process_nothing_is_copied_or_kept() -> None:
    shared: dict = {}
    sender, receiver = LocalTransport(shared, "p"), LocalTransport(shared, "d")
    references = [sender.put(MOVE, number, BLOCKS) for number in (1, 2, 3)]
    found = receiver.get(references[0])
    assert found is not None and np.shares_memory(found, BLOCKS)
    sender.free(MOVE, 2)
    assert receiver.get(references[1]) is None and receiver.get(references[2]) is not None
    sender.close()
    assert not shared
    assert InlineTransport().put(MOVE, 1, BLOCKS) == b""
