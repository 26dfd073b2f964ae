"""A folder as a package: what is opened, what is refused, what is hashed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from adapterd.loader.errors import Code, NotFound, Refused
from adapterd.loader.formats.files import BytesReader, DirectoryPackage, blocks, file_entries, read_all
from adapterd.loader.limits import DEFAULT_LIMITS, Limits


def refusals(folder: Path, limits: Limits = DEFAULT_LIMITS) -> dict[str, Code]:
    with pytest.raises(Refused) as caught:
        DirectoryPackage.open_dir(folder, limits)
    return {p.where: p.code for p in caught.value.problems}


def test_names_sizes_and_bytes(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"hello")
    (tmp_path / "B.txt").write_bytes(b"")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "x").write_bytes(b"deep")
    with DirectoryPackage.open_dir(tmp_path, DEFAULT_LIMITS) as package:
        assert package.names() == ("B.txt", "b.txt", "sub/x")
        assert package.sizes() == {"B.txt": 0, "b.txt": 5, "sub/x": 4}
        assert package.open("b.txt").read_at(1, 3) == b"ell"
        assert read_all(package.open("sub/x")) == b"deep"
        assert package.open("b.txt") is package.open("b.txt")
        with pytest.raises(KeyError):
            package.open("c.txt")


def test_hidden_deep_and_empty_folders_are_named_and_not_entered(tmp_path: Path) -> None:
    for folder in (".git/objects", "empty", "a/b/c/d/e"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / ".git/objects/1").write_bytes(b"x")
    with DirectoryPackage.open_dir(tmp_path, DEFAULT_LIMITS) as package:
        assert package.names() == (".git/", "a/b/c/d/", "empty/")


@pytest.mark.parametrize("name", ["absent", "file"])
def test_what_is_no_folder_is_not_found(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(NotFound) as caught:
        DirectoryPackage.open_dir(tmp_path / name, DEFAULT_LIMITS)
    assert caught.value.code is Code.PATH_NOT_FOUND
    assert caught.value.problem.where.endswith(name)


def test_every_link_and_special_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"x")
    (tmp_path / "inside").symlink_to("real")
    (tmp_path / "outside").symlink_to("/nonexistent/secret")
    (tmp_path / "folder").symlink_to(".")
    os.mkfifo(tmp_path / "pipe")
    assert refusals(tmp_path) == {
        "folder": Code.UNSAFE_LINK,
        "inside": Code.UNSAFE_LINK,
        "outside": Code.UNSAFE_LINK,
        "pipe": Code.ARCHIVE_SPECIAL_FILE,
    }


def test_the_folder_itself_may_be_reached_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with DirectoryPackage.open_dir(tmp_path / "link", DEFAULT_LIMITS) as package:
        assert package.names() == ()


def test_a_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.json")).write_bytes(b"x")
    assert refusals(tmp_path) == {"caf\\udce9.json": Code.ARCHIVE_BAD_NAME}


def test_too_many_files_are_refused(tmp_path: Path) -> None:
    for i in range(6):
        (tmp_path / f"{i}").write_bytes(b"")
    assert refusals(tmp_path, Limits(max_archive_entries=5)) == {".": Code.ARCHIVE_TOO_MANY_ENTRIES}


def test_a_file_swapped_for_a_link_after_it_was_listed_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1234")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "b").write_bytes(b"1234")
    secret = tmp_path.parent / "secret"
    secret.mkdir()
    (secret / "b").write_bytes(b"1234")
    with DirectoryPackage.open_dir(tmp_path, DEFAULT_LIMITS) as package:
        (tmp_path / "a").unlink()
        (tmp_path / "a").symlink_to(secret / "b")
        (tmp_path / "d" / "b").unlink()
        (tmp_path / "d").rmdir()
        (tmp_path / "d").symlink_to(secret)
        with pytest.raises(Refused) as caught:
            package.open("a")
        assert caught.value.code is Code.UNSAFE_LINK
        with pytest.raises((Refused, NotFound)):
            package.open("d/b")


def test_a_file_that_changed_since_it_was_listed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1234")
    with DirectoryPackage.open_dir(tmp_path, DEFAULT_LIMITS) as package:
        (tmp_path / "a").write_bytes(b"123456")
        with pytest.raises(Refused) as caught:
            package.open("a")
    assert (caught.value.code, caught.value.problem.where) == (Code.ST_TRUNCATED, "a")


def test_what_was_opened_is_read_on_whatever_stands_under_the_name(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"first")
    with DirectoryPackage.open_dir(tmp_path, DEFAULT_LIMITS) as package:
        reader = package.open("a")
        (tmp_path / "a").unlink()
        (tmp_path / "a").write_bytes(b"other")
        assert read_all(reader) == b"first"


@pytest.mark.parametrize("change", [lambda p: os.truncate(p, 4), lambda p: p.write_bytes(b"98765432")])
def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, change: Callable[[Path], object]) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"01234567")
    os.utime(path, ns=(0, 1))  # long ago: no clock's step hides the change
    with DirectoryPackage.open_dir(tmp_path, DEFAULT_LIMITS) as package:
        reader = package.open("a")
        assert reader.read_at(0, 2) == b"01"
        change(path)
        with pytest.raises(Refused) as caught:
            reader.read_at(2, 6)
    assert (caught.value.code, caught.value.problem.where) == (Code.FILE_CHANGED, "a")


def test_what_lies_beyond_the_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123")
    with DirectoryPackage.open_dir(tmp_path, DEFAULT_LIMITS) as package, pytest.raises(Refused) as caught:
        package.open("a").read_at(2, 8)
    assert caught.value.code is Code.ST_TRUNCATED


def test_descriptors_are_closed(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    (tmp_path / "l").symlink_to("a")
    before = len(list(Path("/dev/fd").iterdir()))
    refusals(tmp_path)
    (tmp_path / "l").unlink()
    with DirectoryPackage.open_dir(tmp_path, DEFAULT_LIMITS) as package:
        package.open("a")
    package.close()
    assert len(list(Path("/dev/fd").iterdir())) == before


def test_entries_are_hashed_in_blocks_with_progress(tmp_path: Path) -> None:
    data = os.urandom((1 << 20) + 17)
    (tmp_path / "w").write_bytes(data)
    (tmp_path / "c").write_bytes(b"{}")
    (tmp_path / ".git").mkdir()
    told: list[int] = []
    with DirectoryPackage.open_dir(tmp_path, DEFAULT_LIMITS) as package:
        entries = file_entries(package, progress=told.append)
        assert file_entries(package, ["w"]) == entries[1:]
    assert [(e.path, e.size) for e in entries] == [("c", 2), ("w", len(data))]
    assert entries[1].sha256 == hashlib.sha256(data).hexdigest()
    assert told == [2, 1 << 20, 17]


def test_bytes_in_memory_are_a_reader_too() -> None:
    reader = BytesReader(b"0123456789", "x")
    assert list(blocks(reader, 4)) == [b"0123", b"4567", b"89"]
    with pytest.raises(Refused) as caught:
        reader.read_at(8, 4)
    assert caught.value.code is Code.ST_TRUNCATED
