"""Faults in the attention backends' own Python."""

from __future__ import annotations

from kinds import Mutant

_KERNELS = "attention/test_kernels.py::test_"
_STORE = "attention/test_store.py::test_"
_REFUSALS = "attention/test_refusals.py::test_"

MUTANTS = (
    # ---- attention
    Mutant(
        "the null block passes for a used one",
        ("inert garbage", "input totality"),
        "attention/batch.py",
        "used & ((tables < 1) | (tables > spec.num_blocks))",
        "used & ((tables < 0) | (tables > spec.num_blocks))",
        (_REFUSALS + "block_id_outside_the_pool_is_refused_where_it_is_used",),
    ),
    Mutant(
        "a slot of the null block may be written",
        ("inert garbage",),
        "attention/batch.py",
        "first, end = spec.block_size, (spec.num_blocks + 1) * spec.block_size",
        "first, end = 0, (spec.num_blocks + 1) * spec.block_size",
        (_REFUSALS + "impossible_batch_is_refused",),
    ),
    Mutant(
        "a plan keeps the caller's buffers",
        ("isolation",),
        "attention/batch.py",
        'copy = given.astype(dtype, order="C")',
        "copy = np.ascontiguousarray(given, dtype)",
        (_KERNELS + "plan_keeps_its_own_table_when_the_caller_reuses_the_buffer",),
    ),
    Mutant(
        "a copy may read what another of the call writes",
        ("copy ordering",),
        "attention/batch.py",
        "np.flatnonzero(np.isin(destination, source))",
        "np.flatnonzero(destination == source)",
        (_STORE + "impossible_copy_is_refused_and_changes_nothing",),
    ),
    Mutant(
        "addresses of slots wrap at 32 bits",
        ("boundaries",),
        "attention/batch.py",
        "table[positions // block_size].astype(np.int64) * block_size",
        "table[positions // block_size] * np.int32(block_size)",
        (_STORE + "address_of_a_slot_does_not_wrap_at_32_bits",),
    ),
    Mutant(
        "a copy moves the whole block",
        ("copy ordering",),
        "attention/torch_store.py",
        "self._data[:, :, destination, :filled] = self._data[:, :, source, :filled]",
        "self._data[:, :, destination] = self._data[:, :, source]",
        (_STORE + "copy_moves_the_filled_slots_of_all_layers_only",),
    ),
    Mutant(
        "a token sees the one after it",
        ("inert garbage",),
        "attention/gather.py",
        "torch.arange(length) <= own[:, None]",
        "torch.arange(length) <= own[:, None] + 1",
        (_KERNELS + "chunk_across_spans_equals_reference",),
    ),
    Mutant(
        "what pads a shorter row is attended to",
        ("inert garbage",),
        "attention/gather.py",
        "if (lengths != longest).any():",
        "if False:",
        (_KERNELS + "decode_rows_of_like_length_see_nothing_past_their_ends",),
    ),
    Mutant(
        "a shorter row is padded with what its table happens to hold",
        ("inert garbage",),
        "attention/gather.py",
        "positions = np.arange(longest) * (np.arange(longest) < lengths[:, None])",
        "positions = np.arange(longest) + 0 * lengths[:, None]",
        (_KERNELS + "decode_rows_of_like_length_see_nothing_past_their_ends",),
    ),
    Mutant(
        "a plan of another pool is run",
        ("input totality",),
        "attention/gather.py",
        "or plan.owner is not self",
        "or plan.owner is None",
        (_REFUSALS + "plan_of_another_pool_is_refused",),
    ),
    Mutant(
        "rows are planned with each other's tables",
        ("isolation",),
        "attention/native.py",
        "            batch.tables,\n",
        "            batch.tables[::-1].copy(),\n",
        (_KERNELS + "hit_and_miss_in_one_step_equal_their_solo_runs",),
    ),
    Mutant(
        "the kernels take the null block for a place of the plan",
        ("inert garbage",),
        "attention/native.py",
        "            batch.slots,\n",
        "            batch.slots * 0,\n",
        (_KERNELS + "only_the_planned_slots_are_written",),
    ),
    Mutant(
        "rows read alone what they are asked to share",
        ("mirrors",),
        "attention/native.py",
        "            share,\n",
        "            False,\n",
        ("attention/test_sharing.py::test_the_counter_shows_what_was_shared",),
    ),
)
