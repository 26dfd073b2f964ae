"""A kept manifest spares the reading, and is believed for its MAC alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from adapterd.loader.errors import Code, Refused, Untrusted
from adapterd.loader.identity import CONFIG_FILE
from adapterd.loader.limits import DEFAULT_LIMITS
from adapterd.loader.store import StoredVersion
from adapterd.loader.store_key import StoreKey
from fakes.store_world import EVERY_LINEAR, World

KEY = StoreKey(b"k" * 32)


def load(world: World, text: str = "acme/finance", key: StoreKey | None = KEY) -> StoredVersion:
    return world.ensure(text, world.store(store_key=key))


def kept(stored: StoredVersion) -> Path:
    return stored.directory.parent / "manifest.json"


def spoil_config(stored: StoredVersion) -> None:
    """Whoever reads the config again finds that it does not hold."""
    path = stored.directory / CONFIG_FILE
    path.write_bytes(b"{" * path.stat().st_size)


def test_the_second_load_reads_no_config_and_finds_the_same(world: World) -> None:
    first = load(world)
    spoil_config(first)
    assert load(world) == replace(first, source="disk")


def test_a_version_that_was_there_before_the_key_gets_one(world: World) -> None:
    first = load(world, key=None)
    assert not kept(first).exists()
    assert load(world).source == "disk"
    assert kept(first).exists()


@pytest.mark.parametrize(
    "attack",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"{}"),
        lambda path: path.write_bytes(path.read_bytes().replace(b'"scaling": 0.5', b'"scaling": 5.0')),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(b"f" * 64 + path.read_bytes()[64:]),
        lambda path: path.unlink(),
        lambda path: (path.unlink(), os.mkfifo(path)),
    ],
    ids=["empty", "no mac", "scaling", "cut", "mac", "gone", "pipe"],
)
def test_what_was_edited_is_read_anew(world: World, attack: Callable[[Path], object]) -> None:
    first = load(world)
    good = kept(first).read_bytes()
    assert b'"scaling": 0.5' in good
    attack(kept(first))
    assert load(world) == replace(first, source="disk")
    assert kept(first).read_bytes() == good


def test_manifests_of_two_versions_swapped(world: World) -> None:
    world.publish("acme/twin", 3, package={"modules": EVERY_LINEAR, "rank": 8})
    one, two = load(world), load(world, "acme/twin")
    spare = kept(one).read_bytes()
    kept(one).write_bytes(kept(two).read_bytes())
    kept(two).write_bytes(spare)
    assert load(world).manifest == one.manifest
    assert load(world, "acme/twin").manifest == two.manifest


def test_another_key_knows_nothing(world: World) -> None:
    spoil_config(load(world))
    assert load(world, key=StoreKey(b"o" * 32)).source == "downloaded"


def test_narrower_limits_are_judged_anew(world: World) -> None:
    load(world)
    narrow = world.store(store_key=KEY, limits=replace(DEFAULT_LIMITS, max_rank=8))
    with pytest.raises(Refused) as refused:
        world.ensure(store=narrow)
    assert refused.value.code is Code.RANK_TOO_LARGE


def test_trust_is_asked_all_the_same(world: World) -> None:
    load(world)
    world.trust.revoke_key(world.key.public.key_id)
    with pytest.raises(Untrusted) as refused:
        load(world)
    assert refused.value.code is Code.KEY_REVOKED


def test_recheck_reads_all_and_leaves_what_is_kept(world: World) -> None:
    first = load(world)
    good = kept(first).read_bytes()
    again = world.ensure(store=world.store(store_key=KEY), recheck=True)
    assert all(m.delta_norm is not None for m in again.manifest.modules)
    assert kept(first).read_bytes() == good
    spoil_config(first)
    assert world.ensure(store=world.store(store_key=KEY), recheck=True).source == "downloaded"


def test_a_doubted_copy_is_read_anew(world: World) -> None:
    first = load(world)
    spoil_config(first)
    world.store(store_key=KEY).doubt(first.key)
    assert load(world).source == "downloaded"


def test_a_place_where_none_can_be_kept_is_no_failure(world: World) -> None:
    first = load(world)
    kept(first).unlink()
    kept(first).mkdir()
    assert load(world) == replace(first, source="disk")


# --- in memory


@pytest.mark.parametrize("key", [KEY, None], ids=["key", "no key"])
def test_a_store_reads_a_versions_structure_once(world: World, key: StoreKey | None) -> None:
    store = world.store(store_key=key)
    first = world.ensure(store=store)
    spoil_config(first)
    kept(first).unlink(missing_ok=True)
    again = world.ensure(store=store)
    assert again == replace(first, source="disk")
    assert again.manifest is first.manifest


def test_what_one_store_knows_another_does_not(world: World) -> None:
    first = world.ensure(store=world.store())
    spoil_config(first)
    assert world.ensure(store=world.store()).source == "downloaded"


def test_what_is_known_in_memory_is_known_of_this_version_alone(world: World) -> None:
    world.publish(
        "globex/finance", 2, package={"modules": EVERY_LINEAR, "rank": 16, "files": {"README.md": b"# two\n"}}
    )
    store = world.store()
    mine, old, theirs = (world.ensure(text, store) for text in ("acme/finance", "acme/finance:old", "globex/finance"))
    assert mine.manifest != old.manifest
    assert mine.manifest == theirs.manifest
    assert mine.manifest is not theirs.manifest
    spoil_config(theirs)
    assert world.ensure("globex/finance", store).manifest is theirs.manifest
    assert world.ensure(store=store).manifest is mine.manifest


def test_trust_is_asked_of_what_is_in_memory(world: World) -> None:
    store = world.store()
    world.ensure(store=store)
    world.trust.revoke_key(world.key.public.key_id)
    with pytest.raises(Untrusted) as refused:
        world.ensure(store=store)
    assert refused.value.code is Code.KEY_REVOKED


def test_files_are_looked_at_whatever_is_in_memory(world: World) -> None:
    """One too many, one too few, one of another size: the copy is replaced."""
    store = world.store()
    folder = world.ensure(store=store).directory
    (folder / "more.txt").write_bytes(b"more")
    assert world.ensure(store=store).source == "downloaded"
    (folder / "README.md").unlink()
    assert world.ensure(store=store).source == "downloaded"
    os.truncate(folder / CONFIG_FILE, 3)
    assert world.ensure(store=store).source == "downloaded"


def test_a_doubted_copy_and_a_recheck_read_anew_whatever_is_in_memory(world: World) -> None:
    store = world.store()
    first = world.ensure(store=store)
    spoil_config(first)
    store.doubt(first.key)
    assert world.ensure(store=store).source == "downloaded"
    spoil_config(first)
    assert world.ensure(store=store, recheck=True).source == "downloaded"
