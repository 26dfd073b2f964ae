"""A store that keeps to a size: who goes, who stays, what it costs, and what a crash leaves."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from adapterd.loader.errors import AdapterdError, Code, Unavailable
from adapterd.loader.planning import plan_layout
from adapterd.loader.store import StoredVersion, VerifiedStore
from adapterd.loader.store_folder import StoreFolder
from adapterd.loader.store_key import StoreKey
from fakes.disk import scans_of
from fakes.registry_simulator import NOW
from fakes.store_world import BASE, World

NAMES = ("one", "two", "three", "four")
SECONDS = 30.0
"""Until a load that waits for somebody is given up."""


@dataclass
class Bounded:
    """Four versions of about the same size, and a store with room for `fits` of them."""

    world: World
    now: datetime = NOW
    sizes: dict[str, int] = field(default_factory=dict)

    def store(self, fits: float, **options: Any) -> VerifiedStore:
        # Statement and mark of each version count, too, once they are written.
        most = int(fits * (max(self.sizes.values()) + 20_000))
        return self.world.store(max_bytes=most, clock=self.tick, **options)

    def tick(self) -> datetime:
        self.now += timedelta(seconds=1)
        return self.now

    def use(self, store: VerifiedStore, *names: str) -> list[str]:
        return [self.world.ensure(f"acme/{name}", store).source for name in names]

    def kept(self) -> set[str]:
        return {name for name in NAMES if self.folder(name).is_dir()}

    def folder(self, name: str) -> Path:
        return self.world.root / self.key(name)

    def key(self, name: str) -> str:
        return self.world.resolve(f"acme/{name}").key.path_digest()


@pytest.fixture
def bounded(world: World) -> Bounded:
    made = Bounded(world)
    for seed, name in enumerate(NAMES, 10):
        version = world.publish(f"acme/{name}", seed, package={"rank": 64})
        made.sizes[name] = version.statement.total_bytes
    return made


def test_the_least_recently_used_goes_first(bounded: Bounded) -> None:
    store = bounded.store(3)
    bounded.use(store, "one", "two", "three")
    assert bounded.use(store, "one") == ["disk"]
    assert bounded.use(store, "four") == ["downloaded"]
    assert bounded.kept() == {"one", "three", "four"}
    assert bounded.use(store, "two") == ["downloaded"]
    assert bounded.kept() == {"one", "two", "four"}


def test_last_use_survives_a_restart(bounded: Bounded) -> None:
    bounded.use(bounded.store(3), "one", "two", "three")
    bounded.use(bounded.store(3), "one")
    bounded.use(bounded.store(3), "four")
    assert bounded.kept() == {"one", "three", "four"}


def test_a_store_without_a_bound_remembers_use_for_a_later_one(bounded: Bounded) -> None:
    free = bounded.world.store(clock=bounded.tick)
    bounded.use(free, "one", "two", "three")
    bounded.use(free, "one")
    bounded.use(bounded.store(2), "four")
    assert bounded.kept() == {"one", "four"}


def test_the_folder_never_grows_over_its_bound_while_files_arrive(bounded: Bounded) -> None:
    store, most = bounded.store(2), int(2 * (max(bounded.sizes.values()) + 20_000))
    seen: list[int] = []

    def look(_: int) -> None:
        seen.append(sum(p.stat().st_size for p in bounded.world.root.rglob("*") if p.is_file()))

    for name in NAMES * 2:
        bounded.world.ensure(f"acme/{name}", store, progress=look)
    assert max(seen) <= most


def test_an_adapter_larger_than_the_store_is_refused_before_a_byte_is_fetched(bounded: Bounded) -> None:
    store = bounded.world.store(max_bytes=10_000)
    with pytest.raises(Unavailable, match="the whole store may have 10000") as refused:
        bounded.use(store, "one")
    assert refused.value.code is Code.STORAGE_FULL
    assert "max_bytes" in refused.value.problem.hint
    assert bounded.world.fetched() == []


@pytest.mark.parametrize("bound", [0, -1])
def test_a_bound_that_is_none_is_the_callers_mistake(world: World, bound: int) -> None:
    with pytest.raises(ValueError, match="max_bytes"):
        world.store(max_bytes=bound)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_where_the_use_was_is_not_waited_for(bounded: Bounded, make: Callable[[Path], None]) -> None:
    bounded.use(bounded.store(3), "one", "two", "three")
    use = bounded.folder("two") / "use"
    use.unlink()
    make(use)
    looked: list[list[str]] = []
    thread = threading.Thread(target=lambda: looked.append(bounded.use(bounded.store(3), "four")), daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert looked == [["downloaded"]]
    assert "four" in bounded.kept()
    assert len(bounded.kept()) == 3


# --- bounded work


def test_a_load_from_disk_looks_at_nothing_but_its_own_version(bounded: Bounded) -> None:
    store = bounded.store(4)
    bounded.use(store, *NAMES)
    with scans_of(bounded.world.root) as scans:
        assert bounded.use(store, *NAMES) == ["disk"] * 4
    assert scans == []


def test_a_download_looks_at_the_store_once(bounded: Bounded) -> None:
    store = bounded.store(2)
    bounded.use(store, "one", "two")
    with scans_of(bounded.world.root) as scans, scans_of(bounded.folder("two")) as inside:
        bounded.use(store, "three")
    assert (len(scans), inside) == (1, [])


# --- several at once


def test_a_version_that_somebody_has_is_skipped_and_not_waited_for(bounded: Bounded) -> None:
    store = bounded.store(2)
    bounded.use(store, "one", "two")
    with StoreFolder(bounded.world.root).locked(bounded.key("one")):
        bounded.use(store, "three")
    assert bounded.kept() == {"one", "three"}


def test_if_all_others_are_in_use_the_refusal_says_so(bounded: Bounded) -> None:
    store = bounded.store(1)
    bounded.use(store, "one")
    held = StoreFolder(bounded.world.root).locked(bounded.key("one"))
    with held, pytest.raises(Unavailable, match="right now") as refused:
        bounded.use(store, "two")
    assert refused.value.code is Code.STORAGE_FULL
    assert bounded.use(store, "two") == ["downloaded"]


def test_what_another_fetches_is_counted_and_stays(bounded: Bounded) -> None:
    store = bounded.store(2)
    bounded.use(store, "one")
    refused: list[AdapterdError] = []
    nested: list[set[str]] = []

    def fetch_more(count: int) -> None:
        if count and not nested:
            nested.append(set())
            bounded.use(bounded.store(2), "three")  # "one" goes for it
            nested[0] = bounded.kept()
            held = StoreFolder(bounded.world.root).locked(bounded.key("three"))
            with held, pytest.raises(Unavailable) as caught:
                bounded.use(bounded.store(2), "four")
            refused.append(caught.value)

    bounded.world.ensure("acme/two", store, progress=fetch_more)
    assert nested == [{"three"}]
    assert refused[0].code is Code.STORAGE_FULL
    assert bounded.kept() == {"two", "three"}


def test_threads_that_fetch_at_once_keep_to_the_bound(bounded: Bounded) -> None:
    most = int(2 * (max(bounded.sizes.values()) + 20_000))
    start = threading.Barrier(4)
    ends: list[str] = []

    def work(name: str) -> None:
        store = bounded.store(2)
        start.wait()
        for _ in range(3):
            try:
                ends.extend(bounded.use(store, name))
            except Unavailable as refused:
                ends.append(refused.code)

    threads = [threading.Thread(target=work, args=(name,)) for name in NAMES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(ends) <= {"downloaded", "disk", "STORAGE_FULL"} and "downloaded" in ends
    assert sum(p.stat().st_size for p in bounded.world.root.rglob("*") if p.is_file()) <= most


def test_a_reader_that_loses_the_race_is_told_and_the_next_acquire_heals(bounded: Bounded) -> None:
    store = bounded.store(1)
    lost: StoredVersion = bounded.world.ensure("acme/one", store)
    bounded.use(store, "two")
    layout = plan_layout(lost.manifest, "F32", 1 << 13)
    out = memoryview(bytearray(layout.nbytes))
    with pytest.raises(Unavailable) as refused:
        store.fill(lost, layout, out)
    assert refused.value.code is Code.STORAGE_UNAVAILABLE
    assert store.fill(bounded.world.ensure("acme/one", store), layout, out).origin == "downloaded"


def test_what_is_being_read_can_be_read_to_its_end(bounded: Bounded) -> None:
    store = bounded.store(1)
    stored = bounded.world.ensure("acme/one", store)
    with (stored.directory / "adapter_model.safetensors").open("rb") as open_file:
        bounded.use(store, "two")
        assert not stored.directory.exists()
        assert len(open_file.read()) == stored.manifest.file("adapter_model.safetensors").size


def test_the_lock_of_a_removed_version_goes_with_it(bounded: Bounded) -> None:
    store = bounded.store(1)
    bounded.use(store, *NAMES)
    assert {p.name for p in (bounded.world.root / ".locks").iterdir()} == {"room", bounded.key("four")}


def test_a_lock_that_was_removed_while_it_was_waited_for_locks_nothing(bounded: Bounded) -> None:
    """Whoever opened the file before it went away must not believe that it holds the version."""
    folder = StoreFolder(bounded.world.root)
    bounded.use(bounded.world.store(), "one")
    key = bounded.key("one")
    old = os.open(bounded.world.root / ".locks" / key, os.O_RDWR)
    try:
        assert folder.remove(key)
        with folder.locked(key), folder.held(key) as mine:
            assert not mine
            assert os.fstat(old).st_nlink == 0
    finally:
        os.close(old)


# --- packed forms


def test_packed_forms_count_and_make_room(bounded: Bounded) -> None:
    key = StoreKey(b"k" * 32)
    store = bounded.store(3, store_key=key)
    bounded.use(store, "one", "two", "three")
    stored = bounded.world.ensure("acme/three", store)
    layout = plan_layout(stored.manifest, "F32", 1 << 13)
    out = memoryview(bytearray(layout.nbytes))
    filled = store.fill(stored, layout, out)
    assert store.keep_packed(stored, layout, filled, out)
    assert bounded.kept() == {"two", "three"}
    bounded.use(store, "four")
    assert bounded.kept() == {"three", "four"}
    assert store.fill(bounded.world.ensure("acme/three", store), layout, out).origin == "packed"


def test_nobody_goes_for_a_packed_form_that_does_not_fit_beside_its_own_version(bounded: Bounded) -> None:
    bounded.world.publish("acme/half", 20, package={"rank": 64, "dtype": "BF16"})
    free = bounded.world.store(clock=bounded.tick, store_key=StoreKey(b"k" * 32))
    bounded.use(free, "one", "half")
    both = sum(p.stat().st_size for p in bounded.world.root.rglob("*") if p.is_file())
    store = bounded.world.store(max_bytes=both + 5000, clock=bounded.tick, store_key=StoreKey(b"k" * 32))
    stored = bounded.world.ensure("acme/one", store)
    layout = plan_layout(stored.manifest, "F32", 1 << 13)
    out = memoryview(bytearray(layout.nbytes))
    filled = store.fill(stored, layout, out)
    bounded.use(store, "half")
    assert not store.keep_packed(stored, layout, filled, out)
    assert bounded.use(store, "one") == ["disk"]
    assert bounded.use(store, "half") == ["disk"]


# --- crashes and strangers


@pytest.mark.parametrize("damage", [Path.unlink, lambda p: p.write_bytes(b""), lambda p: p.write_bytes(b"many")])
def test_a_lost_count_is_measured(bounded: Bounded, damage: Callable[[Path], object]) -> None:
    store = bounded.store(2)
    bounded.use(store, "one", "two")
    bounded.use(store, "one")
    for name in ("one", "two"):
        when = bounded.folder(name) / "use"
        used = when.stat().st_mtime_ns
        damage(when)
        os.utime(when if when.exists() else bounded.folder(name), ns=(used, used))
    bounded.use(store, "three")
    assert bounded.kept() == {"one", "three"}
    assert bounded.use(store, "one") == ["disk"]
    bounded.use(store, "four")
    assert bounded.kept() == {"one", "four"}


def test_an_abandoned_download_gives_its_room_back(bounded: Bounded) -> None:
    store = bounded.store(1)
    left = bounded.world.root / f".incoming-{bounded.key('one')}" / "package"
    left.mkdir(parents=True)
    (left / "adapter_model.safetensors").write_bytes(bytes(bounded.sizes["one"]))
    assert bounded.use(store, "two") == ["downloaded"]
    assert not left.exists()


def test_folders_that_are_no_versions_are_left_alone(bounded: Bounded) -> None:
    (bounded.world.root / "lost+found").mkdir(parents=True)
    (bounded.world.root / "lost+found" / "x").write_bytes(bytes(10_000_000))
    (bounded.world.root / ("a" * 64)).write_text("a file with a version's name")
    bounded.use(bounded.store(1), "one", "two")
    assert (bounded.world.root / "lost+found" / "x").exists()
    assert bounded.kept() == {"two"}


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from adapterd.loader.store_folder import StoreFolder
seen = 0
def die(event, arguments):
    global seen
    if event in ("os.remove", "os.rmdir") and armed:
        seen += 1
        if seen > int(sys.argv[4]):
            os.kill(os.getpid(), signal.SIGKILL)
armed = False
sys.addaudithook(die)
folder = StoreFolder(Path(sys.argv[2]))
armed = True
folder.remove(sys.argv[3])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_killed_while_a_version_is_removed(bounded: Bounded) -> None:
    """At every point: what is left is no version, or one that is hashed anew; and the store goes on."""
    tests = Path(__file__).parents[1]
    store = bounded.store(3)
    for point in range(8):
        bounded.use(store, "one")
        arguments = [tests, bounded.world.root, bounded.key("one"), point]
        run = subprocess.run([sys.executable, "-c", KILLED, *map(str, arguments)], check=False, capture_output=True)
        assert run.returncode == -9, run.stderr
        assert not point or not (bounded.folder("one") / "verified.json").exists()
        stored = bounded.world.store().ensure(bounded.world.resolve("acme/one"), bounded.world.registry.source(), BASE)
        version = bounded.world.registry.versions["acme", "one"][0]
        assert {p.name: p.read_bytes() for p in stored.directory.iterdir()} == version.files
