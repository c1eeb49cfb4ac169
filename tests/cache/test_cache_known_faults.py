"""Faults that other paged caches shipped, each with its smallest input. P blocks of B tokens."""

from __future__ import annotations

import random

import numpy as np
import pytest
from cache_helpers import close_all, grow, refused, remember, write

from pagedkv.cache import BlockManager, OutOfBlocks


class Slots:
    """K/V of a toy model: each slot holds the fingerprint of everything that it may depend on."""

    def __init__(self, m: BlockManager) -> None:
        self.m, self.slots = m, {}

    def run(self, tokens: list[int], **name: object) -> int:
        """One request: computes what is not cached, reads everything back, closes."""
        seq = self.m.open(tokens, **name)
        start = self.m.length(seq)
        reservation = self.m.reserve([seq], [len(tokens) - start])
        for source, destination, filled in reservation.copies.tolist():
            size = self.m.block_size
            for i in range(filled):
                self.slots[destination * size + i] = self.slots[source * size + i]
        for position, slot in enumerate(reservation.slots.tolist(), start):
            self.slots[slot] = (tuple(tokens[: position + 1]), tuple(sorted(name.items())))
        read = [self.slots[slot] for slot in self.m.tables([seq]).slots().tolist()]
        expected = [
            (tuple(tokens[: p + 1]), tuple(sorted(name.items()))) for p in range(len(tokens))
        ]
        assert read == expected, "a sequence reads K/V that is not its own"
        self.m.commit([seq], [tokens[start:]])
        self.m.close(seq)
        return start


# ---- leaks and roll-back


def test_leak_hits_of_a_request_that_found_no_room_are_given_back() -> None:
    """Avarok/atlas PR#373 (b): roll-back after a failed suffix missed the hits already held."""
    m = BlockManager(4, 4)
    a = list(range(8))
    remember(m, a)
    r0 = write(m, range(50, 58))
    before = m.state_key()
    for _ in range(50):
        prompt = [*a, *range(90, 98)]
        assert m.match(prompt).demand == 4 > m.num_free_blocks + m.num_cached_blocks
        seq = m.open(prompt)
        with refused(m, OutOfBlocks, "2 blocks needed, 0 free"):
            m.reserve([seq], [16 - m.length(seq)])
        m.close(seq)
        assert m.state_key() == before
    assert len(m.evict(9)) == 2
    m.close(r0)


def test_double_hold_a_request_refused_once_is_admitted_later_with_its_blocks_once() -> None:
    """neuralmagic/vllm PR#92 (vllm PR#18411): hits kept by a request that was not scheduled."""
    m = BlockManager(4, 4)
    prompt = [*range(8), *range(90, 98)]
    remember(m, prompt[:8])
    r0 = write(m, range(50, 58))
    seq = m.open(prompt)
    with refused(m, OutOfBlocks, "2 blocks needed"):
        m.reserve([seq], [8 + 8 - m.length(seq)])
    m.close(r0)
    m.reserve([seq], [16 - m.length(seq)])
    table = m.block_table(seq).tolist()
    assert len(table) == len(set(table)) == 4
    m.cancel([seq])
    m.close(seq)


# ---- reference counts, admission, eviction


def test_use_after_free_eviction_never_takes_a_cached_block_that_is_held() -> None:
    """Avarok/atlas PR#373 (a): evicting a node zeroed the count of a block in use."""
    m = BlockManager(3, 2)
    r1 = write(m, [1, 2, 3, 4])
    held = m.block_table(r1).tolist()
    assert m.evict(9).tolist() == []
    r2 = m.open([7, 8, 9, 9])
    with refused(m, OutOfBlocks, "2 blocks needed, 1 free and 0 cached"):
        m.reserve([r2], [4])
    assert m.block_table(r1).tolist() == held and [m.refcount(b) for b in held] == [1, 1]
    close_all(m, r1, r2)


