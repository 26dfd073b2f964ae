"""Packed forms that are kept: they spare the packing, and no byte in them is believed for lying there."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from adapterd.loader.errors import Code, Unavailable, Untrusted
from adapterd.loader.identity import WEIGHTS_FILE
from adapterd.loader.image import CHUNK_BYTES
from adapterd.loader.layout import Dtype, Layout
from adapterd.loader.planning import plan_layout
from adapterd.loader.sharding import WHOLE, Sharding
from adapterd.loader.store import StoredVersion, VerifiedStore
from adapterd.loader.store_folder import StoreFolder
from adapterd.loader.store_key import StoreKey
from fakes.disk import file_size_limit
from fakes.store_world import EVERY_LINEAR, World

KEY, OTHER_KEY = StoreKey(b"k" * 32), StoreKey(b"o" * 32)
PAGE = 1 << 13


@dataclass
class Worker:
    """A worker that keeps packed forms."""

    world: World
    store: VerifiedStore

    def load(
        self,
        text: str = "acme/finance",
        dtype: Dtype = "F32",
        page: int = PAGE,
        *,
        keep: bool = True,
        sharding: Sharding = WHOLE,
    ) -> tuple[str, bytes, bool]:
        """Where the bytes came from, the bytes, and whether they were kept."""
        stored = self.world.ensure(text, self.store)
        layout = plan_layout(stored.manifest, dtype, page, sharding)
        out = bytearray(b"\xff" * layout.nbytes)
        filled = self.store.fill(stored, layout, memoryview(out))
        kept = keep and self.store.keep_packed(stored, layout, filled, memoryview(out))
        return filled.origin, bytes(out), kept

    def packed(self, text: str = "acme/finance") -> Path:
        return self.world.root / self.world.resolve(text).key.path_digest() / "packed"


@pytest.fixture
def worker(world: World) -> Worker:
    return Worker(world, world.store(store_key=KEY))


def image(folder: Path) -> Path:
    return folder / f"F32-{PAGE}.image"


def description(folder: Path) -> Path:
    return folder / f"F32-{PAGE}.json"


def test_ranks_of_one_machine_keep_their_parts_beside_each_other(worker: Worker) -> None:
    """Their tables are equal and their bytes are not: neither finds the other's, nor drops it."""
    shards = [Sharding.of(rank, 2, column=["q_proj"], row=["o_proj", "down_proj"]) for rank in range(2)]
    packed = [worker.load(sharding=sharding)[1] for sharding in shards]
    assert packed[0] != packed[1] and len(packed[0]) == len(packed[1])
    for sharding, wanted in zip(shards, packed, strict=True):
        origin, found, _ = worker.load(sharding=sharding)
        assert (origin, found) == ("packed", wanted)


def test_the_second_load_reads_what_the_first_packed(worker: Worker) -> None:
    origin, first, kept = worker.load()
    assert (origin, kept) == ("downloaded", True)
    origin, second, kept = worker.load()
    assert (origin, kept) == ("packed", False)
    assert first == second
    assert sorted(p.name for p in worker.packed().iterdir()) == [f"F32-{PAGE}.image", f"F32-{PAGE}.json"]


def test_it_outlives_the_process(worker: Worker, world: World) -> None:
    _, bytes_then, _ = worker.load()
    again = Worker(world, world.store(store_key=StoreKey(b"k" * 32)))
    assert again.load() == ("packed", bytes_then, False)


def test_the_source_of_the_bytes_is_told(worker: Worker) -> None:
    assert [worker.load(keep=False)[0], worker.load(keep=False)[0], worker.load()[0]] == ["downloaded", "disk", "disk"]
    assert worker.load()[0] == "packed"


def test_without_a_key_nothing_is_kept(world: World) -> None:
    worker = Worker(world, world.store())
    assert [worker.load()[::2], worker.load()[::2]] == [("downloaded", False), ("disk", False)]
    assert not worker.packed().exists()


def test_a_packed_form_needs_no_tensor_file(worker: Worker) -> None:
    """It is read alone: the tensor file's values are not touched."""
    _, first, _ = worker.load()
    stored = worker.world.ensure(store=worker.store)
    weights = stored.directory / WEIGHTS_FILE
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert worker.load() == ("packed", first, False)


def test_pages_from_anywhere_are_filled_alike(worker: Worker) -> None:
    stored = worker.world.ensure(store=worker.store)
    layout = plan_layout(stored.manifest, "F32", PAGE)
    assert layout.n_pages > 2
    pages = [memoryview(bytearray(b"\xff" * PAGE)) for _ in range(layout.n_pages)]
    filled = worker.store.fill(stored, layout, pages)
    assert worker.store.keep_packed(stored, layout, filled, pages)
    again = [memoryview(bytearray(PAGE)) for _ in range(layout.n_pages)]
    assert worker.store.fill(stored, layout, again).origin == "packed"
    assert b"".join(again) == b"".join(pages) == worker.load()[1]


