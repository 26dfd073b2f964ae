"""The verified store on a disk that fills, rots, or is written by other threads and processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from adapterd.loader.errors import Code, Unavailable, error
from adapterd.loader.identity import CONFIG_FILE, WEIGHTS_FILE, VersionKey
from adapterd.loader.store import StoredVersion, VerifiedStore
from adapterd.loader.store_folder import StoreFolder
from fakes.disk import file_size_limit
from fakes.store_world import BASE, World, as_folder, current, left, refusal

# --- the disk


def rot(path: Path, position: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: rot(d / CONFIG_FILE, 40),
        lambda d: rot(d / WEIGHTS_FILE, 9),
        lambda d: (d / WEIGHTS_FILE).write_bytes(b"short"),
        lambda d: (d / WEIGHTS_FILE).unlink(),
        lambda d: (d / "extra.txt").write_text("x"),
        lambda d: (d / "folder").mkdir(),
        lambda d: ((d / CONFIG_FILE).unlink(), (d / CONFIG_FILE).symlink_to("/etc/hostname")),
    ],
    ids=["config", "header", "short", "gone", "extra", "folder", "link"],
)
def test_a_local_copy_that_does_not_hold_is_fetched_again(world: World, damage: Callable[[Path], object]) -> None:
    directory = world.ensure().directory
    damage(directory)
    stored = world.ensure()
    assert stored.source == "downloaded"
    assert {p.name: p.read_bytes() for p in directory.iterdir()} == current(world).files


def test_a_rotten_tensor_byte_is_found_by_recheck(world: World) -> None:
    directory = world.ensure().directory
    rot(directory / WEIGHTS_FILE)
    assert world.ensure().source == "disk"  # pack() checks every chunk that it packs
    seen: list[int] = []
    assert world.ensure(recheck=True, progress=seen.append).source == "downloaded"
    assert world.ensure(recheck=True).source == "disk"
    assert (directory / WEIGHTS_FILE).read_bytes() == current(world).files[WEIGHTS_FILE]


def test_recheck_repeats_the_content_checks(world: World) -> None:
    stored = world.ensure(recheck=True)
    assert all(m.delta_norm is not None for m in stored.manifest.modules)
    assert all(m.delta_norm is None for m in world.ensure().manifest.modules)


def test_a_doubted_copy_is_hashed_and_replaced_if_it_does_not_hold(world: World) -> None:
    stored, kept = world.ensure(), world.ensure("acme/finance:old")
    world.store().doubt(stored.key)
    world.store().doubt(stored.key)
    assert left(world.root) == sorted([kept.key.path_digest(), stored.key.path_digest()])
    assert world.ensure().source == "disk"
    rot(stored.directory / WEIGHTS_FILE)
    world.store().doubt(stored.key)
    assert world.ensure().source == "downloaded"


@pytest.mark.parametrize("mark", [None, b"", b"{}", b'{"schema": "adapterd.verified/1", "version_digest": "0"}'])
def test_without_its_mark_a_copy_is_hashed_again(world: World, mark: bytes | None) -> None:
    stored = world.ensure()
    path = stored.directory.parent / "verified.json"
    good = path.read_bytes()
    path.unlink() if mark is None else path.write_bytes(mark)
    seen: list[int] = []
    assert world.ensure(progress=seen.append).source == "disk"
    assert sum(seen) == stored.statement.total_bytes
    assert path.read_bytes() == good
    path.unlink()
    rot(stored.directory / WEIGHTS_FILE)
    assert world.ensure().source == "downloaded"


def test_lost_evidence_is_fetched_again(world: World) -> None:
    stored = world.ensure()
    for path in (stored.directory.parent / "evidence").iterdir():
        path.unlink()
    assert world.ensure().source == "disk"
    for path in (stored.directory.parent / "evidence").iterdir():
        path.write_bytes(b"{")
    assert world.ensure().source == "disk"


def test_a_full_disk(world: World) -> None:
    resolved, store = world.resolve(), world.store()
    with file_size_limit(20_000):
        found = refusal(lambda: store.ensure(resolved, world.registry.source(), BASE))
    assert isinstance(found, Unavailable)
    assert found.code is Code.STORAGE_FULL
    assert left(world.root) == []
    assert store.ensure(resolved, world.registry.source(), BASE).source == "downloaded"


def test_a_root_that_cannot_be_made(world: World, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    found = refusal(lambda: VerifiedStore(tmp_path / "file" / "store", world.trust))
    assert found.code is Code.STORAGE_UNAVAILABLE


@pytest.mark.parametrize("at", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_download_leaves_nothing(world: World, at: type[BaseException]) -> None:
    def interrupt(_: int) -> None:
        raise at

    with pytest.raises(at):
        world.ensure(progress=interrupt)
    assert left(world.root) == []
    assert world.ensure().source == "downloaded"


KILLED = """
import os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from fakes.packages import tiny_llama_spec
from adapterd.loader.identity import Ref
from adapterd.loader.sources import FolderSource
from adapterd.loader.store import VerifiedStore
from adapterd.loader.trust.policy import TrustStore
source = FolderSource(sys.argv[2])
store = VerifiedStore(Path(sys.argv[3]), TrustStore.load(sys.argv[4]))
resolved = source.resolve(Ref.parse("acme/finance"), "acme")
seen = 0
def die(n):
    global seen
    seen += n
    if seen > int(sys.argv[5]):
        os.kill(os.getpid(), 9)
