"""What the catalog tells, in frozen types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Generic, TypeVar

from adapterd.loader.errors import Problem
from adapterd.loader.identity import BasePin, FileEntry
from adapterd.loader.manifest import Manifest

T = TypeVar("T")


class VersionState(StrEnum):
    """ACTIVE is served; YANKED only to those who name its digest; QUARANTINED to nobody."""

    ACTIVE = "active"
    YANKED = "yanked"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """Part of a list. `next` is the key to continue after, or None at the end."""

    items: tuple[T, ...]
    next: str | int | None


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """One adapter: how many versions it has, and where its aliases point (alias → version digest)."""

    name: str
    versions: int
    created_at: datetime
    updated_at: datetime
    aliases: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class VersionInfo:
    """One version as it is listed.

    Attributes:
        number: 1, 2, 3 … within the adapter.
        files: all stored files but `model.sig`, sorted by the bytes of path.
        signature: `model.sig`, or None.
        publisher: key id, or `none`.
    """

    tenant: str
    adapter: str
    number: int
    version_digest: str
    base: BasePin
    files: tuple[FileEntry, ...]
    signature: FileEntry | None
    publisher: str
    state: VersionState
    created_at: datetime


@dataclass(frozen=True, slots=True)
class VersionDetail:
    """One version with what was found out about it. `manifest` is the JSON of `Manifest.as_json`."""

    info: VersionInfo
    manifest: Mapping[str, Any]
    warnings: tuple[Problem, ...]


@dataclass(frozen=True, slots=True)
class NewVersion:
    """What is recorded of an upload that passed every check."""

    adapter: str
    base: BasePin
    files: tuple[FileEntry, ...]
    signature: FileEntry | None
    publisher: str
    manifest: Manifest
    warnings: tuple[Problem, ...]


@dataclass(frozen=True, slots=True)
class AliasInfo:
    """Where an alias points."""

    alias: str
    number: int
    version_digest: str


@dataclass(frozen=True, slots=True)
class AliasMove:
    """One move in an alias's history. `by` is the id of the token that asked for it."""

    seq: int
    number: int
    version_digest: str
    moved_at: datetime
    by: str


@dataclass(frozen=True, slots=True)
class Pinned:
    """What a reference stands for now."""

    tenant: str
    adapter: str
    number: int
    version_digest: str
    base: BasePin
    state: VersionState
