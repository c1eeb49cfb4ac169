"""The engine under the sanitizer: what may not be read is NaN, no misuse reaches a kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_llm import save_tiny_llm

from pagedkv import LLM, BeamSearchParams, RequestOutput, SamplingParams
from pagedkv.attention.backends import BACKENDS, make_backend
from pagedkv.attention.interface import AttentionBackend, AttentionBatch, KVSpec
from pagedkv.cache import BlockManager, Misuse, SanitizerError
from pagedkv.engine.sanitized import SanitizedBackend
from pagedkv.errors import ConfigError
from pagedkv.scheduling.messages import StepStats
from pagedkv.scheduling.step import Result, Step, Ticket

pytestmark = pytest.mark.plants_faults

LAYERS, SIZE, BLOCKS = 2, 4, 16
Change = Callable[[AttentionBatch], None]


class Rig:
    """A manager and a backend under the sanitizer; steps write random K/V."""

    def __init__(self, name: str = "reference") -> None:
        self.manager = BlockManager(BLOCKS, SIZE, sanitize=True)
        assert self.manager.sanitizer is not None
        self.sanitizer, self.index = self.manager.sanitizer, 0
        spec = KVSpec(LAYERS, 4, 2, 8, BLOCKS, SIZE, torch.float32)
        self.inner = make_backend(name, spec)
        self.backend = SanitizedBackend(self.inner, self.sanitizer)
        self.random = torch.Generator().manual_seed(0)

    def draw(self, tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, 8, generator=self.random)

    def step(
        self,
        seqs: Sequence[int],
        counts: Sequence[int],
        change: Change = lambda _: None,
        copy: bool = True,
        q: torch.Tensor | None = None,
    ) -> None:
        """Reserves, copies, attends and commits tokens 0, 1 ...; `change`: of the batch."""
        self.index += 1
        self.sanitizer.begin_step(self.index)
        reservation = self.manager.reserve(seqs, counts)
        if copy and len(reservation.copies):
            self.backend.copy_blocks(reservation.copies)
        tables = self.manager.tables(seqs)
        batch = AttentionBatch(
            np.array(counts, np.int32),
            tables.lengths.copy(),
            tables.padded(),
            reservation.slots.copy(),
            np.array(seqs, np.int64),
        )
        change(batch)
        plan, total = self.backend.plan(batch), sum(counts)
        for layer in range(LAYERS):
            queries = self.draw(total, 4) if q is None else q
            self.backend.run(plan, layer, queries, self.draw(total, 2), self.draw(total, 2))
        self.manager.commit(seqs, [range(n) for n in counts])

    def start(self, tokens: int) -> int:
        """A new sequence of tokens 0, 1 ..., all computed."""
        seq = self.manager.open()
        self.step([seq], [tokens])
        return seq

    def nan(self, block: int) -> list[bool]:
        """For each slot of a block whether all of its K/V is NaN; none of it, otherwise."""
        stored = self.inner.read_blocks(np.array([block], np.int32))[0].isnan()
        by_slot = stored.transpose(0, 2).flatten(1)
        assert torch.equal(by_slot.all(1), by_slot.any(1))
        found: list[bool] = by_slot.all(1).tolist()
        return found

    def plant(self, block: int, value: float, slot: int = 0, layer: int = 0) -> None:
        """Changes K/V behind the back of the manager."""
        ids = np.array([block], np.int32)
        data = self.inner.read_blocks(ids)
        data[0, layer, 1, slot] = value
        self.inner.write_blocks(ids, data)


@pytest.fixture(params=BACKENDS)
def rig(request: pytest.FixtureRequest) -> Rig:
    return Rig(request.param)


def misuse(kind: Misuse, run: Callable[[], Any], **named: int | None) -> SanitizerError:
    with pytest.raises(SanitizerError) as caught:
        run()
    assert caught.value.kind == kind, caught.value
    assert {name: getattr(caught.value, name) for name in named} == named
    return caught.value


# ---- what the store holds ---------------------------------------------------------------------


def test_slots_that_were_not_written_and_blocks_that_were_freed_hold_nan(rig: Rig) -> None:
    seq = rig.start(6)
    full, tail = rig.manager.block_table(seq).tolist()
    assert rig.nan(full) == [False] * 4 and rig.nan(tail) == [False, False, True, True]
    rig.manager.truncate(seq, 4)  # the tail has no name: it is free
    rig.backend.read_blocks(np.zeros(0, np.int32))
    assert rig.nan(full) == [False] * 4 and rig.nan(tail) == [True] * 4


def test_a_block_that_is_used_again_starts_with_nan(rig: Rig) -> None:
    seq = rig.start(8)
    rig.manager.close(seq)
    rig.manager.evict(2)
    again = rig.manager.open()
    rig.step([again], [1])
    (block,) = rig.manager.block_table(again).tolist()
    assert rig.nan(block) == [False, True, True, True]


def test_the_copy_of_a_tail_is_nan_behind_what_was_copied(rig: Rig) -> None:
    seq = rig.start(6)
    (child,) = rig.manager.fork(seq)
    rig.step([child], [1])
    assert rig.nan(int(rig.manager.block_table(child)[1])) == [False] * 3 + [True]


# ---- what a kernel may not be given -----------------------------------------------------------


def test_a_table_with_a_block_that_was_freed(rig: Rig) -> None:
    seq = rig.start(8)
    other = rig.start(3)
    gone = int(rig.manager.block_table(other)[0])
    rig.manager.close(other)

    def stale(batch: AttentionBatch) -> None:
        batch.tables[0, 0] = gone

    error = misuse(
        Misuse.FREED_READ, lambda: rig.step([seq], [1], stale), block=gone, seq=seq, step=3
    )
    assert "allocated in step 2" in str(error) and "last released in step 2" in str(error)


def test_a_table_with_a_block_of_somebody_else(rig: Rig) -> None:
    seq, other = rig.start(5), rig.start(6)
    foreign = int(rig.manager.block_table(other)[1])

    def stale(batch: AttentionBatch) -> None:
        batch.tables[0, 1] = foreign

    misuse(Misuse.STALE_TABLE, lambda: rig.step([seq], [1], stale), block=foreign, seq=seq, step=3)


def test_a_context_longer_than_what_is_there(rig: Rig) -> None:
    seq = rig.start(5)

    def longer(batch: AttentionBatch) -> None:
        batch.context_lens[0] += 1

    misuse(Misuse.PAST_EXTENT, lambda: rig.step([seq], [1], longer), seq=seq, step=2)


def test_a_slot_that_was_not_reserved(rig: Rig) -> None:
    seq = rig.start(5)
    block = int(rig.manager.block_table(seq)[1])

    def wrong(batch: AttentionBatch) -> None:
        batch.slots[0] += 1

    # The block is the sequence's own, and the slot is not that of its next token.
    with pytest.raises(SanitizerError) as caught:
        rig.step([seq], [1], wrong)
    assert caught.value.kind in (Misuse.FOREIGN_WRITE, Misuse.SHARED_WRITE)
    assert (caught.value.block, caught.value.seq, caught.value.step) == (block, seq, 2)


def test_a_slot_twice(rig: Rig) -> None:
    seq = rig.start(5)

    def twice(batch: AttentionBatch) -> None:
        batch.slots[1] = batch.slots[0]

    block = int(rig.manager.block_table(seq)[1])
    misuse(Misuse.SLOT_TWICE, lambda: rig.step([seq], [2], twice), block=block, step=2)


def test_a_block_that_a_fork_reads(rig: Rig) -> None:
    seq = rig.start(6)
    (child,) = rig.manager.fork(seq)
    tail = int(rig.manager.block_table(seq)[1])

    def in_place(batch: AttentionBatch) -> None:
        batch.slots[0] = tail * SIZE + 2

    misuse(
        Misuse.FOREIGN_WRITE,
        lambda: rig.step([child], [1], in_place),
        block=tail,
        seq=child,
        step=2,
    )


def test_a_copy_that_was_forgotten(rig: Rig) -> None:
    seq = rig.start(6)
    (child,) = rig.manager.fork(seq)
    tail = int(rig.manager.block_table(seq)[1])
    misuse(
        Misuse.SLOT_NEVER, lambda: rig.step([child], [1], copy=False), block=tail, seq=child, step=2
    )


def test_a_copy_from_another_block(rig: Rig) -> None:
    seq = rig.start(6)
    (child,) = rig.manager.fork(seq)
    copies = rig.manager.reserve([child], [1]).copies.copy()
    copies[0, 0] = rig.manager.block_table(seq)[0]
    misuse(
        Misuse.FREED_READ, lambda: rig.backend.copy_blocks(copies), block=copies[0, 0], seq=child
    )


@pytest.mark.parametrize("write", [False, True])
def test_a_transfer_of_a_block_that_nobody_holds(rig: Rig, write: bool) -> None:
    seq = rig.start(4)
    ids = rig.manager.block_table(seq).copy()
    data = rig.backend.read_blocks(ids)
    assert not data.isnan().any()
    rig.manager.close(seq)
    with rig.manager.lease(ids):
        rig.backend.write_blocks(ids, data)
    call = (lambda: rig.backend.write_blocks(ids, data)) if write else None
    misuse(Misuse.FREED_READ, call or (lambda: rig.backend.read_blocks(ids)), block=int(ids[0]))


def test_a_batch_must_say_whose_its_rows_are(rig: Rig) -> None:
    one = np.ones(1, np.int32)
    batch = AttentionBatch(one, one, one[:, None], np.array([SIZE]))
    with pytest.raises(ValueError, match="set seqs"):
        rig.backend.plan(batch)


def test_a_plan_of_another_backend_is_refused(rig: Rig) -> None:
    some = torch.zeros(1, 2, 8)
    with pytest.raises(ValueError, match="made by another backend"):
        rig.backend.run(object(), 0, some, some, some)


# ---- what stands in the store -----------------------------------------------------------------


@pytest.mark.parametrize("layer", range(LAYERS))
def test_kv_of_a_published_block_that_has_changed_is_found_at_the_next_hit(
    rig: Rig, layer: int
) -> None:
    seq = rig.start(9)
    block = int(rig.manager.block_table(seq)[1])
    rig.step([seq], [1])  # what was published gets its checksum
    rig.manager.close(seq)
    rig.plant(block, 7.0, slot=2, layer=layer)
    again = rig.manager.open(list(range(9)))
    assert rig.manager.length(again) == 8
    error = misuse(Misuse.WRONG_HIT, lambda: rig.step([again], [1]), block=block)
    assert "has changed since it was published" in str(error)


def test_a_hit_whose_kv_is_as_it_was_is_taken(rig: Rig) -> None:
    seq = rig.start(9)
    rig.manager.close(seq)
    for _ in range(3):
        again = rig.manager.open(list(range(9)))
        assert rig.manager.length(again) == 8
        rig.step([again], [2])
        rig.manager.close(again)


@pytest.mark.parametrize("layer", range(LAYERS))
def test_nan_that_is_read_is_named(rig: Rig, layer: int) -> None:
    seq, other = rig.start(6), rig.start(7)
    block = int(rig.manager.block_table(other)[1])
    rig.plant(block, float("nan"), slot=1, layer=layer)
    error = misuse(
        Misuse.NAN, lambda: rig.step([seq, other], [1, 1]), block=block, seq=other, step=3
    )
    where = f"layer {layer}: position 5 of sequence {other}, slot 1 of block {block}"
    assert where in str(error)


def test_nan_behind_what_is_read_is_no_error(rig: Rig) -> None:
    seq = rig.start(5)
    block = int(rig.manager.block_table(seq)[1])
    assert rig.nan(block) == [False, True, True, True]
    rig.step([seq], [1])


def test_nan_of_the_model_is_not_blamed_on_the_cache(rig: Rig) -> None:
    seq = rig.start(6)
    rig.step([seq], [1], q=torch.full((1, 4, 8), float("nan")))


# ---- the engine -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-llm")
    save_tiny_llm(path)
    return path


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[AttentionBackend]]:
    """The backends that LLMs make from now on, without the sanitizer around them."""
    made: list[AttentionBackend] = []

    def make(*args: Any, **kwargs: Any) -> AttentionBackend:
        made.append(make_backend(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr("pagedkv.engine.llm.make_backend", make)
    yield made


PROMPTS = ["one", "a second prompt", "x", "the third is the longest of all the prompts"]
GREEDY = SamplingParams(temperature=0, max_tokens=12)
DRAWN = SamplingParams(temperature=1, seed=3, n=3, max_tokens=12, logprobs=2)
BEAMS = BeamSearchParams(beam_width=3, max_tokens=12)


def make(folder: Path, **settings: Any) -> LLM:
    return LLM(folder, **{"num_blocks": 64, "block_size": SIZE, **settings})


def tell_no_time(llm: LLM) -> None:
    """Who yields, and so what is found again, would depend on how long steps take."""
    executor = llm.engine.core.executor
    collect = executor.collect
    executor.collect = lambda ticket: replace(collect(ticket), duration=0.0)


def everything(llm: LLM) -> list[object]:
    """Prompts, samples, beams, hits, a reset: tokens, scores and log-probabilities."""
    runs: list[list[RequestOutput]] = []
    for _ in range(2):
        runs.append(llm.generate(PROMPTS, GREEDY))
        runs.append(llm.generate(PROMPTS, DRAWN))
        runs.append(llm.beam_search(PROMPTS[1:], BEAMS))
    llm.engine.reset_prefix_cache()
    runs.append(llm.generate(PROMPTS, DRAWN))
    return [
        (s.token_ids, s.logprobs, s.score, output.num_cached_tokens)
        for run in runs
        for output in run
        for s in output.outputs
    ]


@pytest.mark.parametrize(
    "settings",
    [
        {"attention_backend": "native", "deterministic": True},
        {"attention_backend": "native", "deterministic": True, "num_blocks": 17},
        {"attention_backend": "gather"},
        {"attention_backend": "reference"},
        {"attention_backend": "native", "dtype": "bfloat16"},
        {"attention_backend": "native", "enable_prefix_caching": False},
    ],
    ids=lambda settings: " ".join(str(value) for value in settings.values()),
)
def test_the_same_bits_with_and_without(folder: Path, settings: dict[str, Any]) -> None:
    plain, watched = (make(folder, sanitize=on, **settings) for on in (False, True))
    for llm in (plain, watched):
        tell_no_time(llm)
    assert everything(watched) == everything(plain)
    if "num_blocks" in settings:
        preempted = [llm.engine.core.scheduler.stats.num_preemptions for llm in (plain, watched)]
        assert preempted[0] == preempted[1] > 0


def test_an_abort_in_the_middle_runs_clean(folder: Path) -> None:
    llm = make(folder, sanitize=True)
    for name in ("first", "second"):
        llm.engine.add_request(name, PROMPTS[3], DRAWN)
    for _ in range(4):
        llm.engine.step()
    llm.engine.abort_request("first")
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
    everything(llm)


def test_an_interrupt_runs_clean(folder: Path) -> None:
    llm = make(folder, sanitize=True)

    def interrupt(outputs: Sequence[RequestOutput], stats: StepStats | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, DRAWN, on_step=interrupt)
    everything(llm)


def poison(store: AttentionBackend) -> None:
    """NaN in every block of a store, behind the back of the manager."""
    ids = np.arange(1, store.spec.num_blocks + 1, dtype=np.int32)
    store.write_blocks(ids, torch.full_like(store.read_blocks(ids), float("nan")))


@pytest.mark.parametrize("backend", BACKENDS)
def test_generate_raises_what_was_found(
    folder: Path, stores: list[AttentionBackend], backend: str
) -> None:
    llm = make(folder, sanitize=True, attention_backend=backend)

    def damage(outputs: Sequence[RequestOutput], stats: StepStats | None) -> None:
        poison(stores[0])

    error = misuse(Misuse.NAN, lambda: llm.generate(PROMPTS[3], GREEDY, on_step=damage), step=1)
    assert "layer 0: position 0" in str(error) and "allocated in step 0" in str(error)


def test_generate_raises_the_first_error_though_cleaning_up_finds_more(
    folder: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    llm = make(folder, sanitize=True, replay_log=log)
    manager = llm.engine.core.scheduler.manager

    def damage(outputs: Sequence[RequestOutput], stats: StepStats | None) -> None:
        manager.pool.counts[1:] += 1

    with pytest.raises(SanitizerError) as caught:
        llm.generate(PROMPTS, GREEDY, on_step=damage)
    assert caught.value.__context__ is None and caught.value.kind == Misuse.COUNT
    first = str(caught.value).splitlines()[0]
    assert f'"error": "{first}\\n' in log.read_text().splitlines()[-1]
    assert log.read_text().count('"error"') == 1


def test_a_log_whose_name_no_file_can_have_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written: embedded null byte"):
        make(folder, sanitize=True, replay_log="a\0b")


def test_generate_raises_the_first_error_though_ending_the_batch_finds_more(
    folder: Path, stores: list[AttentionBackend]
) -> None:
    llm = make(folder, sanitize=True)
    manager = llm.engine.core.scheduler.manager

    class Executor:
        """Breaks the table of the cache, and then a check of its own."""

        def submit(self, step: Step) -> Ticket:
            return Ticket(step.index)

        def collect(self, ticket: Ticket) -> Result:
            assert manager.sanitizer is not None
            manager.table.blocks[:] = 10**6
            manager.sanitizer.fail(Misuse.NAN, "planted")

    llm.engine.core.executor = Executor()
    misuse(Misuse.NAN, lambda: llm.generate(PROMPTS, GREEDY), step=0)


@pytest.mark.parity
def test_the_embedded_model_gives_the_same_text() -> None:
    prompts = ["The capital of France is", "The capital of France is Paris and that of Italy is"]
    params = [
        SamplingParams(temperature=0, max_tokens=12),
        SamplingParams(seed=1, n=2, max_tokens=12),
    ]
    texts = []
    for sanitize in (False, True):
        llm = LLM("smollm2-135m-instruct", num_blocks=64, deterministic=True, sanitize=sanitize)
        runs = [llm.generate(prompts, params) for _ in range(2)]
        texts.append([s.text for run in runs for output in run for s in output.outputs])
    assert texts[0] == texts[1]
