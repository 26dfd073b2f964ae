"""The copy with PEFT's names: a new header, the same bytes behind it, in the same order."""

from __future__ import annotations

import contextlib
import json
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from adapterd.loader.base_model import BaseSpec
from adapterd.loader.convert.names import Rename, Step, renames
from adapterd.loader.errors import Code, Refused, reject
from adapterd.loader.formats.files import FileReader, Package, read_all
from adapterd.loader.formats.library_check import agree_with_library
from adapterd.loader.formats.package import Contents, judge_package
from adapterd.loader.formats.peft_config import parse_config
from adapterd.loader.formats.readers import HASH_BLOCK_BYTES
from adapterd.loader.formats.safetensors_header import LENGTH_BYTES, METADATA, Header, read_header
from adapterd.loader.formats.targets import Scales
from adapterd.loader.formats.text import shown
from adapterd.loader.identity import CONFIG_FILE, SIGNATURE_FILE, WEIGHTS_FILE
from adapterd.loader.limits import Limits

ALIGNMENT = 8
"""The format pads the header with spaces so that the data starts at a multiple of 8."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """What the copy will hold.

    Attributes:
        renames: every tensor, in the order of its bytes.
        copied: the other files, byte for byte.
        left_out: what is in the folder and not in the copy; a signature of the old bytes is among it.
    """

    weights: FileReader
    header: Header
    renames: tuple[Rename, ...]
    copied: tuple[str, ...]
    left_out: tuple[str, ...]

    @property
    def changes(self) -> tuple[Rename, ...]:
        return tuple(r for r in self.renames if r.new != r.old)

    @property
    def steps(self) -> Mapping[Step, int]:
        """How many tensors each step was done to."""
        return Counter(step for one in self.renames for step in one.steps)


def plan_conversion(package: Package, base: BaseSpec, limits: Limits) -> Conversion:
    """Read names only, and decide.

    Args:
        package: its files in one flat folder; what is not part of an adapter has been left out.

    Raises:
        Refused: the files, config or header are no adapter's; what `names.renames` raises; CONFIG_TENSOR_DISAGREE
            where rank or alpha would depend on the old name.
    """
    contents = _contents(package, limits)
    data = read_all(package.open(CONFIG_FILE))
    weights = package.open(WEIGHTS_FILE)
    header = read_header(weights, limits)
    agree_with_library(weights, header)
    found = _proved([t.name for t in header.tensors], base)
    config, _ = parse_config(data, limits)
    _scales_must_hold(Scales(config), found)
    copied = tuple(n for n in contents.stored if n not in (WEIGHTS_FILE, SIGNATURE_FILE))
    signature = [n for n in contents.stored if n == SIGNATURE_FILE]
    return Conversion(weights, header, found, copied, (*contents.left_out, *signature))


def _proved(names: Sequence[str], base: BaseSpec) -> tuple[Rename, ...]:
    """In the base's own naming, or as a whole in one alternative. Raises Refused, for the base's own."""
    try:
        return renames(names, base)
    except Refused:
        for alternative in base.alternatives:
            with contextlib.suppress(Refused):
                return renames(names, base.named(alternative.name))
        raise


def _contents(package: Package, limits: Limits) -> Contents:
    contents = judge_package(package.sizes(), limits)
    if not contents.ok:
        raise Refused(*(p for p in contents.problems if p.severity == "reject"))
    return contents


def _scales_must_hold(scales: Scales, found: Sequence[Rename]) -> None:
    """Patterns of rank and alpha are matched with names: the new one must give what any older one gave."""
    for one in found:
        wanted = scales.of(one.module)
        for path in one.seen:
            other = scales.of(path)
            if (other.rank, other.alpha) != (wanted.rank, wanted.alpha):
                message = f"rank {other.rank}, alpha {other.alpha:g} under its old name, "
                message += f"{wanted.rank} and {wanted.alpha:g} as {shown(one.module)}; which was trained?"
                hint = "Correct rank_pattern and alpha_pattern to the base's module names first."
                raise Refused(reject(Code.CONFIG_TENSOR_DISAGREE, shown(one.old), message, hint))


def write_weights(conversion: Conversion, out: BinaryIO, progress: Callable[[int], None]) -> None:
    """The tensor file of the copy. Without a change it is the old file, byte for byte."""
    start = conversion.header.data_start
    if not conversion.changes:
        start = 0
    else:
        out.write(header_bytes(conversion))
    for block in _blocks_from(conversion.weights, start):
        out.write(block)
        progress(len(block))


def header_bytes(conversion: Conversion) -> bytes:
    """Length and JSON: metadata first, then the tensors in the order of their bytes, offsets as they were."""
    header, start = conversion.header, conversion.header.data_start
    fields: dict[str, object] = {METADATA: dict(header.metadata)} if header.metadata else {}
    for one, tensor in zip(conversion.renames, header.tensors, strict=True):
        offsets = [tensor.begin - start, tensor.end - start]
        fields[one.new] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _blocks_from(reader: FileReader, start: int) -> Iterator[bytes]:
    for offset in range(start, reader.size, HASH_BLOCK_BYTES):
        yield reader.read_at(offset, min(HASH_BLOCK_BYTES, reader.size - offset))
