"""The small parts: settings, slab, socket, trust file, pauses, books."""

from __future__ import annotations

import json
import mmap
import os
import socket
import stat
from pathlib import Path

import pytest

from adapterd.gpu_cache.budgets import TenantBudget
from adapterd.gpu_cache.host.process.backoff import GIVE_UP_AFTER, LONGEST_SECONDS, STEADY_SECONDS, Backoff
from adapterd.gpu_cache.host.process.books import MAX_LOSSES, Books, Pending
from adapterd.gpu_cache.host.process.memory import available_bytes
from adapterd.gpu_cache.host.process.messages import Resolve
from adapterd.gpu_cache.host.process.settings import (
    FolderSettings,
    LoaderSettings,
    RegistrySettings,
    settings_of,
)
from adapterd.gpu_cache.host.process.slab import OwnedSlab, SharedSlab
from adapterd.gpu_cache.host.process.sockets import Listener
from adapterd.gpu_cache.host.process.trust_watch import LOOK_SECONDS, TrustWatch
from adapterd.gpu_cache.host.process.worker_trust import WorkerTrust
from adapterd.loader.errors import AdapterdError, Code
from adapterd.loader.sources import FolderSource, RegistrySource
from adapterd.loader.trust.keys import generate_admission_key
from adapterd.loader.trust.policy import TrustStore
from fakes.hanging_source import HangingSource
from fakes.leftovers import mapped_slabs

TOKEN = "adrw_secret"
GOOD = {"source": {"kind": "folder", "root": "/p"}, "trust": "/t", "slab_bytes": 1 << 21}


class Seconds:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


# Settings


def test_settings_survive_their_way_to_the_loader() -> None:
    source = RegistrySettings(url="http://127.0.0.1:1", token=TOKEN)  # type: ignore[arg-type]
    settings = LoaderSettings(
        source=source, trust=Path("/t"), slab_bytes=5 << 20, tenants={"acme": TenantBudget(max_loads=2)}
    )
    assert LoaderSettings.parse(settings.as_json()) == settings
    assert settings.pages == 5
    assert TOKEN not in repr(settings)
    assert TOKEN not in str(settings)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"slab_bytes": "2097152"}, "slab_bytes"),
        ({"slab_bytes": 5}, "settings"),
        ({"threads": 0}, "threads"),
        ({"page_bytes": 1000}, "page_bytes"),
        ({"limits": {"max_rank": 0}}, "limits"),
        ({"more": 1}, "more"),
        ({"source": {"kind": "folder", "root": "/p", "url": "x"}}, "source.folder.url"),
        ({"source": {"kind": "registry", "url": "http://x", "token": TOKEN, "token_env": "T"}}, "source.registry"),
        ({"source": {"kind": "registry", "url": "http://x"}}, "source.registry"),
        ({"source": {"kind": "bucket"}}, "source"),
        ({"tenants": {"acme": {"max_loads": 1, "more": 2}}}, "tenants.acme.more"),
    ],
)
def test_a_mistake_in_the_settings_is_named_and_no_value_is_shown(change: dict[str, object], where: str) -> None:
    with pytest.raises(AdapterdError) as refused:
        LoaderSettings.parse(json.dumps(GOOD | change).encode())
    assert refused.value.code is Code.SETTINGS_INVALID
    assert refused.value.problem.where == where
    assert TOKEN not in str(refused.value)


def test_what_is_no_settings_document_is_refused() -> None:
    for data in (b"", b"[]", b"\xff", b"[" * 100_000, bytes(5 << 20)):
        with pytest.raises(AdapterdError) as refused:
            LoaderSettings.parse(data)
        assert refused.value.code is Code.SETTINGS_INVALID


def test_a_token_comes_from_one_of_three_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text(TOKEN + "\n")
    monkeypatch.setenv("LOADER_TOKEN", TOKEN)
    for how in ({"token": TOKEN}, {"token_file": tmp_path / "token"}, {"token_env": "LOADER_TOKEN"}):
        with RegistrySettings(url="http://127.0.0.1:1", **how).open() as source:  # type: ignore[arg-type, attr-defined]
            assert source.token == TOKEN
    (tmp_path / "long").write_text(TOKEN + 5000 * " " + "x")
    os.mkfifo(tmp_path / "pipe")  # would be waited for
    wrong = [{"token_file": tmp_path / name} for name in ("none", "long", "pipe")]
    for how in (*wrong, {"token_env": "LOADER_NO_TOKEN"}):
        with pytest.raises(AdapterdError):
            RegistrySettings(url="http://127.0.0.1:1", **how).open()  # type: ignore[arg-type]