def test_each_layout_has_its_own(worker: Worker) -> None:
    layouts: list[tuple[Dtype, int]] = [("F32", PAGE), ("BF16", PAGE), ("F32", 2 * PAGE)]
    first = [worker.load(dtype=dtype, page=page)[1] for dtype, page in layouts]
    assert [worker.load(dtype=dtype, page=page) for dtype, page in layouts] == [("packed", b, False) for b in first]


# --- somebody with the disk


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def swapped(one: Path, two: Path) -> None:
    spare = one.with_name("spare")
    one.rename(spare)
    two.rename(one)
    spare.rename(two)


@pytest.mark.parametrize(
    "attack",
    [
        lambda folder: flip(image(folder), 0),
        lambda folder: flip(image(folder), -1),
        lambda folder: os.truncate(image(folder), image(folder).stat().st_size - 1),
        lambda folder: image(folder).write_bytes(image(folder).read_bytes() + b"\0"),
        lambda folder: image(folder).unlink(),
        lambda folder: (image(folder).unlink(), image(folder).symlink_to("/dev/zero")),
        lambda folder: (image(folder).unlink(), os.mkfifo(image(folder))),
        lambda folder: flip(description(folder), 0),
        lambda folder: flip(description(folder), 80),
        lambda folder: flip(description(folder), -5),
        lambda folder: description(folder).write_bytes(b""),
        lambda folder: description(folder).write_bytes(b"{}"),
        lambda folder: (description(folder).unlink(), os.mkfifo(description(folder))),
    ],
    ids=[
        "first byte", "last byte", "short", "long", "gone", "link", "pipe", "mac", "facts", "tags", "empty",
        "no mac", "description a pipe",
    ],
)  # fmt: skip
def test_what_was_edited_is_dropped_and_packed_anew(worker: Worker, attack: Callable[[Path], object]) -> None:
    _, good, _ = worker.load()
    attack(worker.packed())
    origin, found, kept = worker.load()
    assert (origin, found, kept) == ("disk", good, True)
    assert worker.load() == ("packed", good, False)


def test_bytes_and_tags_edited_together_have_no_mac(worker: Worker) -> None:
    """The tags of foreign bytes, well made: only the key is missing."""
    _, good, _ = worker.load()
    folder = worker.packed()
    forger = Worker(worker.world, worker.world.store(store_key=OTHER_KEY))
    forger.load()  # drops ours, keeps its own, which holds under its key
    assert forger.load()[0] == "packed"
    assert image(folder).exists()
    assert worker.load()[:2] == ("disk", good)


def test_packed_forms_of_two_versions_swapped(worker: Worker) -> None:
    package = {"modules": EVERY_LINEAR, "rank": 16, "files": {"README.md": b"# two\n"}}
    worker.world.publish("acme/twin", 3, package=package)
    one, two = worker.load()[1], worker.load("acme/twin")[1]
    assert one != two and len(one) == len(two)
    swapped(worker.packed(), worker.packed("acme/twin"))
    assert worker.load()[:2] == ("disk", one)
    assert worker.load("acme/twin")[:2] == ("disk", two)


def test_packed_forms_of_two_tenants_swapped(worker: Worker) -> None:
    """Equal bytes of two tenants: the description names the tenant all the same."""
    package = {"modules": EVERY_LINEAR, "rank": 16, "files": {"README.md": b"# two\n"}}
    worker.world.publish("globex/finance", 2, package=package)
    assert worker.load()[1] == worker.load("globex/finance")[1]
    swapped(worker.packed(), worker.packed("globex/finance"))
    assert worker.load()[0] == "disk"


def test_a_packed_form_of_another_layout_under_this_name(worker: Worker) -> None:
    """As a program that places blocks elsewhere would have left it."""
    stored = worker.world.ensure(store=worker.store)
    layout = plan_layout(stored.manifest, "F32", PAGE)
    table = layout.table.copy()
    table[:, 5] = layout.n_pages - 1 - table[:, 5]
    elsewhere = Layout.of_table(PAGE, "F32", layout.n_pages, table)
    out = memoryview(bytearray(layout.nbytes))
    assert worker.store.keep_packed(stored, elsewhere, worker.store.fill(stored, elsewhere, out), out)
    origin, good, kept = worker.load()
    assert (origin, kept) == ("disk", True)
    assert good != bytes(out)


def test_a_packed_form_of_another_dtype_under_this_name(worker: Worker) -> None:
    good = worker.load()[1]
    worker.load(dtype="BF16")
    for ending in ("image", "json"):
        (worker.packed() / f"BF16-{PAGE}.{ending}").replace(worker.packed() / f"F32-{PAGE}.{ending}")
    assert worker.load()[:2] == ("disk", good)


