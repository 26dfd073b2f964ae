"""How often the bytes of a package are read: once, for the hash and the values; and on how many threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from adapterd.loader.checks import examine
from adapterd.loader.checks.crew import WORTH_A_THREAD, Crew
from adapterd.loader.errors import Code, Refused, error
from adapterd.loader.formats.files import DirectoryPackage, FileReader
from adapterd.loader.limits import DEFAULT_LIMITS
from fakes.packages import PREFIX, tiny_llama_spec, write_package

WEIGHTS = "adapter_model.safetensors"


class CountingReader:
    """A FileReader that counts bytes; a name in `broken` fails beyond its header."""

    def __init__(self, inner: FileReader, *, broken: bool) -> None:
        self._inner = inner
        self._broken = broken
        self.read = 0

    @property
    def size(self) -> int:
        return self._inner.size

    def read_at(self, offset: int, length: int) -> bytes:
        self.read += length
        if self._broken and offset + length > self.size // 2 and offset > 8:
            raise error(Code.ST_TRUNCATED, WEIGHTS, "the disk says no")
        return self._inner.read_at(offset, length)


class CountingPackage:
    """A Package whose readers count."""

    def __init__(self, inner: DirectoryPackage, *, broken: bool = False) -> None:
        self._inner = inner
        self._broken = broken
        self.readers: dict[str, CountingReader] = {}

    def names(self) -> tuple[str, ...]:
        return self._inner.names()

    def sizes(self) -> dict[str, int]:
        return self._inner.sizes()

    def open(self, name: str) -> CountingReader:
        if name not in self.readers:
            broken = self._broken and name == WEIGHTS
            self.readers[name] = CountingReader(self._inner.open(name), broken=broken)
        return self.readers[name]


def times_read(folder: Path, **options: object) -> float:
    """Bytes read of the tensor file over its data, the header's few reads taken off."""
    with DirectoryPackage.open_dir(folder, DEFAULT_LIMITS) as opened:
        package = CountingPackage(opened)
        verdict = examine(package, tiny_llama_spec(), **options)  # type: ignore[arg-type]
        reader = package.readers[WEIGHTS]
        span = 8 + int.from_bytes(reader.read_at(0, 8), "little")
    assert verdict.manifest is not None or verdict.problems
    return (reader.read - 8 - 4 * span) / (reader.size - span)


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_each_byte_is_read_once_for_its_hash_and_its_value(tmp_path: Path, dtype: str) -> None:
    write_package(tmp_path, rank=32, dtype=dtype, modules=("q_proj", "o_proj", "up_proj"))
    assert times_read(tmp_path) <= 1
    with DirectoryPackage.open_dir(tmp_path, DEFAULT_LIMITS) as opened:
        verdict = examine(opened, tiny_llama_spec())
    assert verdict.manifest is not None
    assert times_read(tmp_path, files=verdict.manifest.files) <= 1
    assert times_read(tmp_path, content=False) <= 1


def test_factors_made_to_cancel_are_read_a_bounded_number_of_times(tmp_path: Path) -> None:
    written = write_package(tmp_path, rank=4, dtype="BF16", modules=("q_proj",))
    tensors = {}
    for path, (a, b) in written.factors.items():
        tensors[f"{PREFIX}{path}.lora_A.weight"] = np.repeat(a[:1], 4, axis=0)
        tensors[f"{PREFIX}{path}.lora_B.weight"] = np.stack([b[:, 0], -b[:, 0], b[:, 1], -b[:, 1]], axis=1)
    write_package(tmp_path, rank=4, dtype="BF16", modules=("q_proj",), tensors=tensors)
    # For the hash, and float32, float64 and triangles from the same memory.
    assert times_read(tmp_path) <= 1


@pytest.mark.parametrize("nbytes", [0, WORTH_A_THREAD])
def test_a_crew_gives_results_and_refusals_in_the_order_of_its_calls(nbytes: int) -> None:
    def refuse() -> int:
        raise error(Code.ST_TRUNCATED, "here", "no")

    with Crew(nbytes) as crew:
        waits: list[Callable[[], int]] = [crew.call(lambda n=n: n * n) for n in range(50)]
        refused = crew.call(refuse)
        assert [wait() for wait in waits] == [n * n for n in range(50)]
        with pytest.raises(Refused):
            refused()


def test_a_crew_drops_what_has_not_begun() -> None:
    begun, gate = [], threading.Event()

    def work(n: int) -> None:
        begun.append(n)
        gate.wait(30)

    with pytest.raises(ZeroDivisionError), Crew(WORTH_A_THREAD) as crew:
        for n in range(100):
            crew.call(lambda n=n: work(n))
        threading.Timer(0.05, gate.set).start()
        raise ZeroDivisionError
    assert len(begun) < 100


def test_a_file_that_fails_while_it_is_read_is_refused_once(tmp_path: Path) -> None:
    write_package(tmp_path, rank=8)
    with DirectoryPackage.open_dir(tmp_path, DEFAULT_LIMITS) as opened:
        verdict = examine(CountingPackage(opened, broken=True), tiny_llama_spec())
    assert [p.code for p in verdict.problems] == [Code.ST_TRUNCATED]
    assert verdict.manifest is None
