"""Images in a slab that the device does not know yet, or no more: as after a loader that died."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from adapterd.gpu_cache.asking import Desk
from adapterd.gpu_cache.cpu_device import CpuDevice
from adapterd.gpu_cache.host.host_cache import HostCache
from adapterd.gpu_cache.host.interface import Failure, Slab
from adapterd.gpu_cache.host.tier import PlainSlab
from adapterd.gpu_cache.records import Ask
from adapterd.gpu_cache.slabs import SlabTensors
from fakes.adapters import PAGE_BYTES, ManualPool, MemoryLoader, wrong_pages
from fakes.cache_world import World, pages


class _Moved(HostCache):
    """As after a new loader: images are in `newer`, which the device does not know."""

    newer: PlainSlab | None = None

    def fetch(self, wanted: Any, tenant: str, settle: Any, **how: Any) -> int:
        def moved(outcome: Any) -> None:
            if self.newer is not None and not isinstance(outcome, Failure):
                outcome = tuple(replace(image, slab=self.newer) for image in outcome)
            settle(outcome)

        return super().fetch(wanted, tenant, moved, **how)


def moved_world() -> World:
    world = World(host_kind=_Moved)
    assert isinstance(world.host, _Moved)
    world.host.newer = PlainSlab(memoryview(world.host.slab.memory), PAGE_BYTES)
    return world


def test_a_step_does_not_adopt_a_slab_it_has_that_done() -> None:
    """To register some GB with a driver takes seconds; decode does not wait for that."""
    with moved_world() as world:
        world.loader.publish("acme/a")
        lease = world.acquire("acme/a")
        here, adopt = threading.get_ident(), world.cache._stager.desk._slabs.adopt
        adopted: list[int] = []

        def noted(slab: Slab, *users: Any) -> None:
            adopted.append(threading.get_ident())
            adopt(slab, *users)

        world.cache._stager.desk._slabs.adopt = noted  # type: ignore[method-assign]
        world.pool.run_all()
        for thread in [each for each in threading.enumerate() if each.name == "adapterd-adopt"]:
            thread.join(60)
        assert adopted
        assert here not in adopted
        world.settle()
        assert lease.ready


def test_images_whose_slab_was_given_back_before_they_took_room_are_fetched_again() -> None:
    with World() as world:
        world.loader.publish("acme/a")
        lease = world.acquire("acme/a")
        world.cache._stager.line_up(True)
        world.pool.run_all()
        world.cache._stager.line_up(False)
        gone = PlainSlab(memoryview(bytearray(pages(1))), PAGE_BYTES)
        images = lease.record.images
        lease.record.images = {entry: replace(image, slab=gone) for entry, image in images.items()}
        world.settle()
        assert lease.ready
        assert wrong_pages(world.cache.arena, lease.composition[0][0]) == []


def test_where_the_system_gives_no_thread_the_slab_is_adopted_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    with moved_world() as world:
        world.loader.publish("acme/a")
        lease = world.acquire("acme/a")

        def refused(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", refused)
        world.pool.run_all()
        monkeypatch.undo()
        world.settle()
        assert lease.ready


def test_room_whose_images_were_given_back_before_they_were_told_is_filled_all_the_same() -> None:
    """Its loader died while the slab was adopted, and the next one's was adopted before the answer."""
    with World(vram=1, host_kind=_Moved) as world:
        assert isinstance(world.host, _Moved)
        world.loader.publish("acme/a"), world.loader.publish("acme/b")
        first, second = world.ready("acme/a"), world.acquire("acme/b")
        world.settle()
        slabs = world.cache._stager.desk._slabs
        adopt = slabs.adopt

        def overtaken(slab: Slab, *users: Any) -> None:
            adopt(slab, *users)
            assert isinstance(world.host, _Moved)
            world.host.newer = None
            adopt(PlainSlab(memoryview(bytearray(pages(1))), PAGE_BYTES), *users)

        slabs.adopt = overtaken  # type: ignore[method-assign]
        world.host.newer = PlainSlab(memoryview(bytearray(world.host.slab.memory)), PAGE_BYTES)
        first.release()
        for _ in range(3):
            world.settle()
            for thread in [each for each in threading.enumerate() if each.name == "adapterd-adopt"]:
                thread.join(60)
        assert world.host.newer is None
        assert second.ready
        assert wrong_pages(world.cache.arena, second.composition[0][0]) == []


def test_no_slab_is_given_back_between_a_look_at_it_and_its_use() -> None:
    """Both are under the cache's lock."""
    first, newer = (PlainSlab(memoryview(bytearray(pages(1))), PAGE_BYTES) for _ in range(2))
    slabs = SlabTensors(CpuDevice(), first)
    known: list[tuple[bool, bool]] = []

    class Noted(threading.Condition):
        def __enter__(self) -> bool:
            before = slabs.knows(first)
            self.acquire()
            known.append((before, slabs.knows(newer)))
            return True

    loader = MemoryLoader()
    host = HostCache(first, loader.base, loader=loader, pool=ManualPool())
    image = SimpleNamespace(slab=newer)
    Desk(host, slabs, Noted(), lambda: None)._adopt_first(Ask(), lambda _ask, _outcome: None, (image,))  # type: ignore[arg-type]
    assert known == [(True, False), (False, True)]
    host.close(60)
