"""Reading and writing K/V through the block table."""

from pagedkv.attention.backends import choose_backend, make_backend
from pagedkv.attention.interface import AttentionBackend, AttentionBatch, KVSpec, Plan

__all__ = [
    "AttentionBackend",
    "AttentionBatch",
    "KVSpec",
    "Plan",
    "choose_backend",
    "make_backend",
]
