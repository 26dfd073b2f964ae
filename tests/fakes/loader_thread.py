"""A loader process without the process: the real server on a real socket, in a thread, over a loader in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from adapterd.gpu_cache.budgets import TenantBudget
from adapterd.gpu_cache.host.host_cache import HostCache
from adapterd.gpu_cache.host.loading import Loader
from adapterd.gpu_cache.host.pool import FairPool
from adapterd.gpu_cache.host.process.client import HostClient
from adapterd.gpu_cache.host.process.house import Bases, House
from adapterd.gpu_cache.host.process.server import LoaderServer
from adapterd.gpu_cache.host.process.slab import OwnedSlab
from adapterd.gpu_cache.host.process.sockets import Listener
from adapterd.loader.base_model import BaseSpec
from adapterd.loader.trust.policy import TrustStore
from fakes.adapters import PAGE_BYTES

SOURCE = "5" * 64


class StillTrust:
    """A trust file that stays as it is."""

    def __init__(self) -> None:
        self.store = TrustStore()
        self.reads = 0

    def look(self) -> None:
        """It is the same."""

    def read(self) -> None:
        self.reads += 1


@dataclass
class LoadersTrust:
    """A worker whose trust changes when the loader's does."""

    loader: Loader

    @property
    def changes(self) -> int:
        return self.loader.trust_changes

    def digest(self) -> str:
        return TrustStore().digest


class LoaderThread:
    """Serves `path` until `stop`."""

    def __init__(
        self,
        path: Path,
        loader: Loader,
        *,
        pages: int = 8,
        tenants: Mapping[str, TenantBudget] | None = None,
        keep_host: bool = True,
        threads: int = 2,
    ) -> None:
        self.path, self.trust = path, StillTrust()
        self._loader, self._options = loader, {"tenants": tenants or {}, "keep_host": keep_host}
        self._threads = threads
        self._slab = OwnedSlab(pages * PAGE_BYTES, PAGE_BYTES)
        self._listener = Listener(path)
        self.host: HostCache | None = None
        house = House(self._host_for, SOURCE, self.trust, self._slab.nbytes, PAGE_BYTES, Bases())  # type: ignore[arg-type]
        self.server = LoaderServer(
            self._listener.socket, house, self._slab.descriptor, lambda: self.host,
            starter=None, keep=True, clock=time.monotonic, usage_seconds=0.0,
        )  # fmt: skip
        self._thread = threading.Thread(target=self.server.run, name="fake-loader", daemon=True)
        self._thread.start()

    def hang_up(self) -> None:
        """All workers lose it; what its threads are at goes on."""
        self.server.end()
        self._thread.join(20)

    def unlist(self) -> None:
        """Nobody finds it any more."""
        self._listener.close()

    def stop(self) -> None:
        """As SIGTERM. Idempotent."""
        self.hang_up()
        if self.host is not None:
            self.host.close(20)
        self._listener.close()
        self._slab.close()

    def worker(self, base: BaseSpec, **options: object) -> HostClient:
        """A worker that is welcomed."""
        settings: dict[str, object] = {
            "base": base, "dtype": "auto", "page_bytes": PAGE_BYTES, "source": SOURCE,
            "trust": LoadersTrust(self._loader),
        }  # fmt: skip
        return HostClient(self.path, **(settings | options))  # type: ignore[arg-type]

    def _host_for(self, base: BaseSpec) -> HostCache:
        if self.host is None:
            pool = FairPool(self._threads, {}, None)
            self.host = HostCache(self._slab.slab, base, loader=self._loader, pool=pool, **self._options)  # type: ignore[arg-type]
        return self.host
