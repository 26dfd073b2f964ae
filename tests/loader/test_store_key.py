"""The key file of packed forms."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from adapterd.loader.errors import AdapterdError, Code
from adapterd.loader.store_key import StoreKey


def test_a_key_is_made_once_and_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "store.key"
    mac = StoreKey.load(path).mac(b"x")
    assert path.stat().st_mode & 0o777 == 0o600
    assert StoreKey.load(path).made(mac, b"x")
    assert not StoreKey.load(path).made(mac, b"y")
    assert not StoreKey.load(tmp_path / "other.key").made(mac, b"x")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other.key", "store.key"]


def test_processes_that_make_it_at_once_get_one_key(tmp_path: Path) -> None:
    start, macs = threading.Barrier(6), set()

    def work() -> None:
        start.wait()
        macs.add(StoreKey.load(tmp_path / "store.key").mac(b"x"))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(macs) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["store.key"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_key_that_others_may_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "store.key"
    StoreKey.load(path)
    path.chmod(mode)
    assert refusal(path) is Code.TRUST_FILE_INVALID


@pytest.mark.parametrize("text", [b"", b"adapterd.store-key/1 00\n", b"adapterd.store-key/1 " + b"g" * 64 + b"\n"])
def test_other_files_are_no_keys(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "store.key"
    path.write_bytes(text)
    path.chmod(0o600)
    assert refusal(path) is Code.TRUST_FILE_INVALID


def test_a_place_where_none_can_be_made(tmp_path: Path) -> None:
    assert refusal(tmp_path / "missing" / "store.key") is Code.STORAGE_UNAVAILABLE


def test_a_key_inside_the_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "store")
    for path in (tmp_path / "store" / "key", tmp_path / "link" / "key"):
        with pytest.raises(AdapterdError) as refused:
            StoreKey.load(path, outside=tmp_path / "store")
        assert refused.value.code is Code.SETTINGS_INVALID
        assert not path.exists()
    assert StoreKey.load(tmp_path / "key", outside=tmp_path / "store").mac(b"x")


def test_a_short_secret_is_the_callers_mistake() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        StoreKey(b"short")


def refusal(path: Path) -> Code:
    with pytest.raises(AdapterdError) as refused:
        StoreKey.load(path)
    return refused.value.code
