"""The fake whose answers can be held back is a host like any other while they are not."""

from __future__ import annotations

from collections.abc import Mapping

from adapterd.gpu_cache import TenantBudget
from adapterd.gpu_cache.host.interface import Host
from adapterd.gpu_cache.host.pool import FairPool
from adapterd.gpu_cache.host.tier import PlainSlab
from contracts.host import HostContract
from fakes.adapters import PAGE_BYTES, MemoryLoader
from fakes.late_host import LateHost


class TestLateHost(HostContract):
    def make(
        self, loader: MemoryLoader, *, pages: int, tenants: Mapping[str, TenantBudget], keep_host: bool, threads: int
    ) -> Host:
        slab = PlainSlab(memoryview(bytearray(pages * PAGE_BYTES)), PAGE_BYTES)
        pool = FairPool.of(threads, tenants, TenantBudget())
        return LateHost(slab, loader.base, loader=loader, pool=pool, tenants=tenants, keep_host=keep_host)
