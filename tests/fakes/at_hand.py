"""Versions that a host has at hand: verified and packed, and in VRAM no more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from adapterd.gpu_cache import AdapterCache, LeaseState

from .adapters import Published
from .cache_world import World
from .devices import SimulatedDevice


def in_host_memory(world: World, name: str, pages: int = 2, **published: object) -> Published:
    """Verified and packed, and in VRAM no more."""
    version = world.loader.publish(name, pages, **published)  # type: ignore[arg-type]
    world.ready(name).release()
    with world.cache._lock:
        world.cache._stager.shelf.evict(world.cache._stager.entries[version.resolved.key])
    world.device.drain()
    world.loader.calls.clear()
    return version


def second_cache(world: World, **settings: Any) -> AdapterCache:
    """Of another worker, over the same host."""
    cache = world.cache
    config = replace(cache.config, **settings)
    return AdapterCache(config, base=cache.base, host=cache._host, device=SimulatedDevice())


def state(lease: object) -> LeaseState:
    return lease.record.state  # type: ignore[attr-defined, no-any-return]
