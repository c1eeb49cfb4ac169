"""The live page of the blocks, and what it is told."""

from pagedkv.server.dashboard.routes import router

__all__ = ["router"]
