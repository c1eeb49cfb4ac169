"""Whether two workers can move sequences to each other, and if not, why."""

from __future__ import annotations

from pagedkv.transfer.messages import Hello
from pagedkv.transfer.payload import DTYPES


def refusal(ours: Hello, theirs: Hello) -> str | None:
    """Why no sequence can move between the two; None: it can.

    Block sizes may differ, and dtypes between which K/V can be converted.
    """
    who = f"worker {theirs.worker!r}"
    if theirs.protocol != ours.protocol:
        return (
            f"{who} speaks transfer protocol {theirs.protocol}, this one {ours.protocol}: "
            "run the same release on all workers"
        )
    if theirs.model != ours.model:
        return (
            f"{who} has model {theirs.model.hex()[:16]}, this one {ours.model.hex()[:16]}: "
            "K/V of one model is of no use to another; serve the same checkpoint on all workers"
        )
    for name in ("num_layers", "num_kv_heads", "head_dim"):
        have, want = getattr(theirs, name), getattr(ours, name)
        if have != want:
            return f"{who} has {name}={have}, this one {want}: their K/V cannot be exchanged"
    if not {theirs.dtype, ours.dtype} <= DTYPES.keys():
        return (
            f"{who} has K/V in {theirs.dtype}, this one in {ours.dtype}: only "
            f"{' and '.join(DTYPES)} can be moved; give all workers one of these"
        )
    if theirs.block_size < 1:
        return f"{who} has block_size={theirs.block_size}: it must be at least 1"
    return None
