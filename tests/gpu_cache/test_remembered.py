"""What was found of versions that went: for whom it counts, and what of it."""

from __future__ import annotations

from typing import Any

from adapterd.gpu_cache.records import Entry
from adapterd.gpu_cache.remembered import Remembered
from adapterd.loader.identity import Ref
from fakes.adapters import Published
from fakes.cache_world import World


class _Everything:
    def __contains__(self, _key: object) -> bool:
        return True


def _entry(world: World) -> tuple[Published, Entry]:
    version = world.loader.publish("acme/a", 2)
    world.ready("acme/a").release()
    return version, world.cache._stager.entries[version.resolved.key]


def _remembered() -> Remembered:
    return Remembered(8, _Everything)


def test_it_counts_for_its_tenant_alone_though_another_one_has_the_same_bytes() -> None:
    with World() as world:
        version, entry = _entry(world)
        remembered, ref, base = _remembered(), Ref.parse(version.pinned), world.cache.base.pin
        remembered.keep(entry)
        assert remembered.resolved([ref], "acme", base) == [version.resolved]
        assert remembered.resolved([ref], "zeta", base) is None
        assert remembered.resolved([], "acme", base) is None, "the base is nobody's version"
        other = Ref.parse(version.pinned.replace("acme/a", "acme/b"))
        assert remembered.resolved([other], "acme", base) is None


def test_a_new_entry_is_what_the_old_one_was() -> None:
    with World() as world:
        _, entry = _entry(world)
        remembered, again = _remembered(), Entry(entry.key)
        remembered.keep(entry)
        assert remembered.remind(again) == list(entry.verified.values()) != []
        assert (again.facts, again.rank, again.verified) == (entry.facts, entry.rank, entry.verified)
        assert again.rank > 0
        assert remembered.remind(Entry(entry.key)) == [], "once"


def test_what_was_never_verified_or_is_given_up_is_not_kept() -> None:
    with World() as world:
        version, entry = _entry(world)
        remembered, ref, base = _remembered(), Ref.parse(version.pinned), world.cache.base.pin
        held: Any = remembered
        entry.dead = True
        remembered.keep(entry)
        entry.dead, facts, entry.facts = False, entry.facts, None
        remembered.keep(entry)
        assert len(held._found) == 0
        entry.facts = facts
        remembered.keep(entry)
        assert remembered.resolved([ref], "acme", base) == [version.resolved]
