"""The books of the arena: what a claim, an eviction and a return change, and who may be made to go."""

from __future__ import annotations

import pytest

from adapterd.gpu_cache import Lease
from adapterd.gpu_cache.fences import OPEN
from adapterd.gpu_cache.records import Cause, Entry
from fakes.cache_world import World


def entry_of(world: World, lease: Lease) -> Entry:
    (entry,) = lease.record.entries
    assert entry in world.cache._stager.entries.values()
    return entry


def test_what_was_evicted_has_no_trace_of_its_time_here() -> None:
    """Whoever still waits for it keeps its entry: the next copy must find it as new."""
    with World(vram=4) as world:
        world.loader.publish("acme/a", 2)
        lease = world.ready("acme/a")
        world.step(lease)
        world.settle()
        entry, tier = entry_of(world, lease), world.cache._vram
        lease.release()
        assert (entry.used, entry.joined) == (True, world.device.compute)
        assert entry.readers.fence().events
        tier.evict(entry, Cause.ASKED)
        assert (entry.resident, entry.copied, entry.copied_by, entry.joined) == (None, False, OPEN, None)
        assert entry.readers.fence() == OPEN
        before = tier.changes
        tier.claim(entry)
        assert not entry.used
        assert tier.changes == before + 1
        tier.unclaim(entry)
        assert tier.changes == before + 2


@pytest.mark.parametrize("by", ["lease", "step"])
def test_who_is_on_it_keeps_it(by: str) -> None:
    with World(vram=4) as world:
        world.loader.publish("acme/a", 3), world.loader.publish("acme/b", 3)
        lease = world.ready("acme/a")
        ticket = world.cache.begin_step([lease]) if by == "step" else None
        if ticket is not None:
            lease.release()
        other = world.acquire("acme/b")
        world.settle()
        assert not other.ready
        if ticket is None:
            lease.release()
        else:
            ticket.end()
        world.settle()
        assert other.ready
