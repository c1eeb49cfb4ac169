"""Whether a receiver has room for what a Reserve asks, and how much it keeps."""

from __future__ import annotations

from pagedkv.cache import BlockManager
from pagedkv.transfer.limits import TransferLimits
from pagedkv.transfer.messages import Deny, FrameError, Reserve, unpack_tokens


def rooms_of(message: Reserve, common: int, block_size: int, rows: int) -> list[int]:
    """Blocks of each sample's line, beyond the full ones of the tokens in common.

    None at all where a line for each is more sequences than there are `rows`.
    """
    if 1 + len(message.own) > rows:
        return []
    ends = [common + own + message.headroom for own in message.own]
    return [-(-end // block_size) - common // block_size for end in ends]


def refusal(
    manager: BlockManager, message: Reserve, limits: TransferLimits, used: int, rows: int
) -> Deny | None:
    """Why there is no room for what comes, for now or for good; None: there may be.

    used: sequences, of `rows`, that other moves to this worker have open.
    """
    move, naming = message.move, message.naming
    try:
        tokens = unpack_tokens(message.tokens)
        match = manager.match(tokens, naming.namespace, naming.public, naming.extra)
    except (ValueError, FrameError) as error:
        return Deny(*move, reason=str(error))
    if not len(tokens) or min(message.headroom, *message.own, 0) < 0:
        reason = (
            f"{len(tokens)} tokens, own={message.own} and headroom={message.headroom} "
            "are no request"
        )
        return Deny(*move, reason=reason)
    size = manager.block_size
    rooms = rooms_of(message, len(tokens), size, rows)
    total = len(tokens) + message.headroom + max(message.own if rooms else (0,))
    blocks, most = -(-total // size), min(manager.num_blocks, manager.max_blocks_per_seq)
    if blocks > most:
        reason = f"{total} tokens take {blocks} blocks, a sequence can have {most} here"
        return Deny(*move, reason=reason)
    demand = match.demand + (sum(rooms) if rooms else blocks - -(-len(tokens) // size))
    if demand > manager.num_blocks:
        reason = f"its samples take {demand} blocks, there are {manager.num_blocks} here"
        return Deny(*move, reason=reason)
    busy = manager.num_held_blocks + manager.num_draining_blocks
    available = manager.num_free_blocks + manager.num_cached_blocks
    spare = limits.spare_blocks if busy else 0
    later = limits.retry
    if demand + spare > available:
        reason = f"{demand} blocks needed and {spare} kept for others, {available} available"
        return Deny(*move, reason=reason, retry_after=later)
    if used + 1 + len(rooms) > rows:
        reason = f"{used} sequences of {rows} are on their way here already"
        return Deny(*move, reason=reason, retry_after=later)
    return None
