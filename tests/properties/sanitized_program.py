"""Random calls as an engine makes them, everything reported: only the sanitizer judges.

    python sanitized_program.py FIRST LAST

runs the seeds [FIRST, LAST) until one leads to SanitizerError, and prints its kind, or nothing.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np

from pagedkv.cache import BlockManager, Reservation, SanitizerError, SeqId, evict
from pagedkv.errors import PagedKVError

# A name can run into the next only if somebody forgets the lengths: "a" + x + 0, "ax" + 0.
NAMES = ({},) * 4 + tuple(
    {"namespace": space, "extra": extra} for space in ("a", "ax") for extra in (None, b"\0")
)
Kwargs = dict[str, Any]


class SanitizedProgram:
    """An engine without a model, that mirrors the table as an executor does. Draws from `seed`."""

    def __init__(self, seed: int, num_blocks: int, block_size: int) -> None:
        self.random = random.Random(f"{seed} {num_blocks} {block_size}")
        self.manager = BlockManager(num_blocks, block_size, max_seqs=5, sanitize=True)
        self.seqs: dict[SeqId, list[int]] = {}  # open ones, and the tokens they are to be given
        self.writing: dict[SeqId, int] = {}  # tokens reserved, all written
        self.closed: list[SeqId] = []
        self.leases: list[int] = []
        self.prompts: list[list[int]] = [[]]
        self.mirror = np.zeros((5, num_blocks), np.int32)
        self.stamp = 0

    def run(self, steps: int) -> None:
        """Raises SanitizerError; every other error of a call is a refusal, and passed over."""
        names, weights = zip(*self.VERBS, strict=True)
        for step in range(steps):
            self.watch.begin_step(step)
            try:
                getattr(self, self.random.choices(names, weights)[0])()
            except SanitizerError:
                raise
            except (PagedKVError, ValueError, KeyError):
                continue
        for lease in self.leases:
            self.manager.end_lease(lease)
        for seq in list(self.seqs):
            self.manager.close(seq)
        self.watch.check_idle()
        self.watch.check()

    @property
    def watch(self) -> Any:
        return self.manager.sanitizer

    def some(self, seqs: list[SeqId]) -> list[SeqId]:
        return self.random.sample(seqs, min(len(seqs), self.random.randint(1, 4)))

    def tokens(self, n: int) -> list[int]:
        return [self.random.randrange(2) for _ in range(n)]

    # ---- what an executor is given

    def report(self, seqs: list[SeqId], counts: list[int], reservation: Reservation) -> None:
        self.watch.check_copies(reservation.copies)
        self.watch.check_writes(seqs, counts, reservation.slots)
        self.writing |= dict(zip(seqs, counts, strict=True))
        self.read(seqs)

    def read(self, seqs: list[SeqId] | None = None) -> None:
        m = self.manager
        changed = m.changed_rows(self.stamp)
        self.stamp = m.stamp()
        rows = m.padded_rows(changed)
        self.mirror[changed] = 0
        self.mirror[changed, : rows.shape[1]] = rows
        seqs = self.some(list(self.seqs)) if seqs is None else seqs
        lengths = [m.length(seq) + self.writing.get(seq, 0) for seq in seqs]
        self.watch.check_reads(seqs, lengths, self.mirror[m.rows(seqs)])

    # ---- the verbs

    def open(self) -> None:
        cut = self.random.choice(self.prompts)
        tokens = cut[: self.random.randint(0, len(cut))] + self.tokens(self.random.randint(0, 4))
        tokens = tokens[: self.manager.num_blocks * self.manager.block_size]
        self.prompts = [*self.prompts[-5:], tokens]
        name: Kwargs = dict(self.random.choice(NAMES))
        name["public"] = self.random.choice((0, 0, self.random.randint(0, len(tokens))))
        seq = self.manager.open(tokens, **name)
        self.seqs[seq] = tokens[self.manager.length(seq) :]

    def reserve(self) -> None:
        seqs = self.some([seq for seq in self.seqs if seq not in self.writing])
        most = 2 * self.manager.block_size + 1
        counts = [len(self.seqs[seq]) or self.random.randint(0, most) for seq in seqs]
        self.report(seqs, counts, self.manager.reserve(seqs, counts))

    def commit(self) -> None:
        seqs = self.some(list(self.writing))
        tokens = []
        for seq in seqs:
            k = self.writing[seq]
            k = self.random.choice((k, k, k, self.random.randint(0, k)))
            given = self.seqs[seq][:k]
            tokens.append(given + self.tokens(k - len(given)))
        self.manager.commit(seqs, tokens)
        for seq, new in zip(seqs, tokens, strict=True):
            del self.writing[seq]
            self.seqs[seq] = self.seqs[seq][len(new) :]
        self.read(seqs)

    def cancel(self) -> None:
        seqs = self.some(list(self.writing))
        self.manager.cancel(seqs)
        for seq in seqs:
            del self.writing[seq]
        self.read(seqs)

    def fork(self) -> None:
        seq = self.random.choice(list(self.seqs) or [SeqId(1)])
        for child in self.manager.fork(seq, self.random.randint(1, 2)):
            self.seqs[child] = []

    def truncate(self) -> None:
        seq = self.random.choice(list(self.seqs) or [SeqId(1)])
        self.manager.truncate(seq, self.random.randint(0, self.manager.length(seq)))
        self.writing.pop(seq, None)

    def close(self) -> None:
        seq = self.random.choice(list(self.seqs) or [SeqId(1)])
        self.manager.close(seq)
        del self.seqs[seq]
        self.writing.pop(seq, None)
        self.closed = [*self.closed[-5:], seq]

    def close_again(self) -> None:
        self.manager.close(self.random.choice(self.closed or [SeqId(1)]))

    def evict(self) -> None:
        self.manager.evict(self.random.randint(1, 2))

    def reset_cache(self) -> None:
        self.manager.reset_cache()

    def lease(self) -> None:
        seq = self.random.choice(list(self.seqs) or [SeqId(1)])
        held = self.manager.block_table(seq).tolist()
        lease = self.manager.lease(held[-self.random.randint(1, 2) :])
        self.watch.check_blocks(lease.blocks)
        self.leases.append(lease.id)

    def end_lease(self) -> None:
        if self.leases:
            lease = self.leases.pop(self.random.randrange(len(self.leases)))
            self.watch.check_blocks(self.manager.leases[lease])
            self.manager.end_lease(lease)

    def migrate(self) -> None:
        seq = self.random.choice(list(self.seqs) or [SeqId(1)])
        new = self.manager.import_sequence(self.manager.export_sequence(seq))
        self.seqs[new.seq] = new.tokens.tolist()
        self.report([new.seq], [len(new.tokens)], new.reservation)

    def restart(self) -> None:
        restored = BlockManager.restore(self.manager.snapshot())
        for lease in list(self.manager.leases):
            self.manager.end_lease(lease)
        for seq in self.seqs:
            self.manager.close(seq)
        self.manager = restored

    VERBS = (
        ("open", 12),
        ("reserve", 24),
        ("commit", 24),
        ("read", 4),
        ("cancel", 4),
        ("fork", 5),
        ("truncate", 5),
        ("close", 8),
        ("close_again", 1),
        ("evict", 2),
        ("reset_cache", 1),
        ("lease", 3),
        ("end_lease", 4),
        ("migrate", 2),
        ("restart", 1),
    )


def run_seed(seed: int) -> None:
    """Every seed has a shape of its own; every other one resists scans."""
    evict.SCAN_RESISTANT_FROM = 1 if seed % 2 else 64
    SanitizedProgram(seed, 2 + seed % 7, 1 + seed % 3).run(60)


def main(first: int, last: int) -> None:
    for seed in range(first, last):
        try:
            run_seed(seed)
        except SanitizerError as error:
            print(error.kind.value)
            return
        except Exception as error:
            print(f"seed {seed}: {error!r}", file=sys.stderr)  # no misuse that is known as one


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
