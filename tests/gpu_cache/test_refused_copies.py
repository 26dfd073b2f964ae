"""Copies that the device refuses."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from adapterd.gpu_cache.device import Run, Stream
from adapterd.loader.errors import Code, error
from fakes.cache_world import World
from fakes.devices import DefectiveDevice, SimulatedDevice


class _Refusing(DefectiveDevice):
    """Refuses the next copy."""

    refuse = True

    def __init__(self, inner: SimulatedDevice) -> None:
        super().__init__(inner)
        self.copy_runs = self._copy_runs  # type: ignore[method-assign, assignment]

    def _copy_runs(
        self, stream: Stream, dst: torch.Tensor, src: torch.Tensor, runs: Sequence[Run], page_bytes: int
    ) -> None:
        if self.refuse:
            self.refuse = False
            raise error(Code.DEVICE_ERROR, "simulated", "no more copies")
        self.inner.copy_runs(stream, dst, src, runs, page_bytes)


def test_a_copy_that_the_device_refuses_fails_its_leases_and_its_pages_are_not_reused() -> None:
    with World(vram=4, host=8, defect=_Refusing) as world:
        world.loader.publish("acme/a", 2), world.loader.publish("acme/b", 2)
        assert world.failure("acme/a") is Code.DEVICE_ERROR
        assert world.ready("acme/b").ready
        assert world.vram_free == 0


def test_a_version_whose_copy_was_refused_is_loaded_again_for_who_comes_next() -> None:
    """Into other pages: what the device refused may still write the old ones."""
    with World(vram=4, host=8, defect=_Refusing) as world:
        world.loader.publish("acme/a", 2)
        assert world.failure("acme/a") is Code.DEVICE_ERROR
        lease = world.ready("acme/a")
        world.step(lease)
        world.settle()
        assert (world.vram_free, world.violations) == (0, [])


def test_the_other_parts_of_what_was_refused_make_room_for_who_waits() -> None:
    devices: list[_Refusing] = []

    def later(inner: SimulatedDevice) -> _Refusing:
        devices.append(_Refusing(inner))
        devices[0].refuse = False
        return devices[0]

    with World(vram=4, host=8, defect=later) as world:
        for name in "abc":
            world.loader.publish(f"acme/{name}", 2)
        world.ready("acme/a").release()
        lease = world.acquire([("acme/a", 1.0), ("acme/b", 1.0)])
        waiting = world.acquire("acme/c")
        world.pool.run_all()
        devices[0].refuse = True
        world.settle()
        assert lease.failed
        world.settle()  # its room was given when the refusal was noticed
        assert waiting.ready
