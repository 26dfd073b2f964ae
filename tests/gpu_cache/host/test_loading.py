"""The cache over the real loader: a signed folder, the verified store, packing."""

from __future__ import annotations

import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from adapterd.gpu_cache import AdapterCache, CacheConfig, LeaseState
from adapterd.gpu_cache.host.interface import Origin, Stage
from adapterd.gpu_cache.host.loading import Prepared, Serving, StoreLoader, packed_dtype
from adapterd.gpu_cache.host.meters import Meter
from adapterd.gpu_cache.slots import Resident
from adapterd.loader.errors import AdapterdError, Code
from adapterd.loader.identity import WEIGHTS_FILE, BasePin, Ref, VersionKey
from adapterd.loader.limits import MIB
from adapterd.loader.sources import Resolved
from adapterd.loader.store import VerifiedStore
from adapterd.loader.trust.policy import TrustStore
from fakes.hanging_source import HangingSource
from fakes.publisher import FolderPublisher
from fakes.toy_models import LINEARS, toy_spec

UNTOLD = Meter(VersionKey("acme", BasePin("x", "y", "z"), ""), Stage.VERIFY)
"""Nobody looks at it."""


@pytest.fixture
def publisher(tmp_path: Path) -> FolderPublisher:
    return FolderPublisher(tmp_path / "published", toy_spec())


def cache_over(publisher: FolderPublisher, **settings: object) -> AdapterCache:
    config = CacheConfig(vram_bytes=8 * MIB, host_bytes=8 * MIB, **settings)  # type: ignore[arg-type]
    return AdapterCache(config, base=publisher.base, source=publisher.source, trust=publisher.trust)


def rows(arena: torch.Tensor, resident: Resident, module: str, matrix: str) -> np.ndarray:
    """A [rank, in] or Bᵀ [rank, out], read block by block out of the arena. F32."""
    layout, parts = resident.layout, []
    for block in layout.blocks:
        if (resident.manifest.modules[block.module].name, block.matrix) == (module, matrix):
            begin = resident.pages[block.page] * layout.page_bytes + block.offset
            raw = arena[begin : begin + 4 * block.rows * block.width].numpy().view(np.float32)
            parts.append(raw.reshape(block.rows, block.width))
    return np.concatenate(parts)


@pytest.mark.parametrize("wanted", ["auto", "F32"])
def test_the_arena_holds_the_published_factors(publisher: FolderPublisher, wanted: str) -> None:
    dtype = "F32" if wanted == "auto" else "BF16"
    package = publisher.publish("acme", "finance", modules=LINEARS, rank=19, alpha=4, dtype=dtype, seed=1)
    with cache_over(publisher, dtype=wanted) as cache:
        ((resident, _),) = cache.acquire("acme/finance", tenant="acme").wait(60).composition
        assert resident.layout.dtype == "F32"
        for module, (a, b) in package.factors.items():
            np.testing.assert_array_equal(rows(cache.arena, resident, module, "a"), a.astype(np.float32))
            np.testing.assert_array_equal(rows(cache.arena, resident, module, "b"), b.T.astype(np.float32))


def test_a_byte_changed_in_the_source_never_gets_in(publisher: FolderPublisher) -> None:
    publisher.publish("acme", "finance", modules=["q_proj"])
    _flip(publisher.root / "acme/finance/1" / WEIGHTS_FILE)
    with cache_over(publisher) as cache:
        assert _failure(cache, "acme/finance") in {Code.HASH_MISMATCH, Code.CHUNK_MISMATCH}
        assert cache.statistics().host_bytes == {}


def test_a_byte_changed_on_disk_is_found_while_packing_and_healed_by_the_next_acquire(
    publisher: FolderPublisher, tmp_path: Path
) -> None:
    publisher.publish("acme", "finance", modules=["q_proj"])
    ref = Ref.parse("acme/finance")
    loader = StoreLoader(
        publisher.source,
        VerifiedStore(tmp_path / "store", publisher.trust),
        page_bytes=MIB,
    )
    prepared = loader.prepare(loader.resolve(ref, "acme"), Serving(publisher.base), lambda: False, UNTOLD)
    (stored,) = (tmp_path / "store").rglob(WEIGHTS_FILE)
    _flip(stored)
    out = memoryview(bytearray(prepared.layout.nbytes))
    with pytest.raises(AdapterdError) as refused:
        prepared.fill(out)
    assert refused.value.code is Code.CHUNK_MISMATCH
    again = loader.prepare(loader.resolve(ref, "acme"), Serving(publisher.base), lambda: False, UNTOLD)
    again.fill(out)
    with cache_over(publisher, store=tmp_path / "store") as cache:
        ((resident, _),) = cache.acquire("acme/finance", tenant="acme").wait(60).composition
        begin = resident.pages[0] * MIB
        assert bytes(cache.arena[begin : begin + MIB].numpy()) == bytes(out[:MIB])