def test_negative_count_a_freed_block_can_be_had_again() -> None:
    """MinivLLM PR#87: counts started at 0, the first free made -1."""
    m = BlockManager(2, 4, prefix_caching=False)
    first = write(m, [1])
    assert m.refcount(m.block_table(first)[0]) == 1
    m.close(first)
    assert [m.refcount(b) for b in (1, 2)] == [0, 0]
    both = write(m, [1, 2, 3, 4, 5])
    assert [m.refcount(b) for b in (1, 2)] == [1, 1]
    m.close(both)


def test_stale_key_a_recycled_block_is_not_found_under_its_old_content() -> None:
    """MinivLLM PR#87, kvcached#362: the old key still led to the recycled block."""
    m = BlockManager(2, 4)
    slots = Slots(m)
    slots.run([*range(1, 9)])
    slots.run([*range(11, 19)])
    assert slots.run([*range(1, 9)]) == 0


def test_destroyed_by_use_a_hit_on_a_cached_block_keeps_its_key() -> None:
    """ROCm/ATOM PR#902: a hit went through plain allocation, which dropped the key."""
    m = BlockManager(4, 4)
    slots = Slots(m)
    assert [slots.run([*range(8)]) for _ in range(3)] == [0, 7, 7]


def test_admission_counts_hits_that_leave_the_free_blocks() -> None:
    """ROCm/ATOM PR#902: hits in the free list were not charged, allocation ran out half way."""
    m = BlockManager(4, 4)
    a = [*range(8)]
    remember(m, a)
    before = m.snapshot()
    assert m.match([*a, *range(20, 32)]).demand == 5
    assert m.match([*a, *range(20, 28)]).demand == 4
    assert m.snapshot() == before
    seq = write(m, [*a, *range(20, 28)])
    assert m.cached_tokens(seq) == 8 and m.num_held_blocks == 4
    m.close(seq)


def test_use_after_free_hits_are_not_evicted_by_their_own_request() -> None:
    """vllm#37076: the block chosen as a hit was evicted by the same allocation call."""
    m = BlockManager(3, 4)
    slots = Slots(m)
    slots.run([*range(8)])
    slots.run([50, 51, 52, 53])  # the hits are the oldest cached blocks now
    assert slots.run([*range(8), 60, 61, 62, 63]) == 8


def test_lost_hits_looking_up_comes_before_evicting() -> None:
    """vllm#42948: scratch blocks were allocated first and evicted what look-up would find."""
    m = BlockManager(4, 4)
    remember(m, range(16))
    assert remember(m, range(16)) == 15


def test_group_blocks_shared_blocks_are_released_once_and_with_the_last_member() -> None:
    """openvino.genai PR#4332, #799: shared blocks were counted once a sequence."""
    m = BlockManager(6, 2, prefix_caching=False)
    beams = [write(m, [1, 2, 3, 4])]
    beams += m.fork(beams[0], 2)
    for beam, token in zip(beams, (5, 6, 7), strict=True):
        grow(m, beam, [token])
    assert m.num_held_blocks == 5
    for beam in beams[:2]:
        m.close(beam)
    assert m.num_free_blocks == 3
    with refused(m, KeyError, str(beams[0])):
        m.close(beams[0])
    assert m.block_table(beams[2]).tolist()[:2] == [1, 2]
    m.close(beams[2])
    assert m.num_free_blocks == 6


def test_wrong_unit_room_is_counted_in_blocks_not_in_tokens() -> None:
    """sglang#4602, PR#9989, #9982: free tokens were plenty, but every token needed a page."""
    m = BlockManager(4, 8)
    seqs = [write(m, range(100 * i, 100 * i + 8)) for i in range(4)]
    assert not m.can_reserve(seqs, [1] * 4)
    m.close(seqs.pop())
    assert m.can_reserve(seqs[:1], [1]) and not m.can_reserve(seqs, [1] * 3)
    m.reserve(seqs[:1], [8])
    close_all(m, *seqs)


