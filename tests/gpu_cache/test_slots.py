"""Slots and their generations: a plan that names an old use of a slot is found out (I13)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from adapterd.gpu_cache.slots import SlotTable
from adapterd.loader.errors import AdapterdError, Code
from fakes.cache_world import World


def test_slots_are_handed_out_in_turn() -> None:
    slots = SlotTable(2)
    assert [slots.take(), slots.take()] == [(0, 0), (1, 0)]
    assert slots.free == 0
    slots.give_back(1)
    slots.give_back(0)
    assert slots.free == 2
    assert [slots.take(), slots.take()] == [(1, 1), (0, 1)]


def test_a_resident_is_current_until_its_slot_is_revoked_or_given_back() -> None:
    with World(vram=4, max_residents=1) as world:
        world.loader.publish("acme/a")
        ((resident, _),) = world.ready("acme/a").composition
        slots = SlotTable(resident.slot + 1)
        assert slots.current(resident)
        slots.revoke(resident.slot)
        assert not slots.current(resident)
        assert slots.current(replace(resident, generation=1))
        slots.give_back(resident.slot)
        assert not slots.current(replace(resident, generation=1))


def test_a_reload_revokes_the_slots_that_steps_still_read() -> None:
    with World() as world:
        world.loader.publish("acme/a")
        lease = world.ready("acme/a")
        ((resident, _),) = lease.composition
        with world.cache.begin_step([lease]):
            world.cache.rebind(world.cache.base)
            assert not world.cache._vram.slots.current(resident)


def test_a_step_looks_at_the_generation_and_pins_nothing_if_it_is_past() -> None:
    """Whoever revokes a slot and forgets a lease of it: the step finds it out."""
    with World() as world:
        world.loader.publish("acme/a")
        lease = world.ready("acme/a")
        world.cache._vram.slots.revoke(lease.composition[0][0].slot)
        with pytest.raises(AdapterdError) as stale:
            world.cache.begin_step([lease])
        assert stale.value.code is Code.SLOT_STALE
        assert world.cache.statistics().steps_in_flight == 0