def test_a_version_for_another_base_is_refused(publisher: FolderPublisher) -> None:
    publisher.publish("acme", "finance", modules=["q_proj"])
    with cache_over(publisher) as cache:
        cache.rebind(replace(publisher.base, revision="c" * 40))
        assert _failure(cache, "acme/finance") is Code.BASE_REVISION_MISMATCH


def test_a_foreign_adapter_is_a_missing_one(publisher: FolderPublisher) -> None:
    publisher.publish("blue", "secret", modules=["q_proj"])
    with cache_over(publisher) as cache:
        assert _failure(cache, "blue/secret") is _failure(cache, "acme/none") is Code.NOT_FOUND


def test_a_load_that_nobody_wants_any_more_stops(publisher: FolderPublisher, tmp_path: Path) -> None:
    publisher.publish("acme", "finance", modules=["q_proj"])
    store = VerifiedStore(tmp_path / "store", publisher.trust)
    loader = StoreLoader(publisher.source, store, page_bytes=MIB)
    asked: list[bool] = []

    def cancelled() -> bool:
        asked.append(True)
        return len(asked) > 1  # in the middle of the download

    with pytest.raises(AdapterdError) as stopped:
        loader.prepare(loader.resolve(Ref.parse("acme/finance"), "acme"), Serving(publisher.base), cancelled, UNTOLD)
    assert stopped.value.code is Code.LEASE_CANCELLED
    assert list((tmp_path / "store").rglob(WEIGHTS_FILE)) == []