store.ensure(resolved, source, tiny_llama_spec(), progress=die)
"""


def test_a_killed_process_leaves_only_what_the_next_start_sweeps(world: World, tmp_path: Path) -> None:
    version = current(world)
    as_folder(version, tmp_path / "root")
    world.trust.save(tmp_path / "trust.json")
    tests = Path(__file__).parents[1]
    arguments = [
        tests,
        tmp_path / "root",
        world.root,
        tmp_path / "trust.json",
        version.statement.total_bytes // 2,
    ]
    run = subprocess.run([sys.executable, "-c", KILLED, *map(str, arguments)], check=False, capture_output=True)
    assert run.returncode == -9, run.stderr
    assert [name.startswith(".incoming-") for name in left(world.root)] == [True]
    world.store()
    assert left(world.root) == []
    assert world.ensure().source == "downloaded"


# --- at once


def test_a_start_does_not_sweep_what_another_is_filling(world: World) -> None:
    seen: list[list[str]] = []

    def look(count: int) -> None:
        if count and not seen:
            world.store()
            seen.append(left(world.root))

    assert world.ensure(progress=look).source == "downloaded"
    assert [len(names) for names in seen] == [1]
    assert seen[0][0].startswith(".incoming-")


def test_many_threads_fetch_one_version_once(world: World) -> None:
    resolved = world.resolve()
    found: list[StoredVersion] = []
    start = threading.Barrier(6)

    def work() -> None:
        store = world.store()
        start.wait()
        found.append(store.ensure(resolved, world.registry.source(), BASE))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(f.source for f in found) == ["disk"] * 5 + ["downloaded"]
    assert sorted(world.fetched()) == sorted(current(world).files)
    assert len({f.directory for f in found}) == 1


def test_the_key_is_the_served_base_s(world: World) -> None:
    stored = world.ensure()
    assert stored.key == VersionKey("acme", BASE.pin, current(world).digest)
    assert stored.directory.parent.name == stored.key.path_digest()


def test_waiting_for_another_process_that_hangs_can_be_given_up(world: World) -> None:
    resolved = world.resolve()
    seen: list[int] = []

    def give_up(count: int) -> None:
        seen.append(count)
        if len(seen) == 3:
            raise error(Code.LEASE_CANCELLED, "acme/finance", "nobody waits for it any more")

    store = world.store()
    with StoreFolder(world.root).locked(resolved.key.path_digest()):
        found = refusal(lambda: store.ensure(resolved, world.registry.source(), BASE, progress=give_up))
        store.doubt(resolved.key)  # nor does that wait
    assert found.code is Code.LEASE_CANCELLED
    assert seen == [0, 0, 0]
    assert world.ensure().source == "downloaded"


def test_a_small_file_that_finds_no_room_leaves_no_piece_of_itself(world: World) -> None:
    stored = world.ensure()
    evidence = stored.directory.parent / "evidence"
    for path in evidence.iterdir():
        path.unlink()
    with file_size_limit(100):
        assert refusal(world.ensure).code is Code.STORAGE_FULL
    assert list(evidence.iterdir()) == []
    assert world.ensure().source == "disk"


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("../../victim")], ids=["pipe", "link"])
@pytest.mark.parametrize("lock", [True, False])
def test_the_store_writes_to_no_link_and_waits_for_no_pipe(
    world: World, lock: bool, make: Callable[[Path], None]
) -> None:
    """That somebody put under a lock's name, or under that of a file that is being written."""
    store, kept = world.store(), world.ensure().directory.parent
    victim = world.root.parent / "victim"
    victim.write_bytes(b"precious")
    place = world.root / ".locks" / kept.name if lock else kept / ".use.new"
    place.unlink(missing_ok=True)
    (kept / "use").unlink()
    make(place)
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(_loaded(world, store)), daemon=True)
    thread.start()
    thread.join(20)
    assert found == [Code.STORAGE_UNAVAILABLE if lock else "disk"]
    assert victim.read_bytes() == b"precious"


def _loaded(world: World, store: VerifiedStore) -> object:
    """Where it came from, or why it did not."""
    try:
        return world.ensure(store=store).source
    except Unavailable as refused:
        return refused.code