def test_two_chunks_swapped(worker: Worker) -> None:
    """Each has a tag that holds, as another part."""
    stored = worker.world.ensure(store=worker.store)
    page = 2 * CHUNK_BYTES
    good = worker.load(page=page)[1]
    assert plan_layout(stored.manifest, "F32", page).nbytes == page
    path = worker.packed() / f"F32-{page}.image"
    data = path.read_bytes()
    assert data[:CHUNK_BYTES] != data[CHUNK_BYTES:]
    path.write_bytes(data[CHUNK_BYTES:] + data[:CHUNK_BYTES])
    assert worker.load(page=page) == ("disk", good, True)


def test_an_older_seal_does_not_go_with_newer_bytes(worker: Worker) -> None:
    """Nor the other way round: two seals of one version share neither key nor tags."""
    good = worker.load()[1]
    before = description(worker.packed()).read_bytes()
    flip(image(worker.packed()), 0)
    assert worker.load() == ("disk", good, True)
    after = description(worker.packed()).read_bytes()
    tags = [set(json.loads(text.partition(b"\n")[2])["tags"]) for text in (before, after)]
    assert len(tags[0]) == len(tags[1]) > 0 and not tags[0] & tags[1]
    description(worker.packed()).write_bytes(before)  # of equal bytes: no attack
    assert worker.load() == ("packed", good, False)


def test_trust_is_asked_at_every_load_of_a_packed_form(worker: Worker) -> None:
    worker.load()
    worker.world.trust.revoke_key(worker.world.key.public.key_id)
    with pytest.raises(Untrusted) as refused:
        worker.load()
    assert refused.value.code is Code.KEY_REVOKED


# --- keeping


def test_memory_that_was_overwritten_since_is_never_believed(worker: Worker) -> None:
    """The tags are those of the packed bytes, not of what is written later."""
    stored = worker.world.ensure(store=worker.store)
    layout = plan_layout(stored.manifest, "F32", PAGE)
    out = memoryview(bytearray(layout.nbytes))
    filled = worker.store.fill(stored, layout, out)
    good = bytes(out)
    out[:5] = b"other"
    worker.store.keep_packed(stored, layout, filled, out)
    assert worker.load()[:2] == ("disk", good)


def test_a_crash_before_the_description_leaves_nothing_that_counts(worker: Worker) -> None:
    good = worker.load()[1]
    description(worker.packed()).unlink()
    flip(image(worker.packed()), 3)
    assert worker.load() == ("disk", good, True)


def test_somebody_else_has_the_version(worker: Worker) -> None:
    stored = worker.world.ensure(store=worker.store)
    layout = plan_layout(stored.manifest, "F32", PAGE)
    out = memoryview(bytearray(layout.nbytes))
    filled = worker.store.fill(stored, layout, out)
    with StoreFolder(worker.world.root).locked(stored.key.path_digest()):
        assert not worker.store.keep_packed(stored, layout, filled, out)
    assert worker.store.keep_packed(stored, layout, filled, out)


def test_the_version_has_gone(worker: Worker) -> None:
    stored: StoredVersion = worker.world.ensure(store=worker.store)
    layout = plan_layout(stored.manifest, "F32", PAGE)
    out = memoryview(bytearray(layout.nbytes))
    filled = worker.store.fill(stored, layout, out)
    StoreFolder(worker.world.root).remove(stored.key.path_digest())
    assert not worker.store.keep_packed(stored, layout, filled, out)
    assert worker.load()[0] == "downloaded"


def test_a_full_disk_costs_the_packed_form_and_nothing_else(worker: Worker) -> None:
    stored = worker.world.ensure(store=worker.store)
    layout = plan_layout(stored.manifest, "F32", PAGE)
    out = memoryview(bytearray(layout.nbytes))
    filled = worker.store.fill(stored, layout, out)
    with file_size_limit(layout.nbytes // 2):
        assert not worker.store.keep_packed(stored, layout, filled, out)
    assert list(worker.packed().iterdir()) == []
    assert worker.load() == ("disk", bytes(out), True)


def test_a_process_without_descriptors_drops_nothing(worker: Worker) -> None:
    """It cannot read the version's files either, and says so; the next one that can finds its packed form."""
    packed = worker.load()[1]
    stored = worker.world.ensure(store=worker.store)
    layout = plan_layout(stored.manifest, "F32", PAGE)
    few, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, most))
    try:
        with pytest.raises(Unavailable) as refused:
            worker.store.fill(stored, layout, memoryview(bytearray(layout.nbytes)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, most))
    assert refused.value.code is Code.STORAGE_UNAVAILABLE
    assert worker.load() == ("packed", packed, False)