def test_a_store_of_its_own_goes_with_the_cache(
    publisher: FolderPublisher, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    publisher.publish("acme", "finance", modules=["q_proj"])
    before = set(threading.enumerate())
    with cache_over(publisher) as cache:
        cache.acquire("acme/finance", tenant="acme").wait(60)
        assert list(tmp_path.glob("adapterd-store-*"))
    assert not list(tmp_path.glob("adapterd-store-*"))
    assert set(threading.enumerate()) <= before


def test_auto_is_the_adapters_own_dtype(publisher: FolderPublisher, tmp_path: Path) -> None:
    publisher.publish("acme", "half", modules=["q_proj"], dtype="F16")
    store = VerifiedStore(tmp_path / "store", publisher.trust)
    resolved = publisher.source.resolve(Ref.parse("acme/half"), "acme")
    manifest = store.ensure(resolved, publisher.source, publisher.base).manifest
    assert packed_dtype("auto", manifest) == "F16"
    assert packed_dtype("BF16", manifest) == "BF16"
    module = manifest.modules[0]
    mixed = replace(manifest, modules=(module, replace(module, dtype="BF16")))
    assert packed_dtype("auto", mixed) == "F32"


def test_a_cache_needs_somewhere_to_load_from(publisher: FolderPublisher) -> None:
    with pytest.raises(ValueError, match="a source and a trust store"):
        AdapterCache(CacheConfig(), base=publisher.base)


@pytest.mark.parametrize(
    "settings",
    [
        {"loader": "fork"},
        {"loader_socket": Path("loader.sock")},
        {"vram_bytes": 1000},
        {"host_bytes": 0},
        {"loader_threads": 0},
        {"store_bytes": 0},
        {"page_bytes": 1000},
        {"pages_per_step": 0},
    ],
)
def test_settings_are_checked(settings: dict[str, object]) -> None:
    with pytest.raises(AdapterdError) as refused:
        CacheConfig(**settings)  # type: ignore[arg-type]
    assert refused.value.code is Code.SETTINGS_INVALID
    assert refused.value.problem.where in settings


def _failure(cache: AdapterCache, ref: str) -> Code:
    with pytest.raises(AdapterdError) as failed:
        cache.acquire(ref, tenant="acme").wait(60)
    return failed.value.code


def _flip(path: Path) -> None:
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[-3] ^= 0x40
    path.write_bytes(data)


def test_a_revoked_key_refuses_what_is_resident(publisher: FolderPublisher, tmp_path: Path) -> None:
    """By name and by digest, from the next acquire on; the running process reads its trust file again."""
    publisher.publish("acme", "finance", modules=["q_proj"])
    publisher.trust.save(tmp_path / "trust.json")
    trust = TrustStore.load(tmp_path / "trust.json")
    config = CacheConfig(vram_bytes=8 * MIB, host_bytes=8 * MIB)
    with AdapterCache(config, base=publisher.base, source=publisher.source, trust=trust) as cache:
        held = cache.acquire("acme/finance", tenant="acme").wait(60)
        digest = held.composition[0][0].key.digest
        publisher.trust.revoke_key(trust.tenant("acme").publishers[0].key.key_id)
        publisher.trust.save(tmp_path / "trust.json")
        trust.reload(tmp_path / "trust.json")
        for ref in ("acme/finance", f"acme/finance@sha256:{digest}"):
            assert _failure(cache, ref) is Code.KEY_REVOKED
        assert held.ready


def test_a_copy_that_went_away_is_a_failure_to_try_again(publisher: FolderPublisher, tmp_path: Path) -> None:
    publisher.publish("acme", "finance", modules=["q_proj"])
    store = VerifiedStore(tmp_path / "store", publisher.trust)
    loader = StoreLoader(publisher.source, store, page_bytes=MIB)
    prepared = loader.prepare(
        loader.resolve(Ref.parse("acme/finance"), "acme"), Serving(publisher.base), lambda: False, UNTOLD
    )
    shutil.rmtree(prepared.stored.directory)
    with pytest.raises(AdapterdError) as gone:
        prepared.fill(memoryview(bytearray(prepared.layout.nbytes)))
    assert gone.value.code is Code.STORAGE_UNAVAILABLE


def test_a_load_that_outlives_the_cache_does_not_bring_its_store_back(
    publisher: FolderPublisher, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    publisher.publish("acme", "finance", modules=["q_proj"])
    hanging = HangingSource(publisher.source)
    before = set(threading.enumerate())
    config = CacheConfig(vram_bytes=8 * MIB, host_bytes=8 * MIB, close_seconds=0.0)
    with AdapterCache(config, base=publisher.base, source=hanging, trust=publisher.trust) as cache:
        cache.acquire("acme/finance", tenant="acme")
        hanging.barrier.await_arrival()
    hanging.barrier.open()
    for thread in set(threading.enumerate()) - before:
        thread.join(20)
    assert set(threading.enumerate()) <= before
    assert not list(tmp_path.glob("adapterd-store-*"))


@pytest.mark.slow
def test_hundreds_of_loads_leave_nothing_behind(publisher: FolderPublisher, tmp_path: Path) -> None:
    """Descriptors, threads, slab and VRAM pages, slots, leases: after the churn all is as it was."""
    names = [f"a{index}" for index in range(6)]
    for index, name in enumerate(names):
        publisher.publish("acme", name, modules=LINEARS, rank=5, seed=index)
    before = (threading.active_count(), len(os.listdir("/proc/self/fd")))
    config = CacheConfig(vram_bytes=2 * MIB, host_bytes=3 * MIB, store=tmp_path / "store")
    with AdapterCache(config, base=publisher.base, source=publisher.source, trust=publisher.trust) as cache:
        for index in range(300):
            with cache.acquire(f"acme/{names[index % 6]}", tenant="acme").wait(60) as lease, cache.begin_step([lease]):
                pass
            if index == 20:
                settled = (threading.active_count(), len(os.listdir("/proc/self/fd")))
        assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == settled
        cache.rebind(publisher.base)
        statistics = cache.statistics()
        assert (statistics.vram_bytes, statistics.host_bytes) == ({}, {})
        assert sum(statistics.adapters.values()) == statistics.steps_in_flight == 0
        assert statistics.leases[LeaseState.RELEASED] == sum(statistics.leases.values()) == 300
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before


def test_a_second_process_finds_the_packed_form_on_disk(publisher: FolderPublisher, tmp_path: Path) -> None:
    publisher.publish("acme", "finance", modules=["q_proj"])
    settings = {
        "store": tmp_path / "store",
        "store_key": tmp_path / "store.key",
        "store_bytes": 64 * MIB,
        "loader_threads": 1,
    }
    seen: list[bytes] = []
    for origin in (Origin.SOURCE, Origin.PACKED):
        with cache_over(publisher, **settings) as cache:
            ((resident, _),) = cache.acquire("acme/finance", tenant="acme").wait(60).composition
            begin = resident.pages[0] * MIB
            seen.append(bytes(cache.arena[begin : begin + MIB].numpy()))
            assert cache.statistics().origins[origin] == 1
            assert _failure(cache, "acme/none") is Code.NOT_FOUND  # asked for after what was to be kept
    assert seen[0] == seen[1]


def test_a_load_says_how_many_bytes_are_to_come_and_how_many_came(publisher: FolderPublisher, tmp_path: Path) -> None:
    """Downloaded, and hashed again where the mark is gone; what is marked needs neither."""
    publisher.publish("acme", "finance", modules=["q_proj"])
    store = VerifiedStore(tmp_path / "store", publisher.trust)
    loader = StoreLoader(publisher.source, store, page_bytes=MIB)
    resolved = loader.resolve(Ref.parse("acme/finance"), "acme")
    total = sum(file.size for file in _prepared(loader, resolved, publisher).manifest.files)
    assert total > 0
    for expected in (0, total):
        meter = Meter(VersionKey("acme", publisher.base.pin, resolved.version_digest), Stage.VERIFY)
        loader.prepare(resolved, Serving(publisher.base), lambda: False, meter)
        assert (meter.done, meter.total) == (expected, expected)
        store.doubt(meter.key)


def _prepared(loader: StoreLoader, resolved: Resolved, publisher: FolderPublisher) -> Prepared:
    meter = Meter(VersionKey("acme", publisher.base.pin, resolved.version_digest), Stage.VERIFY)
    prepared = loader.prepare(resolved, Serving(publisher.base), lambda: False, meter)
    assert meter.done == meter.total == sum(file.size for file in prepared.manifest.files)
    return prepared
