"""Files of a base that is dequantised: floats in the place of packed integers, and what describes them anew."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from adapterd.loader.base_fields import parse_json
from adapterd.loader.base_files import CONFIG_FILE, INDEX_FILE
from adapterd.loader.formats.files import FileReader, read_all
from adapterd.loader.manifest import TensorEntry
from adapterd.loader.merge.folder import BaseFolder, Shard
from adapterd.loader.merge.matrices import ITEM_BYTES
from adapterd.loader.merge.shards import NewFile, Part, made, part_of

TORCH_DTYPE = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
QUANTISERS_FILES = frozenset({"quantize_config.json", "quant_config.json", "hf_quant_config.json"})
"""What tools write beside config.json about a quantised model; wrong for one that is not."""

METADATA = "__metadata__"


@dataclass(frozen=True, slots=True)
class NewTensor:
    """One tensor of a rewritten file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    part: Part


def floats(name: str, dtype: str, shape: tuple[int, int], part: Part) -> NewTensor:
    """A tensor that is made anew."""
    return NewTensor(name, dtype, shape, math.prod(shape) * ITEM_BYTES[dtype], part)


def kept(entry: TensorEntry, reader: FileReader) -> NewTensor:
    """A tensor of the base as it is."""
    return NewTensor(entry.name, entry.dtype, entry.shape, entry.nbytes, part_of(reader, entry.begin, entry.end))


def rewritten(shard: Shard, tensors: Sequence[NewTensor]) -> NewFile:
    """The shard with other tensors. The longest values come first, as the library has it, so that all are aligned."""
    ordered = sorted(tensors, key=lambda t: -ITEM_BYTES.get(t.dtype, 1))
    header: dict[str, object] = dict(_metadata(shard))
    at = 0
    for tensor in ordered:
        offsets = [at, at + tensor.nbytes]
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        at += tensor.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    start = struct.pack("<Q", len(text)) + text
    return NewFile(shard.name, len(start) + at, (_once(start), *(t.part for t in ordered)))


def _once(data: bytes) -> Part:
    def give() -> Iterator[bytes]:
        yield data

    return give


def _metadata(shard: Shard) -> Mapping[str, object]:
    text = shard.reader.read_at(8, shard.data_start - 8)
    header = parse_json(text, shard.name)
    return {METADATA: header[METADATA]} if METADATA in header else {}


def new_config(base: BaseFolder, dtype: str) -> NewFile:
    """`config.json` without its quantisation, and with the dtype that the linears have now."""
    config = {name: value for name, value in base.config.items() if name != "quantization_config"}
    words = [name for name in ("torch_dtype", "dtype") if name in config] or ["dtype"]
    config |= dict.fromkeys(words, TORCH_DTYPE[dtype])
    return made(CONFIG_FILE, json.dumps(config, indent=2, ensure_ascii=False).encode() + b"\n")


def new_index(base: BaseFolder, tensors: Mapping[str, Sequence[NewTensor]]) -> NewFile:
    """The index for the new names and sizes, by file; whatever else it says stays."""
    body: dict[str, Any] = parse_json(read_all(base.others[INDEX_FILE]), INDEX_FILE)
    body["weight_map"] = {t.name: file for file, listed in sorted(tensors.items()) for t in listed}
    if isinstance(body.get("metadata"), dict):
        body["metadata"] |= {"total_size": sum(t.nbytes for listed in tensors.values() for t in listed)}
    return made(INDEX_FILE, json.dumps(body, indent=2, ensure_ascii=False).encode() + b"\n")
