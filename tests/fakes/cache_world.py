"""A cache without threads: loader jobs, copies and kernels run when the test says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from adapterd.gpu_cache import AdapterCache, CacheConfig, Device, Lease, Resident, TenantBudget
from adapterd.gpu_cache.eviction import GuardedPolicy, Policy
from adapterd.gpu_cache.host.host_cache import HostCache
from adapterd.gpu_cache.host.pool import FairPool, LoaderPool
from adapterd.gpu_cache.slabs import DeviceSlab
from adapterd.loader.errors import Code

from .adapters import PAGE_BYTES, ManualPool, MemoryLoader, wrong_pages
from .devices import DefectiveDevice, SimulatedDevice


class World:
    """A cache over a simulated device, a memory loader and a manual pool.

    What a serving thread does is done under the device's `serving`: whatever would wait for a device is an error.
    `violations` lists what kernels read that was not theirs: filled when they execute.
    """

    def __init__(
        self,
        *,
        vram: int = 8,
        host: int = 16,
        seed: int = 0,
        defect: Callable[[SimulatedDevice], DefectiveDevice] | None = None,
        shuffle_jobs: bool = False,
        policy: Policy | None = None,
        host_kind: type[HostCache] = HostCache,
        **settings: object,
    ) -> None:
        self.loader = MemoryLoader()
        self.pool = ManualPool(seed if shuffle_jobs else None)
        self._simulated = SimulatedDevice(seed)
        self.device = self._simulated if defect is None else defect(self._simulated)
        config = CacheConfig(
            vram_bytes=vram * PAGE_BYTES,
            host_bytes=host * PAGE_BYTES,
            page_bytes=PAGE_BYTES,
            **settings,  # type: ignore[arg-type]
        )
        guarded = GuardedPolicy.of(policy)
        self.host = host_over(self.loader, config, self.device, self.pool, kind=host_kind, policy=guarded)
        self.cache = AdapterCache(config, base=self.loader.base, host=self.host, device=self.device, policy=guarded)
        self.violations: list[str] = []

    def __enter__(self) -> Self:
        self.cache.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.cache.__exit__(kind, e, tb)
        self.device.drain()

    def acquire(self, wish: str | Sequence[tuple[str, float]] | None, tenant: str = "", priority: int = 0) -> Lease:
        """For the tenant that the first REF names, unless another is given."""
        named = wish if isinstance(wish, str) else wish[0][0] if wish else "acme/"
        with self._simulated.serving():
            return self.cache.acquire(wish, tenant=tenant or named.partition("/")[0], priority=priority)

    def settle(self) -> None:
        """Runs everything until nothing is left to do."""
        busy = True
        while busy:
            busy = self.pool.run_one()
            self.pump()
            while self.device.run(100):
                busy = True
            busy = busy or self.pool.busy
        self.pump()

    def pump(self) -> None:
        with self._simulated.serving():
            self.cache.pump()

    def ready(self, wish: str | Sequence[tuple[str, float]], tenant: str = "") -> Lease:
        lease = self.acquire(wish, tenant)
        self.settle()
        assert lease.ready, f"{lease!r}: {lease.problem}"
        return lease

    def failure(self, wish: str | Sequence[tuple[str, float]], tenant: str = "") -> Code:
        lease = self.acquire(wish, tenant)
        self.settle()
        assert lease.problem is not None, f"{lease!r} did not fail"
        return lease.problem.code

    def step(self, *leases: Lease) -> None:
        """One step that reads all pages of the leases; the kernel only executes when the device runs."""
        with self._simulated.serving(), self.cache.begin_step(leases):
            for lease in leases:
                for resident, _ in lease.composition:
                    self.launch_check(resident)

    def launch_check(self, resident: Resident) -> None:
        """Enqueues a kernel that reads all pages of `resident`."""
        self.device.launch(self.device.compute, lambda: self._check(resident))

    @property
    def copied(self) -> int:
        """Pages that were enqueued for copying."""
        return self._simulated.copied_bytes // PAGE_BYTES

    @property
    def zeroed(self) -> int:
        """Pages that were enqueued for scrubbing."""
        return self._simulated.zeroed_bytes // PAGE_BYTES

    @property
    def vram_free(self) -> int:
        """Pages."""
        return self.cache.statistics().vram_free_bytes // PAGE_BYTES

    @property
    def host_free(self) -> int:
        """Pages."""
        return self.cache.statistics().host_free_bytes // PAGE_BYTES

    def _check(self, resident: Resident) -> None:
        for index in wrong_pages(self.cache.arena, resident):
            self.violations.append(f"{resident.key.digest[:8]} page {index} (arena page {resident.pages[index]})")


def host_over(
    loader: MemoryLoader,
    config: CacheConfig,
    device: Device,
    pool: LoaderPool | None = None,
    *,
    kind: type[HostCache] = HostCache,
    policy: Policy | None = None,
) -> HostCache:
    """The host of a cache over this loader; with a pool of the test's, all its jobs and answers run there."""
    return kind(
        DeviceSlab(device.allocate_host(config.host_pages * config.page_bytes), config.page_bytes),
        loader.base,
        loader=loader,
        pool=pool or FairPool.of(config.loader_threads, config.tenants, config.default_budget),
        answers=pool,
        tenants=config.tenants,
        default_budget=config.default_budget,
        policy=policy,
        keep_host=config.keep_host,
    )


def pages(count: int) -> int:
    """Bytes."""
    return count * PAGE_BYTES


def shares(**guaranteed: int) -> dict[str, TenantBudget]:
    """Budgets that guarantee that many pages of VRAM."""
    return {t: TenantBudget(guaranteed_vram_bytes=pages(n)) for t, n in guaranteed.items()}
