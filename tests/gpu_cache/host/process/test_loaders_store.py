"""The store of a loader process is as the worker's configuration has it: its bound, and its key."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from adapterd.gpu_cache import CacheConfig
from adapterd.gpu_cache.host.interface import Failure, Origin
from adapterd.gpu_cache.host.process.client import HostClient
from adapterd.gpu_cache.host.process.opening import open_client
from adapterd.loader.errors import AdapterdError, Code
from adapterd.loader.identity import Ref
from adapterd.loader.limits import MIB
from contracts.host_user import HostUser
from fakes.publisher import FolderPublisher
from fakes.toy_models import LINEARS, toy_spec


@pytest.fixture
def publisher(tmp_path: Path) -> FolderPublisher:
    publisher = FolderPublisher(tmp_path / "published", toy_spec())
    publisher.publish("acme", "finance", modules=LINEARS, rank=19, alpha=4, seed=1)
    return publisher


@contextmanager
def opened(publisher: FolderPublisher, store: Path, **settings: object) -> Iterator[HostClient]:
    config = CacheConfig(
        vram_bytes=8 * MIB,
        host_bytes=8 * MIB,
        loader="process",
        store=store,
        **settings,  # type: ignore[arg-type]
    )
    with open_client(config, publisher.source, publisher.trust, publisher.base) as client:
        yield client


def asked(client: HostClient, publisher: FolderPublisher) -> object:
    version = publisher.source.resolve(Ref.parse("acme/finance"), "acme")
    return HostUser(client).fetch(version).answer()


def test_a_loader_process_ignored_the_stores_key(publisher: FolderPublisher, tmp_path: Path) -> None:
    """The key travels as a path: its text is in no command line, environment or settings document."""
    store, key = tmp_path / "store", tmp_path / "store.key"
    origins = []
    for _ in range(2):
        with opened(publisher, store, store_key=key) as client:
            (image,) = asked(client, publisher)  # type: ignore[misc]
            origins.append(image.origin)
            process = Path(f"/proc/{client.loader_process}")
            secret = key.read_bytes().split()[1]
            assert secret not in (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
    assert origins == [Origin.SOURCE, Origin.PACKED]


def test_a_loader_process_ignored_the_stores_bound(publisher: FolderPublisher, tmp_path: Path) -> None:
    with opened(publisher, tmp_path / "store", store_bytes=1000) as client:
        outcome = asked(client, publisher)
    assert isinstance(outcome, Failure)
    assert outcome.problems[0].code is Code.STORAGE_FULL


def test_a_key_in_the_store_that_it_protects_is_refused_by_a_loader_process_too(
    publisher: FolderPublisher, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    with pytest.raises(AdapterdError) as refused, opened(publisher, store, store_key=store / "store.key"):
        pass
    assert refused.value.code is Code.SETTINGS_INVALID
