"""Memory management for LLM serving: a paged KV cache, its block table, and an engine on them."""

__version__ = "0.1.0"