def test_equal_sources_have_equal_identities_whatever_the_token(tmp_path: Path) -> None:
    here = settings_of(FolderSource(tmp_path))
    assert here.identity == FolderSettings(root=tmp_path / "." / "x" / "..").identity
    assert here.identity != settings_of(FolderSource(tmp_path / "y")).identity
    with RegistrySource("http://127.0.0.1:1/", TOKEN) as one, RegistrySource("http://127.0.0.1:1", "other") as two:
        assert settings_of(one).identity == settings_of(two).identity
    with pytest.raises(AdapterdError) as refused:
        settings_of(HangingSource(FolderSource(tmp_path)))
    assert refused.value.code is Code.SETTINGS_INVALID


# Slab


def test_a_slab_is_seen_and_can_be_neither_written_nor_resized_by_others() -> None:
    owned = OwnedSlab(3 * 4096, 4096)
    seen = SharedSlab.mapped(owned.descriptor, 3 * 4096, 4096)
    owned.slab.memory[5000] = 7
    assert seen.memory[5000] == 7
    assert seen.memory.readonly
    with pytest.raises(PermissionError):
        mmap.mmap(owned.descriptor, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    for size in (4096, 4 * 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(owned.descriptor, size)
    with pytest.raises(PermissionError):
        os.pwrite(owned.descriptor, b"x", 0)
    owned.close()
    owned.close()
    assert seen.memory[5000] == 7


def test_all_pages_of_a_slab_are_there_from_the_start() -> None:
    owned = OwnedSlab(1 << 20, 4096)
    assert os.fstat(owned.descriptor).st_blocks * 512 >= 1 << 20
    owned.close()


def test_only_a_sealed_slab_of_the_right_size_is_mapped() -> None:
    owned, loose = OwnedSlab(8192, 4096), os.memfd_create("loose")
    os.ftruncate(loose, 8192)
    for descriptor, size in ((owned.descriptor, 4096), (loose, 8192), (0, 8192)):
        with pytest.raises(AdapterdError) as refused:
            SharedSlab.mapped(descriptor, size, 4096)
        assert refused.value.code is Code.LOADER_UNAVAILABLE
    os.close(loose)
    owned.close()


def test_memory_that_is_not_there_is_an_error_and_leaves_nothing_open() -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(AdapterdError) as refused:
        OwnedSlab(1 << 62, 4096)
    assert refused.value.code is Code.STORAGE_FULL
    assert os.listdir("/proc/self/fd") == before


def test_the_tightest_of_machine_and_container_counts(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:  7 kB\n")
    assert available_bytes(tmp_path) == 7 << 10
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.current").write_text("5000\n")
    for most, left in (("max\n", 7 << 10), ("9000\n", 4000), ("4000\n", 0)):
        (group / "memory.max").write_text(most)
        assert available_bytes(tmp_path) == left


def test_a_mapping_goes_with_the_last_that_refers_to_it() -> None:
    before = mapped_slabs()
    owned = OwnedSlab(8192, 4096)
    seen = SharedSlab.mapped(owned.descriptor, 8192, 4096)
    owned.close()
    assert len(mapped_slabs() - before) == 2
    del seen, owned
    assert mapped_slabs() <= before


# Socket


def test_a_socket_is_for_its_user_alone_and_a_dead_loaders_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "run/adapterd/s"
    first = Listener(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    with pytest.raises(AdapterdError) as taken:
        Listener(path)
    assert taken.value.code is Code.CONFLICT
    first.close()
    first.close()
    assert not path.exists()
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))  # leaves its file
    Listener(path).close()
    path.write_text("somebody's file")
    with pytest.raises(AdapterdError) as refused:
        Listener(path)
    assert refused.value.code is Code.SETTINGS_INVALID
    assert path.read_text() == "somebody's file"


def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(AdapterdError) as refused:
        Listener(tmp_path / "s")
    assert refused.value.code is Code.SETTINGS_INVALID
    with pytest.raises(AdapterdError) as refused:
        Listener(tmp_path / ("s" * 120))
    assert refused.value.code is Code.SETTINGS_INVALID


# Trust


def trust_with_key() -> TrustStore:
    trust = TrustStore()
    trust.add_admission_key(generate_admission_key().public)
    return trust


def test_a_changed_trust_file_is_read_and_looked_for_once_a_second(tmp_path: Path) -> None:
    path, clock = tmp_path / "trust.json", Seconds()
    first, second = trust_with_key(), trust_with_key()
    first.save(path)
    watch = TrustWatch(path, clock)
    second.save(path)
    watch.look()
    assert watch.store == first  # too early
    clock.now += LOOK_SECONDS
    watch.look()
    assert watch.store == second
    assert watch.store.changes == 1
    clock.now += LOOK_SECONDS
    watch.look()
    assert watch.store.changes == 1


def test_a_trust_file_that_does_not_hold_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, trust = tmp_path / "trust.json", trust_with_key()
    trust.save(path)
    watch = TrustWatch(path, Seconds())
    for break_it in (lambda: path.write_text("{"), path.unlink):
        break_it()
        watch.read()
        assert watch.store == trust
        assert watch.store.changes == 0
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
    trust_with_key().save(path)
    watch.read()
    assert watch.store.changes == 1


def test_a_worker_goes_by_its_file_as_it_is_now_unless_it_changed_its_store(tmp_path: Path) -> None:
    path, other = tmp_path / "trust.json", trust_with_key()
    trust_with_key().save(path)
    trust = TrustStore.load(path)
    worker = WorkerTrust(trust, None)
    assert worker.digest() == trust.digest
    other.save(path)
    assert worker.digest() == other.digest
    path.write_text("{")
    assert worker.digest() == trust.digest
    other.save(path)
    trust.revoke_key(trust.admission_keys[0].key.key_id)
    assert worker.digest() == trust.digest != other.digest
    assert worker.changes == 1


def test_a_loader_of_its_own_gets_a_copy_that_follows(tmp_path: Path) -> None:
    copy, trust = tmp_path / "new/trust.json", trust_with_key()
    worker = WorkerTrust(trust, copy)
    for _ in range(2):
        assert worker.digest() == trust.digest == TrustStore.load(copy).digest
        trust.revoke_key(trust.admission_keys[0].key.key_id)


# Pauses and books


def test_pauses_grow_until_something_works() -> None:
    clock = Seconds()
    backoff, pauses = Backoff(clock, first=1.0), []
    for _ in range(7):
        backoff.connected()
        backoff.failed()
        pauses.append(backoff.pause)
        assert backoff.given_up == (len(pauses) >= GIVE_UP_AFTER)
    assert pauses == [0.0, 1.0, 2.0, 4.0, 5.0, 5.0, 5.0]
    assert pauses[-1] == LONGEST_SECONDS
    backoff.worked()
    assert (backoff.pause, backoff.given_up) == (0.0, False)
    backoff.failed()
    backoff.failed()
    backoff.connected()
    clock.now += STEADY_SECONDS + 1
    backoff.failed()
    assert backoff.pause == 0.0


def test_a_request_is_lost_so_often_and_no_more() -> None:
    books, said = Books(), []
    asked = Pending(Resolve(books.next(), "acme", ()), said.append)
    books.ask(asked)
    for _ in range(MAX_LOSSES - 1):
        assert books.lost() == []
        assert books.requests() == [asked.message]
    assert books.lost() == [asked]
    assert len(books) == 0


def test_what_is_held_at_a_loader_that_is_gone_is_not_told_to_the_next() -> None:
    books, old, new = Books(), SharedSlab(memoryview(b""), 1), SharedSlab(memoryview(b""), 1)
    for _ in range(3):
        books.ask(Pending(Resolve(books.next(), "acme", ()), print))
    assert books.answered(1, old) is not None
    assert books.answered(2, new) is not None
    assert [books.released(number, new) for number in (1, 2, 3, 3, 9)] == [False, True, True, False, False]
    assert books.answered(3, new) is None
    assert len(books) == 0
