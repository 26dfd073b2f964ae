"""How much Python a load from host memory takes, in bytecodes: what is here and how large it is adds nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from adapterd.gpu_cache import TenantBudget
from fakes.cache_world import World, shares

Count = Callable[[], int]


@contextmanager
def bytecodes() -> Iterator[Count]:
    """Of the cache's own code, in this thread, until now."""
    done = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal done
        if f"{os.sep}gpu_cache{os.sep}" not in frame.f_code.co_filename or "fakes" in frame.f_code.co_filename:
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        done += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lambda: done
    finally:
        sys.settrace(before)


def work_of_a_load(pages: int, residents: int, tenants: dict[str, TenantBudget]) -> int:
    """An adapter of so many pages comes from host memory, for another one of its size, beside so many that are held and
    as many that are not, of one page each. All that is done until the lease is ready.
    """
    room = 2 * residents + pages + len(tenants)
    with World(vram=room, host=4 * residents + 3 * pages, max_residents=room, tenants=tenants) as world:
        large = [world.loader.publish(f"acme/large{i}", pages) for i in range(2)]
        small = [world.loader.publish(f"acme/small{i}") for i in range(2 * residents)]
        leases = [world.ready(version.pinned) for version in small]
        for version in large * 2:  # they drive out each other
            world.ready(version.pinned).release()
        for version, lease in zip(small[::2], leases[::2], strict=True):
            world.ready(version.pinned).release()  # used later than the large ones
            lease.release()
        with bytecodes() as count:
            lease = world.acquire(large[0].pinned)
            enqueued = count()
        world.device.drain()
        with bytecodes() as count:
            world.cache.pump()
            noticed = count()
        assert lease.ready
        assert enqueued > 1000, "it was counted"
        for other in leases[1::2]:
            other.release()
    return enqueued + noticed


@pytest.mark.parametrize("tenants", [{}, shares(blue=1)])
def test_beside_many_residents_it_is_as_much_as_beside_few(tenants: dict[str, TenantBudget]) -> None:
    assert work_of_a_load(4, 30, tenants) == work_of_a_load(4, 3, tenants)


def test_of_many_pages_it_is_as_much_as_of_few() -> None:
    assert work_of_a_load(64, 2, {}) == work_of_a_load(32, 2, {})
