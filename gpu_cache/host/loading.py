"""From a REF to verified bytes in host memory: the port that loader threads call, and the real thing.

Everything here may block, download, parse, hash and pack. None of it runs on the serving thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, Protocol, cast

from adapterd.gpu_cache.config import CacheConfig
from adapterd.gpu_cache.host.interface import Origin
from adapterd.loader.errors import Code, error
from adapterd.loader.identity import Ref, VersionKey
from adapterd.loader.image import Memory
from adapterd.loader.layout import Dtype, Layout
from adapterd.loader.manifest import Manifest
from adapterd.loader.parallel import Helpers, default_threads
from adapterd.loader.planning import plan_layout
from adapterd.loader.recent import Recent
from adapterd.loader.sharding import WHOLE, Sharding

if TYPE_CHECKING:
    from adapterd.loader.base_model import BaseSpec
    from adapterd.loader.sources import Resolved, Source
    from adapterd.loader.store import StoredVersion, VerifiedStore
    from adapterd.loader.trust.policy import TrustStore

Cancelled = Callable[[], bool]
ORIGINS = {"downloaded": Origin.SOURCE, "disk": Origin.DISK, "packed": Origin.PACKED}
MOST_PLANNED = 1 << 19
"""Blocks of all layouts that are kept in memory: about 15 MB."""


@dataclass(frozen=True, slots=True)
class Fill:
    """What became of a `fill`.

    Attributes:
        origin: where the bytes were before `prepare`.
        keep: what may be called once the bytes are in use, so that the next load finds the packed form on disk. It
            takes its time, and copes with memory that is overwritten meanwhile.
    """

    origin: Origin
    keep: Callable[[], object] | None = None


class Prepared(Protocol):
    """A version that was verified and can be packed, any number of times."""

    @property
    def manifest(self) -> Manifest: ...

    @property
    def layout(self) -> Layout: ...

    @property
    def publisher(self) -> str | None:
        """Key id of who signed it; None if nobody did."""
        ...

    def fill(self, out: Memory) -> Fill:
        """Writes the packed form: all `layout.nbytes` bytes of `out`.

        Raises AdapterdError; `out` is then garbage. STORAGE_UNAVAILABLE if what was prepared is not there any more:
        preparing it again heals that.
        """
        ...


Dtypes = Literal["auto", "F32", "F16", "BF16"]


@dataclass(frozen=True, slots=True)
class Serving:
    """What versions are verified and packed for: the base model, the dtype of the packed form, a rank's part of it."""

    base: BaseSpec
    dtype: Dtypes = "auto"
    sharding: Sharding = WHOLE


class Told(Protocol):
    """Who wants to know how far a load is. Called often, in the thread that loads."""

    def add(self, nbytes: int) -> None:
        """So many more were fetched or hashed."""
        ...

    def expect(self, nbytes: int) -> None:
        """So many are to come, from the first one on."""
        ...


class Loader(Protocol):
    """What a host asks of the loader. Called from several threads at once; raises AdapterdError only."""

    @property
    def trust_changes(self) -> int:
        """Grows when trust changes: what `prepare` found to hold before has to be prepared again. Only a number
        that is read: it is asked for under locks."""
        ...

    def resolve(self, ref: Ref, tenant: str) -> Resolved:
        """Which version the REF means now. NotFound if it is unknown."""
        ...

    def prepare(self, resolved: Resolved, serving: Serving, cancelled: Cancelled, told: Told) -> Prepared:
        """The version, verified and on the local disk; `told` is told how far that is. Raises Failed (LEASE_CANCELLED)
        once `cancelled()`."""
        ...


class StoreLoader:
    """Loader over a source and the verified local store."""

    def __init__(
        self,
        source: Source,
        store: VerifiedStore,
        *,
        page_bytes: int,
        recheck: bool = False,
    ) -> None:
        self._source, self._store, self._page_bytes, self._recheck = source, store, page_bytes, recheck
        self._layouts: Recent[tuple[VersionKey, str, Dtype, str], Layout] = Recent(MOST_PLANNED)

    @property
    def trust_changes(self) -> int:
        return self._store.trust.changes

    def resolve(self, ref: Ref, tenant: str) -> Resolved:
        return self._source.resolve(ref, tenant)

    def prepare(self, resolved: Resolved, serving: Serving, cancelled: Cancelled, told: Told) -> Prepared:
        def progress(nbytes: int) -> None:
            told.add(nbytes)
            if cancelled():
                raise error(Code.LEASE_CANCELLED, str(resolved.ref), "nobody waits for it any more")

        progress(0)
        stored = self._store.ensure(
            resolved, self._source, serving.base, progress=progress, expect=told.expect, recheck=self._recheck
        )
        return StoredImage(self._store, stored, self._layout(stored, serving))

    def _layout(self, stored: StoredVersion, serving: Serving) -> Layout:
        """As planned before for this very manifest, or planned now."""
        dtype = packed_dtype(serving.dtype, stored.manifest)
        key = (stored.key, stored.statement.manifest_digest, dtype, serving.sharding.digest)
        layout = self._layouts.get(key)
        if layout is None:
            layout = plan_layout(stored.manifest, dtype, self._page_bytes, serving.sharding)
            self._layouts.keep(key, layout, len(layout.table))
        return layout


@dataclass(frozen=True, slots=True)
class StoredImage:
    """Prepared over a version in the verified store."""

    store: VerifiedStore
    stored: StoredVersion
    layout: Layout

    @property
    def manifest(self) -> Manifest:
        return self.stored.manifest

    @property
    def publisher(self) -> str | None:
        signature = self.stored.checked.signature
        return None if signature is None else signature.key_id

    def fill(self, out: Memory) -> Fill:
        """A copy on disk that does not hold, or is not there any more, is looked at by the next load."""
        filled = self.store.fill(self.stored, self.layout, out)
        keep = partial(self.store.keep_packed, self.stored, self.layout, filled, out) if filled.seal else None
        return Fill(ORIGINS[filled.origin], keep)


@contextmanager
def store_loader(config: CacheConfig, source: Source | None, trust: TrustStore | None) -> Iterator[StoreLoader]:
    """The loader that a configuration asks for; without a folder, over a temporary store that goes with the context."""
    if source is None or trust is None:
        raise ValueError("a cache needs a source and a trust store, or a host")
    from adapterd.loader.scratch import scratch_folder
    from adapterd.loader.store import VerifiedStore
    from adapterd.loader.store_key import StoreKey

    with ExitStack() as cleanup:
        root = config.store
        if root is None:
            # A load that outlived the cache may still be writing.
            root = cleanup.enter_context(scratch_folder("store"))
        helpers = Helpers(default_threads() - 1)
        cleanup.callback(helpers.close, config.close_seconds)
        yield StoreLoader(
            source,
            VerifiedStore(
                root,
                trust,
                config.limits,
                max_bytes=config.store_bytes,
                store_key=None if config.store_key is None else StoreKey.load(config.store_key, outside=root),
                helpers=helpers,
            ),
            page_bytes=config.page_bytes,
            recheck=config.recheck,
        )


def packed_dtype(wanted: Dtypes, manifest: Manifest) -> Dtype:
    """`auto` is the adapter's own dtype; F32, which holds all others, where modules differ."""
    if wanted != "auto":
        return wanted
    found = {module.dtype for module in manifest.modules}
    return cast(Dtype, found.pop()) if len(found) == 1 else "F32"