def test_unreachable_tails_the_tail_of_the_oldest_chain_is_evicted_first() -> None:
    """LMCache#443, Mooncake#492, imp PR#1938: the head went first, its chain was dead weight."""
    m = BlockManager(6, 4)
    remember(m, range(16))
    remember(m, range(50, 66))
    assert m.match([*range(16), 0]).cached_tokens == 8
    m.check()


@pytest.mark.parametrize("size", [1, 4])
def test_counter_drift_the_states_of_the_blocks_always_add_up(size: int) -> None:
    """mllm PR#656: the evictable size went negative as nodes got children and locks moved."""
    draw = random.Random(656)
    m = BlockManager(12, size)
    seqs, leases = [], []
    for _ in range(400):
        action = draw.choice(["open", "open", "close", "lease", "release", "evict"])
        if action == "open":
            prompt = [draw.randrange(2) for _ in range(draw.randint(1, 3 * size))]
            if m.match(prompt).demand <= m.num_free_blocks + m.num_cached_blocks:
                seqs.append(write(m, prompt))
        elif action == "close" and seqs:
            m.close(seqs.pop(draw.randrange(len(seqs))))
        elif action == "lease" and seqs:
            leases.append(m.lease(m.block_table(draw.choice(seqs)).copy()))
        elif action == "release" and leases:
            leases.pop(draw.randrange(len(leases))).release()
        elif action == "evict":
            m.evict(draw.randint(0, 3))
        held = {block for s in seqs for block in m.block_table(s).tolist()}
        leased = {block for lease in leases for block in lease.blocks.tolist()}
        assert m.num_held_blocks == len(held)
        assert m.num_draining_blocks == len(leased - held)
        assert m.num_free_blocks + m.num_cached_blocks == 12 - len(held | leased)
        assert m.num_cached_blocks >= 0 and m.num_free_blocks >= 0
        m.check()
    for lease in leases:
        lease.release()
    close_all(m, *seqs)


@pytest.mark.parametrize("step", [1, 2, 9])
def test_parent_not_requeued_evicting_everything_goes_leaf_first_and_returns_all(step: int) -> None:
    """sglang#5499, PR#22592: a parent was not queued again once its last child was evicted."""
    m = BlockManager(8, 2)
    chain = write(m, range(6))
    other = write(m, [0, 1, 8, 9])  # another child of the first block
    first, second, third = m.block_table(chain).tolist()
    sibling = m.block_table(other).tolist()[1]
    close_all(m, chain, other)
    evicted: list[int] = []
    while m.num_cached_blocks:
        evicted += m.evict(step).tolist()
        m.check()
    assert sorted(evicted) == sorted([first, second, third, sibling])
    assert evicted.index(third) < evicted.index(second) < evicted.index(first) == 3
    assert m.num_free_blocks == 8 and m.match([*range(6)]).cached_tokens == 0


def test_lazy_order_victims_are_those_of_a_naive_search_for_the_oldest() -> None:
    """sglang-omni PR#1724: stale entries, repaired only when popped, hid the true next victim."""
    draw = random.Random(1724)
    m = BlockManager(24, 2)
    released: dict[int, int] = {}  # cached block: when it was released
    moments, victims_seen = iter(range(10**6)), 0

    def note(blocks: list[int]) -> None:
        """Blocks that have become cached, in the order given; the rest has left."""
        cached = {b for b in range(1, 25) if m.refcount(b) == 0 and m.pool.extents[b]}
        for block in set(released) - cached:
            del released[block]
        for block in blocks:
            if block in cached and block not in released:
                released[block] = next(moments)
        assert cached == set(released)

    def oldest(k: int) -> list[int]:
        return sorted(released, key=released.__getitem__)[: max(k, 0)]

    running: list[int] = []
    for _ in range(500):
        if draw.random() < 0.2:
            k = draw.randint(1, 4)
            expected = oldest(k)
            assert m.evict(k).tolist() == expected
            note([])
        elif len(running) == 3 or (running and draw.random() < 0.4):
            seq = running.pop(draw.randrange(len(running)))
            row = m.block_table(seq).tolist()
            m.close(seq)
            note(row[::-1])
        else:
            prompt = [draw.randrange(3) for _ in range(draw.randint(1, 12))]
            seq = m.open(prompt)
            note([])
            rest = prompt[m.length(seq) :]
            expected = oldest(m.demand([seq], [len(rest)]) - m.num_free_blocks)
            kept = set(released) - set(expected)
            copies = m.reserve([seq], [len(rest)]).copies
            note([])
            assert set(released) == kept
            victims_seen += len(expected)
            m.commit([seq], [rest])
            note(copies[:, 0].tolist())
            running.append(seq)
    assert victims_seen > 50
    close_all(m, *running)


