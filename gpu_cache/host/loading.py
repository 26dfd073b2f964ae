"""From a REF to verified bytes in host memory: the port that loader threads call, and the real thing.

Everything here may block, download, parse, hash and pack. None of it runs on the serving thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal, Protocol, cast

from adapterd.gpu_cache.config import CacheConfig
from adapterd.loader.errors import Code, NotFound, Untrusted, error
from adapterd.loader.identity import WEIGHTS_FILE, Ref
from adapterd.loader.layout import Dtype, Layout, plan_layout
from adapterd.loader.limits import Limits
from adapterd.loader.manifest import Manifest

if TYPE_CHECKING:
    from adapterd.loader.base_model import BaseSpec
    from adapterd.loader.sources import Resolved, Source
    from adapterd.loader.store import StoredVersion, VerifiedStore
    from adapterd.loader.trust.policy import TrustStore

Cancelled = Callable[[], bool]


class Prepared(Protocol):
    """A version that was verified and can be packed, any number of times."""

    @property
    def manifest(self) -> Manifest: ...

    @property
    def layout(self) -> Layout: ...

    def fill(self, out: memoryview) -> None:
        """Writes the packed form: all `layout.nbytes` bytes of `out`. Raises AdapterdError; `out` is then garbage."""
        ...


class Loader(Protocol):
    """What the stager asks of the loader. Called from several threads at once; raises AdapterdError only."""

    @property
    def trust_changes(self) -> int:
        """Grows when trust changes: what `prepare` found to hold before has to be prepared again. Only a number
        that is read: it is asked for under the cache's lock."""
        ...

    def resolve(self, ref: Ref, tenant: str) -> Resolved:
        """Which version the REF means now. NotFound if it is unknown."""
        ...

    def prepare(self, resolved: Resolved, base: BaseSpec, cancelled: Cancelled) -> Prepared:
        """The version, verified and on the local disk. Raises Failed (LEASE_CANCELLED) once `cancelled()`."""
        ...


Dtypes = Literal["auto", "F32", "F16", "BF16"]


class StoreLoader:
    """Loader over a source and the verified local store."""

    def __init__(
        self,
        source: Source,
        store: VerifiedStore,
        *,
        dtype: Dtypes,
        page_bytes: int,
        limits: Limits,
        recheck: bool = False,
    ) -> None:
        self._source, self._store, self._limits, self._recheck = source, store, limits, recheck
        self._dtype, self._page_bytes = dtype, page_bytes

    @property
    def trust_changes(self) -> int:
        return self._store.trust.changes

    def resolve(self, ref: Ref, tenant: str) -> Resolved:
        return self._source.resolve(ref, tenant)

    def prepare(self, resolved: Resolved, base: BaseSpec, cancelled: Cancelled) -> Prepared:
        def progress(*_: object) -> None:
            if cancelled():
                raise error(Code.LEASE_CANCELLED, str(resolved.ref), "nobody waits for it any more")

        progress()
        stored = self._store.ensure(resolved, self._source, base, progress=progress, recheck=self._recheck)
        layout = plan_layout(stored.manifest, packed_dtype(self._dtype, stored.manifest), self._page_bytes)
        return StoredImage(self._store, stored, layout, self._limits)


@dataclass(frozen=True, slots=True)
class StoredImage:
    """Prepared over a version in the verified store."""

    store: VerifiedStore
    stored: StoredVersion
    layout: Layout
    limits: Limits

    @property
    def manifest(self) -> Manifest:
        return self.stored.manifest

    def fill(self, out: memoryview) -> None:
        """Checks each chunk on the bytes it packs. A copy on disk that does not hold is hashed by the next load."""
        from adapterd.loader.formats.files import DirectoryPackage
        from adapterd.loader.pack import pack

        chunks = self.stored.statement.chunks
        try:
            with DirectoryPackage.open_dir(self.stored.directory, self.limits) as package:
                pack(self.stored.manifest, self.layout, package.open(WEIGHTS_FILE), chunks, out)
        except Untrusted:
            self.store.doubt(self.stored.key)
            raise
        except (KeyError, NotFound, OSError) as cause:
            self.store.doubt(self.stored.key)
            raise error(
                Code.STORAGE_UNAVAILABLE, str(self.stored.directory), f"the stored copy cannot be read: {cause}",
                "Another process may have replaced it; ask for the adapter again.",
            ) from cause  # fmt: skip


@contextmanager
def store_loader(config: CacheConfig, source: Source | None, trust: TrustStore | None) -> Iterator[StoreLoader]:
    """The loader that a configuration asks for; without a folder, over a temporary store that goes with the context."""
    if source is None or trust is None:
        raise ValueError("a cache needs a source and a trust store, or a loader")
    from adapterd.loader.store import VerifiedStore

    with ExitStack() as cleanup:
        root = config.store
        if root is None:
            # A load that outlived the cache may still be writing.
            folder = TemporaryDirectory(prefix="adapterd-store-", ignore_cleanup_errors=True)
            root = Path(cleanup.enter_context(folder))
        yield StoreLoader(
            source,
            VerifiedStore(root, trust, config.limits),
            dtype=config.dtype,
            page_bytes=config.page_bytes,
            limits=config.limits,
            recheck=config.recheck,
        )


def packed_dtype(wanted: Dtypes, manifest: Manifest) -> Dtype:
    """`auto` is the adapter's own dtype; F32, which holds all others, where modules differ."""
    if wanted != "auto":
        return wanted
    found = {module.dtype for module in manifest.modules}
    return cast(Dtype, found.pop()) if len(found) == 1 else "F32"
