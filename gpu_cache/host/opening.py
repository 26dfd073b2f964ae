"""The host that a configuration asks for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from adapterd.gpu_cache.config import CacheConfig
from adapterd.gpu_cache.device import Device
from adapterd.gpu_cache.eviction import Policy
from adapterd.gpu_cache.host.host_cache import HostCache
from adapterd.gpu_cache.host.interface import Host
from adapterd.gpu_cache.host.loading import store_loader
from adapterd.gpu_cache.host.pool import FairPool
from adapterd.gpu_cache.slabs import DeviceSlab

if TYPE_CHECKING:
    from adapterd.loader.base_model import BaseSpec
    from adapterd.loader.sources import Source
    from adapterd.loader.trust.policy import TrustStore


@contextmanager
def open_host(
    config: CacheConfig,
    device: Device,
    source: Source | None,
    trust: TrustStore | None,
    base: BaseSpec,
    policy: Policy,
) -> Iterator[Host]:
    """A host that is closed with the context.

    Raises:
        ValueError: no source or no trust store.
        AdapterdError: SETTINGS_INVALID, DEVICE_ERROR, STORAGE_UNAVAILABLE; of a loader process what
            `process.opening.open_client` raises. Its own policy is least recently used, whatever `policy` is.
    """
    if config.loader == "process":
        from adapterd.gpu_cache.host.process.opening import open_client

        with open_client(config, source, trust, base) as client:
            yield client
        return
    with store_loader(config, source, trust) as loader:
        slab = DeviceSlab(device.allocate_host(config.host_pages * config.page_bytes), config.page_bytes)
        host = HostCache(
            slab,
            base,
            loader=loader,
            pool=FairPool.of(config.loader_threads, config.tenants, config.default_budget),
            dtype=config.dtype,
            sharding=config.sharding,
            tenants=config.tenants,
            default_budget=config.default_budget,
            policy=policy,
            keep_host=config.keep_host,
        )
        try:
            yield host
        finally:
            host.close(config.close_seconds)
