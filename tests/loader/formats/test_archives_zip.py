"""Zip files that lie: in names, kinds, sizes, places."""

from __future__ import annotations

import io
import stat
import struct
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapterd.loader.errors import AdapterdError, Code, Refused
from adapterd.loader.formats.archives import open_package
from adapterd.loader.formats.archives_zip import read_zip
from adapterd.loader.formats.files import BytesReader, file_entries, read_all
from adapterd.loader.limits import DEFAULT_LIMITS
from fakes.archives import ZipEntry, deflated, zip_of, zipped

A, B = ZipEntry(b"a", b"first" * 9), ZipEntry(b"b", b"second", method=0)


def codes(data: bytes) -> list[Code]:
    with pytest.raises(Refused) as caught:
        read_zip(BytesReader(data), DEFAULT_LIMITS)
    return [p.code for p in caught.value.problems]


def test_what_the_builder_makes_is_a_zip(tmp_path: Path) -> None:
    data = zip_of([A, B])
    assert zipfile.ZipFile(io.BytesIO(data)).read("a") == A.data
    assert list(read_zip(BytesReader(data), DEFAULT_LIMITS)) == ["a", "b"]
    (tmp_path / "x").write_bytes(data)
    with open_package(tmp_path / "x", DEFAULT_LIMITS) as package:
        assert [read_all(package.open(n)) for n in package.names()] == [A.data, B.data]


@pytest.mark.parametrize(
    ("names", "code"),
    [
        ([b"../x"], Code.ARCHIVE_PATH), ([b"d/../../x"], Code.ARCHIVE_PATH), ([b"d/.."], Code.ARCHIVE_PATH),
        ([b"/x"], Code.ARCHIVE_PATH), ([b"\\x"], Code.ARCHIVE_PATH), ([b"d\\..\\x"], Code.ARCHIVE_PATH),
        ([b"C:x"], Code.ARCHIVE_PATH), ([b"x:stream"], Code.ARCHIVE_PATH), ([b"//host/x"], Code.ARCHIVE_PATH),
        ([b"x\0.txt"], Code.ARCHIVE_BAD_NAME), ([b"x\n"], Code.ARCHIVE_BAD_NAME), ([b"x\x7f"], Code.ARCHIVE_BAD_NAME),
        ([b"caf\xe9"], Code.ARCHIVE_BAD_NAME), ([b"\xed\xb3\xa9"], Code.ARCHIVE_BAD_NAME),
        ([b""], Code.ARCHIVE_BAD_NAME),
        (["x\u202ey".encode()], Code.ARCHIVE_BAD_NAME), ([b"x" * 256], Code.ARCHIVE_BAD_NAME),
        ([b"d/" * 200 + b"x"], Code.ARCHIVE_BAD_NAME), ([b"."], Code.ARCHIVE_BAD_NAME),
        ([b"x."], Code.ARCHIVE_BAD_NAME), ([b"x "], Code.ARCHIVE_BAD_NAME), ([b"d./x"], Code.ARCHIVE_BAD_NAME),
        ([b"CON"], Code.ARCHIVE_BAD_NAME), ([b"nul.json"], Code.ARCHIVE_BAD_NAME),
        ([b"com1.x.y"], Code.ARCHIVE_BAD_NAME),
        ([b"a", b"a"], Code.ARCHIVE_DUPLICATE), ([b"a", b"A"], Code.ARCHIVE_DUPLICATE),
        ([b"a", b"./a"], Code.ARCHIVE_DUPLICATE), ([b"d/a", b"d//a"], Code.ARCHIVE_DUPLICATE),
        (["é".encode(), "e\u0301".encode()], Code.ARCHIVE_DUPLICATE), (["ß".encode(), b"SS"], Code.ARCHIVE_DUPLICATE),
        ([b"a", b"a/b"], Code.ARCHIVE_DUPLICATE), ([b"a/b", b"A"], Code.ARCHIVE_DUPLICATE),
        ([b"a", b"a/"], Code.ARCHIVE_DUPLICATE), ([b"a/", b"a"], Code.ARCHIVE_DUPLICATE),
    ],
)  # fmt: skip
def test_a_name_that_is_not_one_file_everywhere(names: list[bytes], code: Code) -> None:
    assert codes(zip_of(ZipEntry(name) for name in names)) == [code]


