"""What the routes work with."""

from __future__ import annotations

from dataclasses import dataclass

from adapterd.loader.trust.keys import PublicKey
from adapterd.registry.api.lanes import Lanes
from adapterd.registry.api.observe import Observer
from adapterd.registry.blobs.interfaces import BlobStore
from adapterd.registry.catalog.adapters import AdapterService
from adapterd.registry.catalog.aliases import AliasService
from adapterd.registry.catalog.resolve import Resolver
from adapterd.registry.catalog.versions import VersionService
from adapterd.registry.services import Services
from adapterd.registry.uploads.finalize import Admission
from adapterd.registry.uploads.janitor import Janitor
from adapterd.registry.uploads.service import UploadService


@dataclass(frozen=True, slots=True)
class Context:
    """The collaborators of the routes, all safe to use from many threads."""

    services: Services
    blobs: BlobStore
    adapters: AdapterService
    versions: VersionService
    aliases: AliasService
    resolver: Resolver
    uploads: UploadService
    admission: Admission
    janitor: Janitor
    admission_keys: tuple[PublicKey, ...]
    observer: Observer
    lanes: Lanes