# ---- stale or foreign content


def test_stale_key_replaced_history_is_not_found_under_the_old_one() -> None:
    """vllm#49449: a session's tokens were replaced, its block keys kept."""
    m = BlockManager(8, 16)
    prompt = [*range(15)]
    session = write(m, prompt)
    grow(m, session, [70])  # fills and publishes the block
    m.truncate(session, 15)
    grow(m, session, [71])
    assert m.match([*prompt, 70, 99]).cached_tokens == 16
    assert m.match([*prompt, 71, 99]).cached_tokens == 16
    other = write(m, [*prompt, 70])
    assert m.block_table(session).tolist() != m.block_table(other).tolist()
    close_all(m, session, other)


def test_replaced_history_each_reads_its_own_content() -> None:
    """vllm#49449: the K/V under a key has to be that of the key's tokens."""
    slots = Slots(BlockManager(8, 16))
    prompt = [*range(15)]
    for last in (70, 71, 70, 71):
        slots.run([*prompt, last, 99])


def test_foreign_content_interleaved_documents_never_mix() -> None:
    """sglang#4593: parts of one document appeared in the answer about another."""
    draw = random.Random(4593)
    m = BlockManager(32, 4)
    content: dict[int, int] = {}
    seqs = {letter: m.open([letter] * 20) for letter in range(6)}
    for _ in range(400):
        letter = draw.randrange(6)
        seq = seqs[letter]
        if m.length(seq) >= 20 or not m.can_reserve([seq], [1]):
            m.close(seq)
            seq = seqs[letter] = m.open([letter] * draw.randint(1, 20))
        elif draw.random() < 0.1:
            m.truncate(seq, draw.randint(0, m.length(seq)))
        k = draw.randint(1, 5)
        if m.can_reserve([seq], [k]):
            r = m.reserve([seq], [k])
            for source, destination, filled in r.copies.tolist():
                for i in range(filled):
                    content[destination * 4 + i] = content[source * 4 + i]
            content |= dict.fromkeys(r.slots.tolist(), letter)
            m.commit([seq], [[letter] * k])
        for other, s in seqs.items():
            read = {content[slot] for slot in m.tables([s]).slots().tolist()}
            assert read <= {other}, f"document {other} reads {read}"
    close_all(m, *seqs.values())


def test_mutable_entry_a_later_request_does_not_change_what_is_stored() -> None:
    """jjang-ai/vmlx#198 (3): the cache gave out its live object, a request appended to it."""
    m = BlockManager(8, 4)
    prompt = [*range(6)]
    remember(m, prompt)
    first = m.open([*prompt, 90])
    grow(m, first, [90, 91, 92, 93, 94])
    second = m.open([*prompt, 99])
    assert m.cached_tokens(second) == 6
    close_all(m, first, second)


@pytest.mark.parametrize("size", [2, 4])
def test_granularity_names_are_of_the_block_size_of_their_pool(size: int) -> None:
    """kvcached#446, PR#451: keys of one block size were put on blocks of another."""
    slots = Slots(BlockManager(8, size))
    assert [slots.run([*range(12)]) for _ in range(4)] == [0, 11, 11, 11]


