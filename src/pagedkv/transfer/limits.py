"""How long the two sides wait for each other, and how much travels at a time."""

from __future__ import annotations

from dataclasses import dataclass, fields

from pagedkv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """Times in seconds. ConfigError for what cannot work.

    lease: either side gives up when it has heard nothing of the other for so long; it must exceed
        the longest pause of a healthy peer, such as a step.
    retry: what has not been answered is sent again after so long, K/V after twice as long each
        further time in a row. retries: so often in a row at most.
    patience: how long a sender goes on asking for room, and a receiver holds a complete copy for
        the front end's word.
    piece_bytes: largest payload of a message. window: so many such payloads are under way at a
        time, or more smaller ones that are no more bytes.
    spare_blocks: free or cached blocks that a receiver keeps for the sequences it has.
    memory: how long the end of a move is remembered, for messages that come late.
    """

    lease: float = 10.0
    retry: float = 1.0
    retries: int = 5
    patience: float = 30.0
    piece_bytes: int = 4 << 20
    window: int = 4
    spare_blocks: int = 0
    memory: float = 120.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), 0 if field.name == "spare_blocks" else 1
            if field.type == "float":
                if not 0 < value < float("inf"):
                    raise ConfigError(f"{field.name}={value!r}: give a number of seconds above 0")
            elif isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{field.name}={value!r}: give an integer of at least {least}")
        if self.lease < 3 * self.retry:
            raise ConfigError(
                f"lease={self.lease} must be at least three times retry={self.retry}: "
                "one lost message would end it"
            )

    @property
    def heartbeat(self) -> float:
        """Seconds without a word after which a side says that it is alive."""
        return self.lease / 3
