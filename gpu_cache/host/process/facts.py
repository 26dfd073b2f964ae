"""Manifest and layout of a version, the slab's usage and the progress of loads, as bytes for the engine's process.

Reading is what costs: it happens beside decode. So a manifest is written by columns, which build its entries
without a dictionary each, and a layout as it lies in memory. It is said once a version and connection
(`messages.Known`). A manifest of hundreds of modules still takes a millisecond: it is read in blocks, and between
them decode gets the interpreter. Only what this program wrote itself is read here.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

from adapterd.gpu_cache.host.interface import Facts, HostUsage, Progress, Stage
from adapterd.gpu_cache.host.process.frames import Garbled
from adapterd.loader.identity import BasePin, FileEntry, VersionKey
from adapterd.loader.layout import Layout
from adapterd.loader.manifest import Manifest, ModuleEntry, TensorEntry

_SIZE = struct.Struct(">I")
BLOCK_MODULES = 32
_PLAIN = ("name", "rank", "alpha", "scaling", "dtype", "in_features", "out_features", "delta_norm")


def let_others_run() -> None:
    """Gives the interpreter to a thread that waits for it."""
    time.sleep(0)


def facts_to_bytes(facts: Facts) -> bytes:
    """Law: `facts_from_bytes(facts_to_bytes(f)) == f`, but for the publisher: that goes by claim, not by version."""
    manifest, modules = facts.manifest, facts.manifest.modules
    base, files = manifest.base, [[f.path, f.sha256, f.size] for f in manifest.files]
    head = [[base.id, base.revision, base.module_table_digest], manifest.naming, files]
    blocks = [_columns(modules[i : i + BLOCK_MODULES]) for i in range(0, len(modules), BLOCK_MODULES)]
    parts = [json.dumps(part, separators=(",", ":")).encode() for part in (head, *blocks)]
    sized = [data for part in parts for data in (_SIZE.pack(len(part)), part)]
    return b"".join((_SIZE.pack(len(parts)), *sized, facts.layout.to_bytes()))


def facts_from_bytes(data: bytes, breathe: Callable[[], None] = let_others_run) -> Facts:
    """
    Args:
        breathe: called after each block of modules.

    Raises:
        Garbled: for anything that `facts_to_bytes` does not write.
    """
    try:
        (count,) = _SIZE.unpack_from(data)
        (base, naming, files), at = _part(data, _SIZE.size)
        modules: list[ModuleEntry] = []
        for _ in range(count - 1):
            block, at = _part(data, at)
            modules += _modules(*block)
            breathe()
        found = Manifest(BasePin(*base), tuple(modules), tuple(FileEntry(*f) for f in files), naming)
        return Facts(found, Layout.from_bytes(data[at:]))
    except (ValueError, TypeError, struct.error, RecursionError) as e:
        raise Garbled("no facts of a version") from e


def _part(data: bytes, at: int) -> tuple[Any, int]:
    """The JSON that begins there, and where the next part does."""
    (size,) = _SIZE.unpack_from(data, at)
    begin = at + _SIZE.size
    return json.loads(data[begin : begin + size]), begin + size


Columns = list[list[object]]


def _columns(modules: Sequence[ModuleEntry]) -> list[object]:
    return [
        [list(map(attrgetter(name), modules)) for name in _PLAIN],
        _tensor_columns([m.a for m in modules]),
        _tensor_columns([m.b for m in modules]),
    ]


def _tensor_columns(tensors: list[TensorEntry]) -> Columns:
    return [
        [t.name for t in tensors],
        [t.dtype for t in tensors],
        [list(t.shape) for t in tensors],
        [t.begin for t in tensors],
        [t.end for t in tensors],
    ]


def _modules(plain: Columns, a: Columns, b: Columns) -> list[ModuleEntry]:
    *head, norms = plain
    return [ModuleEntry(*row) for row in zip(*head, _tensors(a), _tensors(b), norms, strict=True)]


def _tensors(columns: Columns) -> Iterator[TensorEntry]:
    names, dtypes, shapes, begins, ends = columns
    return map(TensorEntry, names, dtypes, map(tuple, shapes), begins, ends)  # type: ignore[arg-type]


def loading_to_bytes(loading: Mapping[VersionKey, Progress]) -> bytes:
    """Law: `loading_from_bytes(loading_to_bytes(l)) == l`."""
    rows = [
        [
            key.tenant,
            [key.base.id, key.base.revision, key.base.module_table_digest],
            key.digest,
            p.stage,
            p.done,
            p.total,
        ]
        for key, p in loading.items()
    ]
    return json.dumps(rows, separators=(",", ":")).encode()


def loading_from_bytes(data: bytes) -> dict[VersionKey, Progress]:
    """Raises Garbled for anything that `loading_to_bytes` does not write."""
    try:
        return {
            VersionKey(tenant, BasePin(*base), digest): Progress(Stage(stage), done, total)
            for tenant, base, digest, stage, done, total in json.loads(data)
        }
    except (ValueError, TypeError, RecursionError) as e:
        raise Garbled("no progress of loads") from e


def usage_to_bytes(usage: HostUsage) -> bytes:
    """Law: `usage_from_bytes(usage_to_bytes(u)) == u`."""
    bases = list({key.base: None for key in usage.images})
    number = {base: index for index, base in enumerate(bases)}
    images = [[key.tenant, number[key.base], key.digest, nbytes] for key, nbytes in usage.images.items()]
    pins = [[b.id, b.revision, b.module_table_digest] for b in bases]
    return json.dumps([dict(usage.tenants), usage.free_bytes, pins, images], separators=(",", ":")).encode()


def usage_from_bytes(data: bytes) -> HostUsage:
    """Raises Garbled for anything that `usage_to_bytes` does not write."""
    try:
        tenants, free, pins, images = json.loads(data)
        bases = [BasePin(*pin) for pin in pins]
        found = {VersionKey(tenant, bases[base], digest): nbytes for tenant, base, digest, nbytes in images}
    except (ValueError, TypeError, IndexError, RecursionError) as e:
        raise Garbled("no usage of a slab") from e
    return HostUsage(tenants, free, found)
