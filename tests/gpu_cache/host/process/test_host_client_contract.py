"""The contract of `Host`, kept over the socket."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from adapterd.gpu_cache import TenantBudget
from adapterd.gpu_cache.host.interface import Host
from contracts.host import HostContract
from contracts.host_user import SECONDS
from fakes.adapters import MemoryLoader
from fakes.loader_thread import LoaderThread


class TestHostClient(HostContract):
    @pytest.fixture
    def hosts(self, tmp_path: Path) -> Iterator[list[Host]]:
        self.folder, self.loaders = tmp_path / "run", list[LoaderThread]()
        before = set(threading.enumerate())
        hosts: list[Host] = []
        yield hosts
        for host in hosts:
            host.close(SECONDS)
        for each in self.loaders:
            each.stop()
        assert set(threading.enumerate()) <= before, "threads are left over"

    def make(
        self, loader: MemoryLoader, *, pages: int, tenants: Mapping[str, TenantBudget], keep_host: bool, threads: int
    ) -> Host:
        self.folder.mkdir(mode=0o700, exist_ok=True)
        path = self.folder / str(len(self.loaders))
        serving = LoaderThread(path, loader, pages=pages, tenants=tenants, keep_host=keep_host, threads=threads)
        self.loaders.append(serving)
        return serving.worker(loader.base)
