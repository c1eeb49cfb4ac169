"""Ending a thing twice, or a thing that is not there, changes nothing: in any state."""

from __future__ import annotations

import pytest
from cache_program import CacheProgram, drain
from harness import Run

from pagedkv.cache import BlockManager
from pagedkv.scheduling.messages import Drain


@pytest.mark.parametrize("block_size", [1, 2, 4])
@pytest.mark.parametrize("num_blocks", [3, 8, 64])
def test_the_second_time_changes_nothing(num_blocks: int, block_size: int) -> None:
    for seed in range(6):
        program = CacheProgram(seed, num_blocks, block_size)
        for _ in range(40):
            getattr(program, program.random.choice(VERBS))()
        program.compare()
        for ending in ENDINGS:
            m = BlockManager.restore(program.real.snapshot())
            again = ending(m)
            before = m.snapshot()
            again()
            assert m.snapshot() == before, ending.__name__
            drain(m)
        drain(program.real)


VERBS = ("open", "open", "reserve", "reserve", "commit", "commit", "fork", "close", "lease")


def reset_twice(m: BlockManager):
    m.reset_cache()
    return m.reset_cache


def evict_when_nothing_is_cached(m: BlockManager):
    m.evict(m.num_blocks)
    return lambda: m.evict(m.num_blocks)


def end_of_leases(m: BlockManager):
    leases = list(m.leases)
    for lease in leases:
        m.end_lease(lease)

    def again() -> None:
        for lease in [*leases, 10**6]:
            with pytest.raises(KeyError):
                m.end_lease(lease)

    return again


def release_of_a_lease(m: BlockManager):
    held = [b for b in range(1, m.num_blocks + 1) if m.refcount(b)][:2]
    lease = m.lease(held)
    lease.release()
    return lease.release


def close(m: BlockManager):
    seqs = [m.table.seq(row) for row in m.table.open_rows().tolist()]
    for seq in seqs:
        m.close(seq)

    def again() -> None:
        for seq in [*seqs, 10**6]:
            with pytest.raises(KeyError):
                m.close(seq)
            with pytest.raises(KeyError):
                m.cancel([seq])

    return again


def truncate(m: BlockManager):
    seqs = [m.table.seq(row) for row in m.table.open_rows().tolist()]
    ends = [m.length(seq) // 2 for seq in seqs]
    for seq, end in zip(seqs, ends, strict=True):
        m.truncate(seq, end)

    def again() -> None:
        for seq, end in zip(seqs, ends, strict=True):
            m.truncate(seq, end)

    return again


def cancel(m: BlockManager):
    rows = m.table.open_rows()
    seqs = [m.table.seq(row) for row in rows[m.table.reserved[rows] >= 0].tolist()]
    m.cancel(seqs)

    def again() -> None:
        for seq in seqs:
            with pytest.raises(ValueError):
                m.cancel([seq])

    return again


ENDINGS = (
    reset_twice,
    evict_when_nothing_is_cached,
    end_of_leases,
    release_of_a_lease,
    close,
    truncate,
    cancel,
)


def test_messages_that_come_twice_late_or_for_nobody() -> None:
    """A second abort, a late one, one of an unknown id or sample, a second drain."""

    def steps(times: int, stray: bool) -> list[object]:
        run = Run(num_blocks=12, block_size=2, budget=8)
        for name in "abc":
            run.add(name, [ord(name) % 50] * 5, n=2, temperature=1.0, max_tokens=6)
        for at in range(30):
            for name, when, sample in (("a", 2, 0), ("b", 3, None), ("c", 4, 1)):
                if at == when or (stray and at > when):
                    for _ in range(times):
                        run.abort(name, sample)
            if stray:
                run.abort("never sent")
                run.abort("c", sample=7)
                run.abort("a", sample=-1)
            if at >= 3:
                for _ in range(times):
                    run.core.send(Drain())
            run.step()
        run.finish()
        return [
            run.tokens,
            {key: end.finish_reason for key, end in run.ends.items()},
            [(step.seqs.tolist(), step.slots.tolist()) for step in run.steps],
            run.manager.snapshot(),
        ]

    once = steps(1, stray=False)
    assert steps(2, stray=False) == once
    assert steps(3, stray=True) == once
