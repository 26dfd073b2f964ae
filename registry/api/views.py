"""Catalog objects as JSON."""

from __future__ import annotations

from typing import Any

from adapterd.loader.errors import Problem
from adapterd.loader.identity import FileEntry
from adapterd.registry.catalog.interfaces import (
    AdapterInfo,
    AliasInfo,
    AliasMove,
    Pinned,
    VersionDetail,
    VersionInfo,
)


def adapter_json(info: AdapterInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "versions": info.versions,
        "created_at": info.created_at.isoformat(),
        "updated_at": info.updated_at.isoformat(),
        "aliases": dict(info.aliases),
    }


def version_json(info: VersionInfo) -> dict[str, Any]:
    return {
        "tenant": info.tenant,
        "adapter": info.adapter,
        "number": info.number,
        "version_digest": info.version_digest,
        "base": info.base.as_json(),
        "files": [file_json(f) for f in info.files],
        "signature": file_json(info.signature) if info.signature else None,
        "publisher": info.publisher,
        "state": info.state.value,
        "created_at": info.created_at.isoformat(),
    }


def detail_json(detail: VersionDetail) -> dict[str, Any]:
    return {
        **version_json(detail.info),
        "manifest": dict(detail.manifest),
        "warnings": [p.as_json() for p in detail.warnings],
    }


def file_json(entry: FileEntry) -> dict[str, Any]:
    return {"path": entry.path, "size": entry.size, "sha256": entry.sha256}


def alias_json(info: AliasInfo) -> dict[str, Any]:
    return {"alias": info.alias, "number": info.number, "version_digest": info.version_digest}


def move_json(move: AliasMove) -> dict[str, Any]:
    return {
        "version_digest": move.version_digest,
        "number": move.number,
        "moved_at": move.moved_at.isoformat(),
        "by": move.by,
    }


def resolved_json(ref: str, found: Pinned | Problem) -> dict[str, Any]:
    """One item of `POST /v1/resolve`; a problem has those fields of a problem document that mean something."""
    if isinstance(found, Problem):
        return {"ref": ref, "problem": {**found.as_json(), "detail": found.message}}
    return {
        "ref": ref,
        "tenant": found.tenant,
        "adapter": found.adapter,
        "version_digest": found.version_digest,
        "number": found.number,
        "base": found.base.as_json(),
        "state": found.state.value,
    }
