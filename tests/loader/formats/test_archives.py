"""Archives as packages: what opens is the folder's equal, everything else is refused and leaves nothing."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from adapterd.loader.checks import examine_path
from adapterd.loader.errors import AdapterdError, Code, Refused, Unavailable
from adapterd.loader.formats.archives import ArchivePackage, open_package
from adapterd.loader.formats.files import DirectoryPackage, file_entries, read_all
from adapterd.loader.limits import DEFAULT_LIMITS, Limits
from fakes.archives import ZipEntry, files_of, gzipped, tar_of, zip_of, zipped, zipped_as_stream
from fakes.packages import tiny_llama_spec, write_package

BASE = tiny_llama_spec()


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder of this process."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def written(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "archive"  # the suffix means nothing
    path.write_bytes(data)
    return path


def descriptors() -> int:
    return len(list(Path("/dev/fd").iterdir()))


FORMS: dict[str, Callable[[dict[str, bytes]], bytes]] = {
    "zip": zipped,
    "zip of a pipe": zipped_as_stream,
    "zip of a pipe, 64 bits": lambda files: zipped_as_stream(files, wide=True),
    "tar": tar_of,
    "tar.gz": lambda files: gzipped(tar_of(files)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("prefix", ["", "./", "finance/", "./a b//"])
def test_an_archive_is_its_folder_s_equal(tmp_path: Path, scratch: Path, form: str, prefix: str) -> None:
    folder = write_package(tmp_path / "package", files={"README.md": b"# x\n" * 9}).directory
    archive = written(tmp_path, FORMS[form]({prefix + n: d for n, d in files_of(folder).items()}))
    before = descriptors()
    assert examine_path(archive, BASE) == examine_path(folder, BASE)
    with open_package(archive, DEFAULT_LIMITS) as package, DirectoryPackage.open_dir(folder, DEFAULT_LIMITS) as same:
        assert (package.names(), package.sizes()) == (same.names(), same.sizes())
        assert file_entries(package) == file_entries(same)
        assert list(scratch.iterdir()) == []  # no entry ever has a name here
    assert descriptors() == before


def test_what_a_mac_adds_is_left_out_with_a_word(tmp_path: Path) -> None:
    files = files_of(write_package(tmp_path / "package").directory)
    inside = {f"x/{n}": d for n, d in files.items()} | {"x/.DS_Store": b"1", "x/.git/HEAD": b"1"}
    archive = written(tmp_path, zipped(inside | {"__MACOSX/x/._adapter_config.json": b"1"}))
    verdict = examine_path(archive, BASE)
    assert verdict.ok
    assert [(p.code, p.where) for p in verdict.problems] == [
        (Code.UNEXPECTED_FILE, ".DS_Store"), (Code.UNEXPECTED_FILE, ".git/"), (Code.UNEXPECTED_FILE, "__MACOSX/"),
    ]  # fmt: skip


@pytest.mark.parametrize("beside", ["note.txt", "other/adapter_config.json"])
def test_only_a_lone_folder_is_taken_off(tmp_path: Path, beside: str) -> None:
    archive = written(tmp_path, tar_of({"x/a": b"", beside: b""}))
    with open_package(archive, DEFAULT_LIMITS) as package:
        assert package.names() == tuple(sorted(["x/a", beside]))


NO_ARCHIVES = [
    (b"", Code.UNKNOWN_FORMAT), (b"hello", Code.UNKNOWN_FORMAT), (b"PK\x03\x04", Code.ARCHIVE_CORRUPT),
    (b"BZh91AY", Code.ARCHIVE_UNSUPPORTED), (b"\xfd7zXZ\x00\x00", Code.ARCHIVE_UNSUPPORTED),
    (b"7z\xbc\xaf\x27\x1c", Code.ARCHIVE_UNSUPPORTED), (b"\x1f\x8b", Code.ARCHIVE_CORRUPT),
    (gzipped(b"hello"), Code.ARCHIVE_CORRUPT), (gzipped(zipped({"a": b""})), Code.ARCHIVE_CORRUPT),
    (gzipped(tar_of({"a": b"1"})) + b"x", Code.ARCHIVE_CORRUPT),
    (gzipped(tar_of({"a": b"1"})) * 2, Code.ARCHIVE_CORRUPT),
    (gzipped(tar_of({"a": b"1"}))[:-5], Code.ARCHIVE_CORRUPT),
]  # fmt: skip


@pytest.mark.parametrize(("data", "code"), NO_ARCHIVES, ids=range(len(NO_ARCHIVES)))
def test_what_is_no_archive_is_named(tmp_path: Path, data: bytes, code: Code) -> None:
    before = descriptors()
    with pytest.raises(Refused) as caught:
        open_package(written(tmp_path, data), DEFAULT_LIMITS)
    assert caught.value.code is code
    assert descriptors() == before


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(Refused) as caught:
        open_package(tmp_path / "pipe", DEFAULT_LIMITS)
    assert caught.value.code is Code.ARCHIVE_SPECIAL_FILE


@pytest.mark.parametrize("form", FORMS)
def test_bombs_meet_the_quota_before_the_disk(tmp_path: Path, scratch: Path, form: str) -> None:
    limits = Limits(max_unpacked_bytes=1 << 20)
    archive = written(tmp_path, FORMS[form]({"README.md": bytes(8 << 20)}))
    tracemalloc.start()
    try:
        with pytest.raises(Refused) as caught:
            open_package(archive, limits)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.code is Code.ARCHIVE_BOMB
    assert peak < 6 << 20
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("form", ["zip", "tar.gz"])
def test_growth_beyond_all_reason_is_a_bomb_whatever_the_quota(tmp_path: Path, form: str) -> None:
    archive = written(tmp_path, FORMS[form]({"README.md": bytes(20 << 20)}))
    with pytest.raises(Refused) as caught:
        open_package(archive, DEFAULT_LIMITS)
    assert caught.value.code is Code.ARCHIVE_BOMB
    with open_package(archive, Limits(max_unpack_ratio=1100)) as package:
        assert package.sizes() == {"README.md": 20 << 20}


@pytest.mark.parametrize("form", FORMS)
def test_memory_does_not_grow_with_an_entry(tmp_path: Path, scratch: Path, form: str) -> None:
    size = 24 << 20
    archive = written(tmp_path, FORMS[form]({"README.md": bytes(size)}))
    tracemalloc.start()
    try:
        with open_package(archive, Limits(max_unpack_ratio=1100)) as package:
            assert file_entries(package)[0].size == size
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20


@pytest.mark.parametrize("form", FORMS)
def test_too_many_entries_are_refused(tmp_path: Path, form: str) -> None:
    archive = written(tmp_path, FORMS[form]({f"{i}": b"" for i in range(6)}))
    with pytest.raises(Refused) as caught:
        open_package(archive, Limits(max_archive_entries=5))
    assert caught.value.code is Code.ARCHIVE_TOO_MANY_ENTRIES


def full(descriptor: int, data: bytes | memoryview) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def interrupted(descriptor: int, data: bytes | memoryview) -> int:
    raise KeyboardInterrupt


@pytest.mark.parametrize("form", ["zip", "tar.gz"])
@pytest.mark.parametrize(("write", "kind"), [(full, Unavailable), (interrupted, KeyboardInterrupt)])
def test_a_full_disk_and_ctrl_c_leave_nothing(
    tmp_path: Path, scratch: Path, form: str, write: Callable[[int, bytes | memoryview], int], kind: type[BaseException]
) -> None:
    archive = written(tmp_path, FORMS[form]({"README.md": b"# x\n"}))
    before = descriptors()
    with (
        pytest.raises(kind) as caught,
        ArchivePackage.open_file(archive, DEFAULT_LIMITS, write) as package,
    ):
        package.open("README.md")
    if isinstance(caught.value, AdapterdError):
        assert caught.value.code is Code.STORAGE_FULL
    assert descriptors() == before
    assert list(scratch.iterdir()) == []


def test_a_real_limit_on_the_disk_is_told(tmp_path: Path) -> None:
    archive = written(tmp_path, zipped({"README.md": os.urandom(1 << 20)}))
    program = (
        "import resource, signal, sys, pathlib\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "from adapterd.loader.formats.archives import open_package\n"
        "from adapterd.loader.limits import DEFAULT_LIMITS\n"
        "from adapterd.loader.errors import AdapterdError\n"
        "with open_package(pathlib.Path(sys.argv[1]), DEFAULT_LIMITS) as package:\n"
        "    try:\n"
        "        package.open('README.md')\n"
        "    except AdapterdError as fault:\n"
        "        print(fault.code)\n"
    )
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environment = {**os.environ, "TMPDIR": str(scratch), "PYTHONDONTWRITEBYTECODE": "1"}
    words = [sys.executable, "-c", program, str(archive)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == "STORAGE_FULL"
    assert list(scratch.iterdir()) == []


def test_a_missing_temporary_folder_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = written(tmp_path, zipped({"README.md": b"1"}))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with open_package(archive, DEFAULT_LIMITS) as package, pytest.raises(Unavailable) as caught:
        package.open("README.md")
    assert caught.value.code is Code.STORAGE_UNAVAILABLE


def test_an_archive_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    archive = written(tmp_path, tar_of({"README.md": b"# x\n"}))
    os.utime(archive, ns=(0, 1))
    with open_package(archive, DEFAULT_LIMITS) as package:
        reader = package.open("README.md")
        archive.write_bytes(tar_of({"README.md": b"# y\n"}))
        with pytest.raises(Refused) as caught:
            read_all(reader)
    assert caught.value.code is Code.FILE_CHANGED


def test_what_was_unpacked_stays_as_it_was_checked(tmp_path: Path) -> None:
    archive = written(tmp_path, zipped({"README.md": b"first"}))
    with open_package(archive, DEFAULT_LIMITS) as package:
        reader = package.open("README.md")
        archive.write_bytes(b"")
        assert read_all(reader) == b"first"
        assert package.open("README.md") is reader
        with pytest.raises(Refused):
            reader.read_at(3, 3)
        with pytest.raises(KeyError):
            package.open("nothing")


def test_nothing_is_unpacked_that_nobody_asks_for(tmp_path: Path, scratch: Path) -> None:
    wrong = ZipEntry(b"notes.txt", b"12", central={"crc": 1}, local={"crc": 1})
    archive = written(tmp_path, zip_of([ZipEntry(b"README.md", b"1"), wrong]))
    with open_package(archive, DEFAULT_LIMITS) as package:
        assert read_all(package.open("README.md")) == b"1"
        with pytest.raises(Refused):
            package.open("notes.txt")


@contextmanager
def unprivileged() -> Iterator[None]:
    """Without root's right to read everything."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def test_what_may_not_be_read_is_told_where_it_matters(tmp_path: Path) -> None:
    folder = write_package(tmp_path / "package", files={"notes.txt": b"1"}).directory
    (folder / "notes.txt").chmod(0)  # left out in any case
    assert examine_path(folder, BASE).ok
    with DirectoryPackage.open_dir(folder, DEFAULT_LIMITS) as package:
        (folder / "adapter_config.json").chmod(0)
        with unprivileged(), pytest.raises(AdapterdError) as caught:
            package.open("adapter_config.json")
    assert (caught.value.code, caught.value.problem.where) == (Code.PATH_NOT_FOUND, "adapter_config.json")
    archive = written(tmp_path, b"")
    archive.chmod(0)
    with unprivileged(), pytest.raises(AdapterdError) as caught:
        open_package(archive, DEFAULT_LIMITS)
    assert caught.value.code is Code.PATH_NOT_FOUND


def test_a_folder_of_very_many_files_is_not_read_to_its_end(tmp_path: Path) -> None:
    for i in range(4000):
        (tmp_path / f"{i:0100}").touch()
    tracemalloc.start()
    try:
        with pytest.raises(Refused) as caught:
            DirectoryPackage.open_dir(tmp_path, Limits(max_archive_entries=5))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.code is Code.ARCHIVE_TOO_MANY_ENTRIES
    assert peak < 100 * 4000 / 4  # the names alone are four times as much