def test_stale_weights_a_reset_takes_effect_even_while_requests_run() -> None:
    """vllm#9744, lmdeploy#4917, vllm-omni#6739, NeMo-RL PR#4018: reset refused, success told."""
    m = BlockManager(8, 4)
    remember(m, range(8))
    running = write(m, range(50, 56))
    m.reset_cache()
    assert m.match([*range(8), 9]).cached_tokens == 0
    grow(m, running, range(56, 60))  # computed in part with the old weights: never findable
    m.close(running)
    assert m.match([*range(50, 60)]).cached_tokens == 0
    assert remember(m, range(8)) == 0 and remember(m, range(8)) == 7


# ---- what is missing from the name


def test_missing_adapter_the_same_prompt_under_another_adapter_is_another_name() -> None:
    """vllm#3264 / PR#3263, llama.cpp#26207, vllm#44250, LMCache#2961: adapter not in the key."""
    slots = Slots(BlockManager(16, 4))
    prompt = [*range(12)]
    for expected in (0, 11):
        found = [slots.run(prompt, extra=e) for e in (b"adapter A", b"adapter B", None)]
        assert found == [expected] * 3


def test_adapter_name_only_a_reloaded_adapter_is_another_name() -> None:
    """vllm#30931, #42125: the key had the adapter's name, not which weights it stood for."""
    slots = Slots(BlockManager(16, 4))
    assert slots.run([*range(8)], extra=b"x\x00" + bytes([1])) == 0
    assert slots.run([*range(8)], extra=b"x\x00" + bytes([2])) == 0


def test_missing_tenant_prompts_of_other_tenants_are_not_found() -> None:
    """vllm#16016, llm-d-router#1389, vllm PR#53347: no isolation; a salt equal to an adapter."""
    slots = Slots(BlockManager(16, 4))
    prompt = [*range(8)]
    assert [slots.run(prompt, namespace=t) for t in ("T1", "T2", "T1")] == [0, 0, 7]
    assert slots.run(prompt, namespace="x") == 0
    assert slots.run(prompt, extra=b"x") == 0
    assert slots.run(prompt, namespace=b"x") == 0


def test_missing_image_equal_placeholders_of_other_pictures_never_share() -> None:
    """LMCache#690, PR#4783, ROCm/ATOM PR#1358, kekzl/imp PR#1180: the picture was not in the key.

    The two digests differ in one byte in the middle: cut to 16 bits at either end they are equal.
    """
    slots = Slots(BlockManager(32, 4))
    image = 7
    prompt = [1, 2, *[image] * 8, 3]
    one, two = bytes(32), bytes(16) + b"\1" + bytes(15)
    assert len(one) == len(two) and one[:2] == two[:2] and one[-2:] == two[-2:]
    for expected in (0, 10):  # the second time each finds its own
        for name in ({"extra": one}, {"extra": two}, {}):
            assert slots.run(prompt, **name) == expected, name


def test_unframed_fields_every_split_of_the_same_text_is_another_name() -> None:
    """tinfoilsh/confidential-model-router PR#386: ("org_1", "2345") equalled ("org_12345", "")."""
    text = b"org_12345"
    splits = [(text[:i], text[i:]) for i in range(len(text) + 1)]
    m = BlockManager(64, 4)
    for namespace, extra in splits:
        assert remember(m, range(6), namespace=namespace, extra=extra) == 0
    for namespace, extra in splits:
        assert remember(m, range(6), namespace=namespace, extra=extra) == 5


def test_partial_block_shared_as_full_only_common_tokens_are_cached() -> None:
    """vllm PR#5188: partly filled blocks were hashed and shared as if they were full."""
    slots = Slots(BlockManager(8, 4))
    slots.run([1, 2, 3, 4, 5, 6])
    assert slots.run([1, 2, 3, 4, 5, 99]) == 5
    assert slots.run([1, 2, 99]) == 2


# ---- edges of the block


@pytest.mark.parametrize("n", [1, 3, 4, 5, 7, 8, 9, 16])
def test_exact_multiple_a_full_hit_leaves_one_token_to_compute(n: int) -> None:
    """nano-vllm#144(2), PR#199, vllm PR#11186/#17999, mlx-lm PR#1581, mattn/tensai PR#221."""
    slots = Slots(BlockManager(8, 4))
    assert [slots.run([*range(n)]) for _ in range(3)] == [0, n - 1, n - 1]


