"""Reading into several places at once: all of it, in order, from the file that was opened."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapterd.loader.errors import Code, Refused
from adapterd.loader.formats.files import DescriptorReader, FileReader, read_parts
from adapterd.loader.formats.readers import MOST_PARTS
from fakes.readers import BytesReader

DATA = bytes(i * 31 % 251 for i in range(9000))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parts") / "file"
    path.write_bytes(DATA)
    return path


@pytest.fixture(scope="module")
def readers(path: Path) -> Iterator[tuple[FileReader, ...]]:
    """A real one, and one that knows `read_at` alone."""
    real = DescriptorReader(os.open(path, os.O_RDONLY), path.name)
    yield real, BytesReader(DATA)
    real.close()


def parts_of(sizes: list[int]) -> tuple[bytearray, list[memoryview]]:
    """Places of these sizes, a byte apart from each other, and the memory that they are in."""
    memory = bytearray(sum(sizes) + len(sizes))
    begins = [sum(sizes[:i]) + i for i in range(len(sizes))]
    return memory, [memoryview(memory)[begin : begin + size] for begin, size in zip(begins, sizes, strict=True)]


@given(st.integers(0, 3000), st.lists(st.integers(0, 200), max_size=30))
def test_each_part_gets_its_bytes_and_nothing_else_does(
    readers: tuple[FileReader, ...], offset: int, sizes: list[int]
) -> None:
    for reader in readers:
        memory, parts = parts_of(sizes)
        read_parts(reader, offset, parts)
        assert b"".join(parts) == DATA[offset : offset + sum(sizes)]
        assert memory == b"".join(bytes(part) + b"\0" for part in parts)


def test_more_parts_than_the_system_takes_at_once(readers: tuple[FileReader, ...]) -> None:
    sizes = [1 + i % 3 for i in range(3 * MOST_PARTS + 1)]
    for reader in readers:
        _, parts = parts_of(sizes)
        read_parts(reader, 7, parts)
        assert b"".join(parts) == DATA[7 : 7 + sum(sizes)]


def test_a_file_that_ends_too_early_says_how_many_bytes_are_missing(path: Path) -> None:
    reader = DescriptorReader(os.open(path, os.O_RDONLY), path.name)
    _, parts = parts_of([5000, 3000, 1500])
    with pytest.raises(Refused, match="ends 500 bytes too early") as refused:
        read_parts(reader, 0, parts)
    assert refused.value.code is Code.ST_TRUNCATED
    reader.close()


def test_a_file_that_was_written_to_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(DATA)
    reader = DescriptorReader(os.open(path, os.O_RDONLY), path.name)
    os.truncate(path, 4000)
    with pytest.raises(Refused) as refused:
        read_parts(reader, 0, parts_of([3000, 900])[1])
    assert refused.value.code is Code.FILE_CHANGED
    reader.close()
