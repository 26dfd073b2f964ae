"""Manifest and layout of a version, and the slab's usage, as bytes that the engine's process reads.

Reading is what costs: it happens beside decode. So a manifest is written by columns, which build its entries
without a dictionary each, and a layout as it lies in memory. It is said once a version and connection
(`messages.Known`). Only what this program wrote itself is read here.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from operator import attrgetter

from adapterd.gpu_cache.host.interface import Facts, HostUsage
from adapterd.gpu_cache.host.process.frames import Garbled
from adapterd.loader.identity import BasePin, FileEntry, VersionKey
from adapterd.loader.layout import Layout
from adapterd.loader.manifest import Manifest, ModuleEntry, TensorEntry

_SIZE = struct.Struct(">I")
_PLAIN = ("name", "rank", "alpha", "scaling", "dtype", "in_features", "out_features", "delta_norm")


def facts_to_bytes(facts: Facts) -> bytes:
    """Law: `facts_from_bytes(facts_to_bytes(f)) == f`, but for the publisher: that goes by claim, not by version."""
    manifest = json.dumps(_columns(facts.manifest), separators=(",", ":")).encode()
    return b"".join((_SIZE.pack(len(manifest)), manifest, facts.layout.to_bytes()))


def facts_from_bytes(data: bytes) -> Facts:
    """Raises Garbled for anything that `facts_to_bytes` does not write."""
    try:
        (size,) = _SIZE.unpack_from(data)
        manifest = _manifest(*json.loads(data[_SIZE.size : _SIZE.size + size]))
        return Facts(manifest, Layout.from_bytes(data[_SIZE.size + size :]))
    except (ValueError, TypeError, struct.error, RecursionError) as e:
        raise Garbled("no facts of a version") from e


Columns = list[list[object]]


def _columns(manifest: Manifest) -> list[object]:
    modules, base = manifest.modules, manifest.base
    return [
        [base.id, base.revision, base.module_table_digest],
        manifest.naming,
        [[f.path, f.sha256, f.size] for f in manifest.files],
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


def _manifest(
    base: list[str], naming: str, files: list[list[object]], plain: Columns, a: Columns, b: Columns
) -> Manifest:
    *head, norms = plain
    rows = zip(*head, _tensors(a), _tensors(b), norms, strict=True)
    modules = tuple(ModuleEntry(*row) for row in rows)
    return Manifest(BasePin(*base), modules, tuple(FileEntry(*f) for f in files), naming)  # type: ignore[arg-type]


def _tensors(columns: Columns) -> Iterator[TensorEntry]:
    names, dtypes, shapes, begins, ends = columns
    return map(TensorEntry, names, dtypes, map(tuple, shapes), begins, ends)  # type: ignore[arg-type]


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
