"""A base's folder, looked through once: the files with the weights, those that are copied, and those that are not.

A link is followed to a file in the folder itself, or to one in the `blobs` of the same model in a Hugging Face
cache, whose snapshots are made of links. Any other would carry a file from elsewhere into the merged model, which
is there to be given away.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapterd.loader.base_fields import invalid
from adapterd.loader.base_files import INDEX_FILE, StoredTensor, read_config, stored_tensors
from adapterd.loader.errors import AdapterdError, Code, error
from adapterd.loader.formats.files import DescriptorReader, FileReader
from adapterd.loader.formats.readers import special
from adapterd.loader.formats.text import shown
from adapterd.loader.manifest import TensorEntry
from adapterd.loader.merge.matrices import ITEM_BYTES, Stored

MAX_FILES = 10_000
MAX_DEPTH = 4
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WEIGHT_SUFFIXES = (
    ".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".ckpt", ".pkl", ".pickle",
    ".gguf", ".ggml", ".onnx", ".onnx_data", ".h5", ".msgpack", ".npz", ".tflite", ".ot",
)  # fmt: skip
"""Names of weights in other forms. A copy of them would be the base's, beside the merged ones."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One file with weights.

    Attributes:
        data_start: where the header ends.
        tensors: in the order of their bytes, which have no holes.
    """

    name: str
    reader: FileReader
    data_start: int
    tensors: tuple[Stored, ...]


@dataclass(frozen=True, slots=True)
class BaseFolder:
    """An open base.

    Attributes:
        config: `config.json`.
        shards: files with weights, by name.
        others: files to copy, by their path in the folder.
        left_out: what is not copied: weights in other forms, and hidden folders.
    """

    path: Path
    config: Mapping[str, Any]
    shards: Mapping[str, Shard]
    others: Mapping[str, FileReader]
    left_out: tuple[str, ...]

    @property
    def tensors(self) -> dict[str, Stored]:
        """All tensors by name."""
        return {t.entry.name: t for shard in self.shards.values() for t in shard.tensors}


@contextmanager
def opened_base(path: Path) -> Iterator[BaseFolder]:
    """Open every file of the model in `path`, once.

    Raises:
        NotFound: PATH_NOT_FOUND.
        Refused: UNSAFE_LINK, ARCHIVE_SPECIAL_FILE, ARCHIVE_TOO_MANY_ENTRIES.
        Failed: BASE_TABLE_INVALID for files that are no model's, or not what their headers say.
    """
    config = read_config(path)
    listed = _Listing(path)
    tensors: dict[str, list[StoredTensor]] = {}
    for tensor in stored_tensors(path):
        tensors.setdefault(tensor.file.name, []).append(tensor)
    wanted = {*tensors, INDEX_FILE} if (path / INDEX_FILE).exists() else set(tensors)
    copied = [n for n in listed.files if n not in tensors and (n in wanted or not n.endswith(_WEIGHT_SUFFIXES))]
    left = sorted({*listed.skipped, *(listed.files.keys() - tensors.keys() - set(copied))})
    with ExitStack() as stack:
        readers = {name: _reader(listed.files[name], name, stack) for name in (*tensors, *copied)}
        shards = {name: _shard(name, readers[name], found) for name, found in tensors.items()}
        yield BaseFolder(path, config, shards, {name: readers[name] for name in copied}, tuple(left))


def _reader(path: Path, name: str, stack: ExitStack) -> FileReader:
    try:
        descriptor = os.open(path, _OPEN)
    except OSError as e:
        raise error(Code.PATH_NOT_FOUND, shown(name), f"cannot be read: {e.strerror or e}") from e
    reader = DescriptorReader(descriptor, name)
    stack.callback(reader.close)
    return reader


# ------------------------------------------------------------------ what lies in the folder


class _Listing:
    """Regular files by their path in the folder, with links resolved; and what was not looked into."""

    def __init__(self, root: Path) -> None:
        self.files: dict[str, Path] = {}
        self.skipped: list[str] = []
        self._root = root.resolve()
        self._homes = [self._root]
        if self._root.parent.name == "snapshots":
            self._homes.append(self._root.parent.parent / "blobs")
        self._walk(self._root, "", 1)

    def _walk(self, folder: Path, prefix: str, depth: int) -> None:
        for name in sorted(os.listdir(folder)):
            self._visit(folder / name, prefix + name, depth)
            if len(self.files) + len(self.skipped) > MAX_FILES:
                raise error(Code.ARCHIVE_TOO_MANY_ENTRIES, shown(str(self._root)), f"more than {MAX_FILES} files")

    def _visit(self, path: Path, name: str, depth: int) -> None:
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode):
            if path.name.startswith(".") or depth >= MAX_DEPTH:
                self.skipped.append(f"{name}/")
            else:
                self._walk(path, f"{name}/", depth + 1)
        elif stat.S_ISLNK(mode):
            self.files[name] = self._followed(path, name)
        elif stat.S_ISREG(mode):
            self.files[name] = path
        else:
            raise error(Code.ARCHIVE_SPECIAL_FILE, shown(name), special(name).message)

    def _followed(self, path: Path, name: str) -> Path:
        try:
            real = path.resolve(strict=True)
        except (OSError, RuntimeError):
            raise _unsafe(name, "leads nowhere") from None
        if not any(real.is_relative_to(home) for home in self._homes) or not real.is_file():
            raise _unsafe(name, "leads to something that is no file of this model")
        return real


def _unsafe(name: str, why: str) -> AdapterdError:
    hint = "Merge from a copy without links (cp -rL), if all that they lead to may be in the merged model."
    return error(Code.UNSAFE_LINK, shown(name), f"is a symbolic link that {why}", hint)


# ------------------------------------------------------------------ what a header promises


def _shard(name: str, reader: FileReader, tensors: list[StoredTensor]) -> Shard:
    """Raises Failed (BASE_TABLE_INVALID) unless the tensors fill the file from the header to its end, in one row."""
    start = tensors[0].data_start
    entries = sorted((_entry(t) for t in tensors), key=lambda e: (e.begin, e.end))
    at = start
    for entry in entries:
        if entry.begin != at:
            raise invalid(shown(entry.name), f"{name}: begins at byte {entry.begin}, the one before ends at {at}")
        at = entry.end
    if at != reader.size:
        hint = "Is the download complete?"
        raise invalid(name, f"its tensors end at byte {at}, the file has {reader.size}", hint)
    return Shard(name, reader, start, tuple(Stored(name, entry, reader) for entry in entries))


def _entry(tensor: StoredTensor) -> TensorEntry:
    match tensor.data_offsets:
        case [int(begin), int(end)] if 0 <= begin <= end:
            entry = TensorEntry(
                tensor.name, tensor.dtype, tensor.shape, tensor.data_start + begin, tensor.data_start + end
            )
        case _:
            raise invalid(shown(tensor.name), "has no data_offsets")
    item = ITEM_BYTES.get(entry.dtype)
    if item is not None and entry.nbytes != (wanted := math.prod(entry.shape) * item):
        raise invalid(shown(entry.name), f"has {entry.nbytes} bytes, by its dtype and shape {wanted}")
    return entry
