"""The second parser: it must agree, and it must see nothing but the header."""

from __future__ import annotations

import dataclasses
import json
import struct
import tempfile
from pathlib import Path

import pytest

from adapterd.loader.errors import Code, Refused, Unavailable
from adapterd.loader.formats.files import BytesReader
from adapterd.loader.formats.library_check import agree_with_library
from adapterd.loader.formats.safetensors_header import Header, read_header
from adapterd.loader.limits import DEFAULT_LIMITS
from fakes.disk import file_size_limit

TEXT = json.dumps(
    {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    }
).encode()
READER = BytesReader(struct.pack("<Q", len(TEXT)) + TEXT + bytes(32))


def header() -> Header:
    return read_header(READER, DEFAULT_LIMITS)


def test_it_agrees_and_leaves_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    agree_with_library(READER, header())
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told_as_one_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with file_size_limit(16), pytest.raises(Unavailable) as caught:
        agree_with_library(READER, header())
    assert (caught.value.code, caught.value.problem.where) == (Code.STORAGE_FULL, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_the_data_is_not_read() -> None:
    class HeaderOnly:
        size = READER.size

        def read_at(self, offset: int, length: int) -> bytes:
            assert (offset, length) == (0, 8 + len(TEXT))
            return READER.read_at(offset, length)

    agree_with_library(HeaderOnly(), header())


@pytest.mark.parametrize(
    "change",
    [{"name": "c"}, {"dtype": "F16"}, {"shape": (2, 2)}],
)
def test_a_difference_is_a_refusal_that_names_the_tensor(change: dict[str, object]) -> None:
    first, second = header().tensors
    other = dataclasses.replace(header(), tensors=(first, dataclasses.replace(second, **change)))
    with pytest.raises(Refused) as caught:
        agree_with_library(READER, other)
    assert caught.value.code is Code.ST_PARSERS_DISAGREE
    assert caught.value.problem.where == change.get("name", "b")


def test_other_metadata_or_a_missing_tensor_is_a_difference() -> None:
    for other in (
        dataclasses.replace(header(), metadata={}),
        dataclasses.replace(header(), tensors=header().tensors[:1]),
    ):
        with pytest.raises(Refused) as caught:
            agree_with_library(READER, other)
        assert caught.value.code is Code.ST_PARSERS_DISAGREE


def test_what_the_library_refuses_is_refused() -> None:
    broken = BytesReader(READER.read_at(0, READER.size).replace(b'"F32"', b'"F99"'))
    with pytest.raises(Refused) as caught:
        agree_with_library(broken, header())
    assert caught.value.code is Code.ST_PARSERS_DISAGREE
    assert "F99" in caught.value.problem.message
