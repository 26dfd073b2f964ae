"""The ground floor: bytes and a clock in, trusted objects or an error out. Imports no other room.

The names below are the public surface. They are looked up when they are first used, because
`adapterd.loader.errors` is imported by every command, and its `--help` must not wait for httpx and numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adapterd.loader.base_model import BaseModule, BaseSpec, ModuleKind
    from adapterd.loader.checks import Verdict, examine, examine_path
    from adapterd.loader.errors import AdapterdError, Code, Problem
    from adapterd.loader.identity import BasePin, Ref, VersionKey
    from adapterd.loader.limits import Limits
    from adapterd.loader.manifest import Manifest
    from adapterd.loader.sources import FolderSource, RegistrySource, Resolved, Source
    from adapterd.loader.store import StoredVersion, VerifiedStore
    from adapterd.loader.trust.keys import PrivateKey, PublicKey
    from adapterd.loader.trust.policy import TrustStore

_ROOMS = {
    "base_model": ("BaseModule", "BaseSpec", "ModuleKind"),
    "checks": ("Verdict", "examine", "examine_path"),
    "errors": ("AdapterdError", "Code", "Problem"),
    "identity": ("BasePin", "Ref", "VersionKey"),
    "limits": ("Limits",),
    "manifest": ("Manifest",),
    "sources": ("FolderSource", "RegistrySource", "Resolved", "Source"),
    "store": ("StoredVersion", "VerifiedStore"),
    "trust.keys": ("PrivateKey", "PublicKey"),
    "trust.policy": ("TrustStore",),
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}

__all__ = [
    "AdapterdError", "BaseModule", "BasePin", "BaseSpec", "Code", "FolderSource", "Limits", "Manifest", "ModuleKind",
    "PrivateKey", "Problem", "PublicKey", "Ref", "RegistrySource", "Resolved", "Source", "StoredVersion", "TrustStore",
    "Verdict", "VerifiedStore", "VersionKey", "examine", "examine_path",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _ROOM_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ROOM_OF[name]}"), name)
