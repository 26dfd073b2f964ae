"""Tar files that lie: in names, kinds, sizes, and in which header says what."""

from __future__ import annotations

import io
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapterd.loader.errors import AdapterdError, Code, Refused
from adapterd.loader.formats.archives_tar import MAX_EXTENSION_BYTES, looks_like_tar, read_tar
from adapterd.loader.formats.files import BytesReader
from adapterd.loader.limits import DEFAULT_LIMITS, Limits
from fakes.archives import END, padded, pax, tar_block, tar_of

LONG = "d" * 80 + "/" + "x" * 90


def listed(data: bytes, limits: Limits = DEFAULT_LIMITS) -> dict[str, int]:
    places = read_tar(BytesReader(data), limits, len(data))
    return {name: place.size if place else 0 for name, place in places.items()}


def codes(data: bytes) -> list[Code]:
    with pytest.raises(Refused) as caught:
        listed(data)
    return [p.code for p in caught.value.problems]


def entry(name: bytes, data: bytes = b"1", kind: bytes = b"0", **header: int) -> bytes:
    return tar_block(name, len(data), kind, **header) + padded(data)


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_the_three_forms_are_read(form: int) -> None:
    files = {"a": b"1" * 600, "b": b"", LONG: b"2"}
    data = tar_of(files, form=form)
    assert looks_like_tar(data[:512])
    assert listed(data) == {n: len(d) for n, d in files.items()}


def test_sizes_beyond_eight_gigabytes_are_understood() -> None:
    class Huge:
        """A tar whose one entry is larger than memory; only its headers are there."""

        size = 512 + (9 << 30) + 1024

        def read_at(self, offset: int, length: int) -> bytes:
            head = tar_block(b"a", b"\x80" + (9 << 30).to_bytes(11, "big"))
            return head if offset == 0 else bytes(length)

    places = read_tar(Huge(), DEFAULT_LIMITS, Huge.size)
    assert [p.size for p in places.values() if p] == [9 << 30]


@pytest.mark.parametrize(
    ("name", "code"),
    [
        (b"../x", Code.ARCHIVE_PATH), (b"/x", Code.ARCHIVE_PATH), (b"a/../../x", Code.ARCHIVE_PATH),
        (b"a\\b", Code.ARCHIVE_PATH), (b"caf\xe9", Code.ARCHIVE_BAD_NAME), (b"x\n", Code.ARCHIVE_BAD_NAME),
        (b"aux", Code.ARCHIVE_BAD_NAME), (b"", Code.ARCHIVE_BAD_NAME),
    ],
)  # fmt: skip
def test_bad_names(name: bytes, code: Code) -> None:
    assert codes(entry(name) + END) == [code]
    assert codes(pax((b"path", name)) + entry(b"fine") + END) == [code]


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (b"1", Code.UNSAFE_LINK), (b"2", Code.UNSAFE_LINK), (b"3", Code.ARCHIVE_SPECIAL_FILE),
        (b"4", Code.ARCHIVE_SPECIAL_FILE), (b"6", Code.ARCHIVE_SPECIAL_FILE), (b"7", Code.ARCHIVE_UNSUPPORTED),
        (b"S", Code.ARCHIVE_UNSUPPORTED), (b"V", Code.ARCHIVE_UNSUPPORTED), (b"\xff", Code.ARCHIVE_UNSUPPORTED),
    ],
)  # fmt: skip
def test_what_is_no_plain_file(kind: bytes, code: Code) -> None:
    assert codes(entry(b"a", b"", kind) + END) == [code]


def test_a_link_with_content_ends_the_listing() -> None:
    assert codes(entry(b"a", b"1", b"2") + END) == [Code.UNSAFE_LINK, Code.ARCHIVE_CORRUPT]


def test_all_that_is_wrong_is_told_at_once() -> None:
    data = entry(b"l", b"", b"2") + entry(b"../x") + entry(b"run", mode=0o4755) + entry(b"a") + entry(b"./a") + END
    assert codes(data) == [
        Code.UNSAFE_LINK, Code.ARCHIVE_PATH, Code.ARCHIVE_SPECIAL_FILE, Code.ARCHIVE_DUPLICATE,
    ]  # fmt: skip


DAMAGED = [
    entry(b"a"), entry(b"a") + bytes(512), entry(b"a")[:-1], entry(b"a") + END + b"x",
    entry(b"a") + END + entry(b"b"),
    tar_block(b"a", 10**6) + END, tar_block(b"a", b"9" * 11 + b"\0") + END, tar_block(b"a", b"\xff" * 12) + END,
    tar_block(b"a", b"-0000000001\0") + END, entry(b"a", b"1", b"5") + END,
    bytes([*entry(b"a")[:300], 1, *entry(b"a")[301:]]) + END,
    pax((b"size", b"-1")) + entry(b"a") + END, pax((b"size", b"9" * 30)) + entry(b"a") + END,
    pax((b"size", b"999999")) + entry(b"a") + END, pax((b"path", b"b"), (b"path", b"c")) + entry(b"a") + END,
    pax((b"path", b"b")) + pax((b"path", b"c")) + entry(b"a") + END,
    pax((b"path", b"b")) + entry(b"@LongLink", b"c\0", b"L") + entry(b"a") + END,
    pax((b"path", b"b")) + END, pax() * 6 + entry(b"a") + END,
    tar_block(b"p", 3, b"x") + padded(b"9 a") + entry(b"a") + END,
    tar_block(b"p", 6, b"x") + padded(b"06 a=\n") + entry(b"a") + END,
    tar_block(b"p", MAX_EXTENSION_BYTES + 1, b"x") + bytes(1 << 17) + END,
    tar_block(b"p", 1 << 40, b"L") + END,
]  # fmt: skip


@pytest.mark.parametrize("data", DAMAGED, ids=range(len(DAMAGED)))
def test_damage_and_contradictions(data: bytes) -> None:
    assert codes(data) == [Code.ARCHIVE_CORRUPT]


def test_sparse_files_and_names_for_all_are_not_read() -> None:
    assert codes(pax((b"GNU.sparse.major", b"1")) + entry(b"a") + END) == [Code.ARCHIVE_UNSUPPORTED]
    assert codes(pax((b"path", b"b"), kind=b"g") + entry(b"a") + END) == [Code.ARCHIVE_UNSUPPORTED]
    assert listed(pax((b"comment", b"4b825dc6"), kind=b"g") + entry(b"a") + END) == {"a": 1}  # as git archive has it


def test_a_prefix_belongs_to_the_name() -> None:
    assert codes(tar_block(b"x", 0, prefix=b"..") + END) == [Code.ARCHIVE_PATH]


@given(st.binary(max_size=2048), st.integers(0, 2048))
def test_no_bytes_break_the_reader(noise: bytes, at: int) -> None:
    good = tar_of({"a": b"1" * 600, LONG: b"2"})
    data = good[:at] + noise + good[at + len(noise) :]
    try:
        ours = listed(data)
    except AdapterdError:
        return
    with tarfile.open(fileobj=io.BytesIO(data)) as theirs:
        found = {m.name.removeprefix("./"): m.size for m in theirs.getmembers() if m.isreg()}
    assert {n: s for n, s in ours.items() if not n.endswith("/")} == found
