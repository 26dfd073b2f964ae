"""Cold loads of versions that a host has read before, in this process and in a loader process.

What a host remembers of a version (its structure, its layout) spares work and decides nothing: every byte is read
and checked anew, and so is trust.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from adapterd.gpu_cache import CacheConfig, open_device
from adapterd.gpu_cache.eviction import LeastRecentlyUsed
from adapterd.gpu_cache.host.interface import Host, Image, Origin
from adapterd.gpu_cache.host.opening import open_host
from adapterd.gpu_cache.host.process.client import HostClient
from adapterd.loader.errors import Code
from adapterd.loader.identity import CONFIG_FILE, WEIGHTS_FILE, Ref
from adapterd.loader.limits import MIB
from adapterd.loader.sources import Resolved
from contracts.host_user import HostUser, held_bytes
from fakes.publisher import FolderPublisher
from fakes.toy_models import LINEARS, toy_spec

REF = "acme/finance"


class Loads:
    """One host, whose images go as soon as nobody holds them; so every load is cold."""

    def __init__(self, host: Host, publisher: FolderPublisher, store: Path) -> None:
        self.host, self.user, self.store = host, HostUser(host), store
        self.version: Resolved = publisher.source.resolve(Ref.parse(REF), "acme")

    def load(self) -> tuple[Origin, bytes]:
        asked = self.user.fetch(self.version)
        (image,) = asked.answer()
        assert isinstance(image, Image)
        found = image.origin, held_bytes(image)
        self.host.release(asked.number)
        return found

    def problem(self) -> Code:
        return self.user.fetch(self.version).problem().code

    def file(self, name: str) -> Path:
        (found,) = self.store.rglob(name)
        return found

    def reads(self) -> tuple[int, int]:
        """Reads that the process with the loader asked the system for so far, and their bytes."""
        process = self.host.loader_process if isinstance(self.host, HostClient) else "self"
        lines = Path(f"/proc/{process}/io").read_text().splitlines()
        found = dict(line.split(": ") for line in lines)
        return int(found["syscr"]), int(found["rchar"])


Open = Callable[..., "contextmanager[Loads]"]


@pytest.fixture
def publisher(tmp_path: Path) -> FolderPublisher:
    publisher = FolderPublisher(tmp_path / "published", toy_spec())
    publisher.publish("acme", "finance", modules=LINEARS, rank=64, alpha=4, seed=1)
    return publisher


@pytest.fixture(params=["thread", "process"])
def opened(request: pytest.FixtureRequest, publisher: FolderPublisher, tmp_path: Path) -> Open:
    @contextmanager
    def opened(key: str | None = "store.key") -> Iterator[Loads]:
        config = CacheConfig(
            vram_bytes=8 * MIB,
            host_bytes=8 * MIB,
            keep_host=False,
            loader=request.param,
            loader_threads=1,  # so that what is to be kept is on disk before the next load
            store=tmp_path / "store",
            store_key=None if key is None else tmp_path / key,
        )
        device = open_device("cpu")
        with open_host(config, device, publisher.source, publisher.trust, publisher.base, LeastRecentlyUsed()) as host:
            yield Loads(host, publisher, tmp_path / "store")
        device.close()

    return opened


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the system does not count")
@pytest.mark.parametrize(("key", "origin"), [(None, Origin.DISK), ("store.key", Origin.PACKED)])
def test_a_cold_load_reads_each_byte_once(opened: Open, key: str | None, origin: Origin) -> None:
    """And beside them no more than statement, signature, mark and description, in a few calls."""
    with opened(key) as loads:
        first = loads.load()[1]
        loads.load()
        before = loads.reads()
        assert loads.load() == (origin, first)
        calls, nbytes = (b - a for a, b in zip(before, loads.reads(), strict=True))
        size = len(first) if key else loads.file(WEIGHTS_FILE).stat().st_size
        assert size > MIB // 4
        assert size <= nbytes < size + 64 * 1024
        assert calls < 60


def test_structure_is_read_once_and_bytes_are_read_each_time(opened: Open) -> None:
    with opened(None) as loads:
        first = loads.load()[1]
        config = loads.file(CONFIG_FILE)
        config.write_bytes(b"{" * config.stat().st_size)  # whoever reads it again finds that it does not hold
        assert loads.load() == (Origin.DISK, first)
        flip(loads.file(WEIGHTS_FILE), -1)
        assert loads.problem() is Code.CHUNK_MISMATCH
        assert loads.load() == (Origin.SOURCE, first)
        assert loads.load() == (Origin.DISK, first)


def test_a_file_that_was_cut_off_is_fetched_anew(opened: Open) -> None:
    with opened(None) as loads:
        first = loads.load()[1]
        weights = loads.file(WEIGHTS_FILE)
        os.truncate(weights, weights.stat().st_size - 1)
        assert loads.load() == (Origin.SOURCE, first)


@pytest.mark.parametrize(
    "attack",
    [
        lambda path: flip(path, 0),
        lambda path: flip(path, -1),
        lambda path: os.truncate(path, path.stat().st_size - 1),
        lambda path: path.unlink(),
    ],
    ids=["first byte", "last byte", "cut off", "gone"],
)
def test_a_packed_form_that_does_not_hold_is_packed_anew(opened: Open, attack: Callable[[Path], object]) -> None:
    with opened() as loads:
        first = loads.load()[1]
        assert loads.load() == (Origin.PACKED, first)
        attack(loads.file("*.image"))
        assert loads.load() == (Origin.DISK, first)
        assert loads.load() == (Origin.PACKED, first)


def test_another_key_believes_nothing_of_what_was_packed(opened: Open) -> None:
    with opened() as loads:
        first = loads.load()[1]
        assert loads.load() == (Origin.PACKED, first)
    with opened("other.key") as loads:
        flip(loads.file("*.image"), 5)
        assert loads.load() == (Origin.DISK, first)
        assert loads.load() == (Origin.PACKED, first)


@pytest.mark.parametrize("key", [None, "store.key"])
def test_a_key_that_was_revoked_refuses_what_was_loaded_before(
    opened: Open, publisher: FolderPublisher, key: str | None
) -> None:
    with opened(key) as loads:
        loads.load()
        loads.load()
        publisher.trust.revoke_key(publisher.trust.tenant("acme").publishers[0].key.key_id)
        assert loads.problem() is Code.KEY_REVOKED
