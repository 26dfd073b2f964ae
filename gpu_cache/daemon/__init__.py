"""What operators and routers see of a running cache: a Unix socket, a residency feed, metrics (docs/cache.md)."""

from adapterd.gpu_cache.daemon.client import DaemonClient
from adapterd.gpu_cache.daemon.daemon import Daemon

__all__ = ["Daemon", "DaemonClient"]
