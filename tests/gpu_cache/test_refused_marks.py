"""A device that refuses a step's mark."""

from __future__ import annotations

import pytest

from adapterd.gpu_cache.device import Event, Stream
from adapterd.loader.errors import AdapterdError, Code, error
from fakes.cache_world import World
from fakes.devices import DefectiveDevice, SimulatedDevice


class NoMarks(DefectiveDevice):
    """Records nothing in the compute stream while it is told so."""

    refuses = False

    def record(self, stream: Stream) -> Event:
        if self.refuses and stream is self.compute:
            raise error(Code.DEVICE_ERROR, "simulated", "refused")
        return super().record(stream)


def test_a_step_whose_mark_was_refused_counted_as_running_for_ever_and_copies_waited_for_its_end() -> None:
    device: list[NoMarks] = []

    def defective(inner: SimulatedDevice) -> NoMarks:
        device.append(NoMarks(inner))
        return device[0]

    with World(vram=4, defect=defective) as world:
        for name in ("acme/a", "acme/b"):
            world.loader.publish(name, 2)
        read = world.ready("acme/a")
        device[0].refuses = True
        with pytest.raises(AdapterdError):
            world.step(read)
        device[0].refuses = False
        assert world.cache.statistics().steps_in_flight == 0
        assert world.ready("acme/b").ready
        read.release()
        with pytest.raises(AdapterdError) as refused:
            world.cache.evict("acme/a", tenant="acme")
        assert refused.value.code is Code.ADAPTER_IN_USE  # a kernel may still read it