@pytest.mark.parametrize(
    ("entry", "code"),
    [
        (ZipEntry(b"a", b"/etc/passwd", mode=stat.S_IFLNK | 0o777), Code.UNSAFE_LINK),
        (ZipEntry(b"a", mode=stat.S_IFIFO | 0o644), Code.ARCHIVE_SPECIAL_FILE),
        (ZipEntry(b"a", mode=stat.S_IFCHR | 0o644), Code.ARCHIVE_SPECIAL_FILE),
        (ZipEntry(b"a", mode=stat.S_IFREG | 0o4755), Code.ARCHIVE_SPECIAL_FILE),
        (ZipEntry(b"a", mode=stat.S_IFDIR | 0o755), Code.ARCHIVE_CORRUPT),
        (ZipEntry(b"a/", b"1", mode=stat.S_IFDIR | 0o755), Code.ARCHIVE_CORRUPT),
        (ZipEntry(b"a", b"1", flags=1), Code.ARCHIVE_UNSUPPORTED),
        (ZipEntry(b"a", b"1", flags=0x40), Code.ARCHIVE_UNSUPPORTED),
        (ZipEntry(b"a", b"1", flags=0x2000), Code.ARCHIVE_UNSUPPORTED),
        (ZipEntry(b"a", b"1", method=12), Code.ARCHIVE_UNSUPPORTED),
        (ZipEntry(b"a", b"1", method=99), Code.ARCHIVE_UNSUPPORTED),
        (ZipEntry(b"a", b"1", local={"name": b"b"}), Code.ARCHIVE_CORRUPT),
        (ZipEntry(b"a", b"1", local={"method": 0}), Code.ARCHIVE_CORRUPT),
        (ZipEntry(b"a", b"1", local={"flags": 1}), Code.ARCHIVE_CORRUPT),
        (ZipEntry(b"a", b"1", local={"size": 9}), Code.ARCHIVE_CORRUPT),
        (ZipEntry(b"a", b"1", local={"crc": 9}), Code.ARCHIVE_CORRUPT),
        (ZipEntry(b"a", b"1", central={"packed": 2}, local={"packed": 2}), Code.ARCHIVE_CORRUPT),
        (ZipEntry(b"a", b"1", central={"packed": 4}, local={"packed": 4}), Code.ARCHIVE_CORRUPT),
        (ZipEntry(b"a", b"1", method=0, central={"size": 9}, local={"size": 9}), Code.ARCHIVE_CORRUPT),
        (ZipEntry(b"a", b"1", central={"header": 5}), Code.ARCHIVE_CORRUPT),
        (ZipEntry(b"a", b"1", central={"header": 1 << 31}), Code.ARCHIVE_CORRUPT),
        (ZipEntry(b"a", b"1", extra=b"\1\0\xff\xff"), Code.ARCHIVE_CORRUPT),
        (ZipEntry(b"a", b"1", extra=b"\1"), Code.ARCHIVE_CORRUPT),
        (ZipEntry(b"a", b"1", extra=struct.pack("<2H5s1s", 0x7075, 6, b"\1crc.", b"b")), Code.ARCHIVE_CORRUPT),
        (ZipEntry(b"a", b"1", descriptor="<3L", local={"size": 7}), Code.ARCHIVE_CORRUPT),
        (ZipEntry(b"a", b"1", flags=8), Code.ARCHIVE_CORRUPT),
    ],
)  # fmt: skip
def test_an_entry_that_is_no_plain_file_or_contradicts_itself(entry: ZipEntry, code: Code) -> None:
    assert codes(zip_of([entry])) == [code]


@pytest.mark.parametrize("descriptor", ["<3L", "<4s3L", "<L2Q", "<4sL2Q"])
def test_every_form_of_data_descriptor_is_read(descriptor: str) -> None:
    entries = [ZipEntry(b"a", b"11", descriptor=descriptor), ZipEntry(b"b", b"2", method=0, descriptor=descriptor)]
    assert [p.size for p in read_zip(BytesReader(zip_of(entries)), DEFAULT_LIMITS).values() if p] == [2, 1]


UNOWNED = [
    zip_of([A, B], before=b"#!/bin/sh\n"), zip_of([A, B], gap=b"hidden"), zip_of([A, B], after=b"tail"),
    zip_of([A, B], gap=zip_of([A])), zip_of([A, B], after=zip_of([A])), zip_of([A, B])[:-1], zip_of([A, B])[:40],
    zip_of([A, B], count=1), zip_of([A, B], count=3), zip_of([A, B], start=0), zip_of([A, B], size=9),
    zip_of([A, ZipEntry(b"b", b"2", central={"header": 0})]),
    zip_of([A, ZipEntry(b"a2", A.data, central={"header": 0})]),
    zip_of([], before=b"x"), zip_of([]) * 2,
]  # fmt: skip


@pytest.mark.parametrize("data", UNOWNED, ids=range(len(UNOWNED)))
def test_every_byte_has_one_owner(data: bytes) -> None:
    assert codes(data) == [Code.ARCHIVE_CORRUPT]


def test_one_packed_content_under_many_names_is_refused() -> None:
    """The overlapping bomb: entries that quote each other's bytes."""
    kernel = ZipEntry(b"k", bytes(1 << 20))
    shared = [
        ZipEntry(b"%d" % i, central={"header": 0, "packed": len(deflated(kernel.data)), "size": 1 << 20})
        for i in range(9)
    ]
    assert codes(zip_of([kernel, *shared])) == [Code.ARCHIVE_CORRUPT]


@pytest.mark.parametrize(
    "entry",
    [
        ZipEntry(b"a", b"12345", central={"size": 4}, local={"size": 4}),
        ZipEntry(b"a", b"12345", central={"size": 6}, local={"size": 6}),
        ZipEntry(b"a", b"12345", central={"crc": 6}, local={"crc": 6}),
    ],
)
def test_what_is_unpacked_must_be_what_was_declared(tmp_path: Path, entry: ZipEntry) -> None:
    (tmp_path / "x").write_bytes(zip_of([entry]))
    with open_package(tmp_path / "x", DEFAULT_LIMITS) as package, pytest.raises(Refused) as caught:
        package.open("a")
    assert (caught.value.code, caught.value.problem.where) == (Code.ARCHIVE_CORRUPT, "a")


@given(st.data())
def test_no_byte_of_a_zip_can_change_and_the_content_with_it(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """A flipped byte is refused, or changes nothing that is read (times, versions)."""
    files = {"README.md": b"# an adapter\n" * 5, "adapter_config.json": b"{}"}
    raw = bytearray(zipped(files))
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    path = tmp_path_factory.mktemp("zip") / "x"
    path.write_bytes(raw)
    try:
        with open_package(path, DEFAULT_LIMITS) as package:
            entries = {e.path: e for e in file_entries(package)}
    except AdapterdError:
        return
    assert {n: e.size for n, e in entries.items()} == {n: len(d) for n, d in files.items()}