def test_negative_zero_the_last_page_of_an_exact_multiple_is_full() -> None:
    """MinivLLM PR#87: the tokens in the last block came out as 0 at exact multiples."""
    m = BlockManager(8, 4)
    for n in range(14):
        seq = write(m, range(n))
        expected = 4 if n == 0 else (n - 1) % 4 + 1
        assert m.tables([seq]).csr().last_page_len.tolist() == [expected]
        m.close(seq)


def test_migrated_exact_multiple_the_receiver_needs_one_block_more_for_the_next_token() -> None:
    """vllm PR#50558: decode needed a block more than prefill had sent; an assertion fell."""
    sender, receiver = BlockManager(4, 4), BlockManager(4, 4)
    sent = write(sender, range(8))
    seq, _, tokens = receiver.import_sequence(sender.export_sequence(sent))
    receiver.commit([seq], [tokens])
    assert len(receiver.block_table(seq)) == 2
    receiver.reserve([seq], [1])
    assert len(receiver.block_table(seq)) == 3
    receiver.commit([seq], [[8]])
    receiver.close(seq)
    sender.close(sent)


@pytest.mark.parametrize("length", range(1, 13))
def test_lookahead_drafts_past_a_block_edge_get_all_their_blocks(length: int) -> None:
    """vllm PR#16370, ROCm/ATOM PR#250: one block was checked although drafts cross an edge."""
    k = 5
    for accepted in range(k + 2):
        m = BlockManager(8, 4, prefix_caching=False)
        seq = write(m, range(length))
        owned = len(m.block_table(seq))
        assert m.demand([seq], [k + 1]) == -(-(length + k + 1) // 4) - owned
        slots = m.reserve([seq], [k + 1]).slots
        assert len(np.unique(slots)) == k + 1
        m.commit([seq], [range(accepted)])
        assert len(m.block_table(seq)) == -(-(length + accepted) // 4) == m.num_held_blocks
        m.close(seq)


def test_short_rows_have_a_page_each_and_a_last_page_within_its_bounds() -> None:
    """flashinfer#725, #320: rows shorter than a page read zeros; a bad last_page_len passed."""
    m = BlockManager(4, 16)
    seqs = [write(m, range(10 * n, 11 * n)) for n in (1, 1, 2)]
    csr = m.tables(seqs).csr()
    assert np.diff(csr.indptr).tolist() == [1, 1, 1]
    assert csr.last_page_len.tolist() == [1, 1, 2]
    close_all(m, *seqs)


# ---- forks


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_one_context_for_all_beams_siblings_never_read_each_other(size: int) -> None:
    """llama.cpp#3802: beams a-b-c-d and a-b-f-g wrote into one context and saw each other."""
    m = BlockManager(8, size)
    content: dict[int, str] = {}

    def append(beams: dict[int, str]) -> None:
        """One step: every beam writes its own token."""
        r = m.reserve(list(beams), [1] * len(beams))
        for source, destination, filled in r.copies.tolist():
            for i in range(filled):
                content[destination * size + i] = content[source * size + i]
        content.update(zip(r.slots.tolist(), beams.values(), strict=True))
        m.commit(list(beams), [[ord(token)] for token in beams.values()])

    def read(beam: int) -> str:
        return "".join(content[slot] for slot in m.tables([beam]).slots().tolist())

    one = m.open()
    for token in "ab":
        append({one: token})
    (two,) = m.fork(one)
    for mine, other in ("cf", "dg"):
        append({one: mine, two: other})
    assert (read(one), read(two)) == ("abcd", "abfg")
    (three,) = m.fork(two)  # the beams swap parents: the first goes on from the second
    m.close(one)
    append({three: "x", two: "y"})
    assert (read(three), read(two)) == ("abfgx", "abfgy")
    close_all(m, two, three)
