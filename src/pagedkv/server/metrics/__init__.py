"""What Prometheus is told of a server."""

from pagedkv.server.metrics.responses import ResponseCounter
from pagedkv.server.metrics.routes import Metrics, router

__all__ = ["Metrics", "ResponseCounter", "router"]
