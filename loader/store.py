"""The verified local store: what a worker keeps on disk, and the only way into it.

A version comes in like this: statement and signature are verified, the files are hashed while they are
written and compared with both, and only then is anything parsed. The mark is written last. Opening a
marked version verifies statement and signature again, against the trust store as it is now, without
reading a tensor; chunk digests are checked where the bytes are packed (`pack`).
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from adapterd.loader.base_model import BaseSpec
from adapterd.loader.download import Progress
from adapterd.loader.ensuring import Ensuring, Tools
from adapterd.loader.filling import Filled, Filler
from adapterd.loader.identity import VersionKey
from adapterd.loader.image import Memory
from adapterd.loader.known_manifest import MOST_RECALLED, Recalled
from adapterd.loader.layout import Layout
from adapterd.loader.limits import DEFAULT_LIMITS, Limits
from adapterd.loader.parallel import Helpers
from adapterd.loader.sources.interface import Resolved, Source
from adapterd.loader.store_folder import StoreFolder, narrowed
from adapterd.loader.store_key import StoreKey
from adapterd.loader.store_room import Room
from adapterd.loader.stored import StoredVersion, check_pin
from adapterd.loader.trust.policy import TrustStore
from adapterd.loader.trust.seen import Seen

__all__ = ["StoredVersion", "VerifiedStore", "check_pin"]


class VerifiedStore:
    """Verified versions under one folder; threads and processes may share it.

    Args:
        root: made if it is not there; what a crash left half done is swept here.
        trust: consulted at every `ensure`, so that a change in it counts at once.
        limits: caps on what a statement may make this host fetch.
        max_bytes: of all versions together, packed forms included. The version that was used longest ago goes
            first; one that another thread or process is fetching stays. None: no bound.
        store_key: authenticates what the store keeps beside the files to spare work, packed forms and manifests
            (`StoreKey.load`); None: nothing of it is kept, and every load reads the files.
        clock: the time, with its zone.
        helpers: threads that `fill` shares among its callers; None: started for each call.

    Raises:
        Unavailable: STORAGE_UNAVAILABLE.
    """

    def __init__(
        self,
        root: Path,
        trust: TrustStore,
        limits: Limits = DEFAULT_LIMITS,
        *,
        max_bytes: int | None = None,
        store_key: StoreKey | None = None,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        helpers: Helpers | None = None,
    ) -> None:
        self.trust = trust
        self._folder = StoreFolder(root)
        room = Room(self._folder, max_bytes, clock)
        self._tools = Tools(self._folder, room, trust, limits, store_key, clock, Recalled(MOST_RECALLED), Seen())
        self._filler = Filler(self._folder, room, limits, store_key, self.doubt, helpers)

    def ensure(
        self,
        resolved: Resolved,
        source: Source,
        base: BaseSpec,
        *,
        progress: Progress | None = None,
        expect: Progress | None = None,
        recheck: bool = False,
    ) -> StoredVersion:
        """The version, verified, from disk if it is here and from `source` if it is not.

        A local copy that does not hold is replaced by a fresh one. Two callers that want the same version
        at once: the second waits and finds it there.

        Args:
            base: of the model that is served; another pin than the version's is a refusal.
            progress: called with the number of bytes fetched or hashed since the last call, 0 while another
                thread or process has the version or the source is being asked. What it raises gives up.
            expect: called with the number of bytes that are fetched or hashed from now on, once that is known.
            recheck: hash all bytes again and repeat the content checks (finite, effect).

        Raises:
            Untrusted: what `TrustedVersion` raises, CHUNK_MISMATCH.
            Refused: BASE_MISMATCH, BASE_REVISION_MISMATCH, QUOTA_EXCEEDED, HASH_MISMATCH, or the checks'.
            NotFound, Conflict, Unavailable: the source's. Unavailable: STORAGE_FULL (before a byte of the files
                is fetched, where `max_bytes` is the reason), STORAGE_UNAVAILABLE.
        """
        check_pin(resolved.base, base.pin)
        watch = progress or _no_progress
        loading = Ensuring(
            self._tools, resolved, source, base, progress=watch, expect=expect or _no_progress, recheck=recheck
        )
        with narrowed(self._folder.root), self._folder.locked(loading.name, partial(watch, 0)):
            return loading.from_disk() or loading.from_source()

    def fill(self, stored: StoredVersion, layout: Layout, out: Memory, *, threads: int | None = None) -> Filled:
        """Fill `out` with the version's packed form, every byte checked where it then lies or as it is packed.

        Args:
            stored: from `ensure`; another thread or process may have removed its files since.
            layout: from `plan_layout(stored.manifest, …)`.
            out: writable, `layout.nbytes` in all: one stretch, or the layout's pages.
            threads: how many work on it; None for one a processor, eight at most.

        Raises:
            Untrusted: CHUNK_MISMATCH. Unavailable: STORAGE_UNAVAILABLE. The next `ensure` heals both.
            Refused: NONFINITE if a finite value does not fit the layout's dtype.
            `out` is then garbage.
        """
        with narrowed(self._folder.root):
            return self._filler.fill(stored, layout, out, threads)

    def keep_packed(self, stored: StoredVersion, layout: Layout, filled: Filled, out: Memory) -> bool:
        """Keep the packed form in `out` for later loads. Call it once the bytes are in use: it writes all of them.

        Args:
            filled: what `fill` answered for the same three. `out` may have been overwritten since: a later `fill`
                would find that out, and pack.

        Returns:
            Whether it is kept. Not if there is one already, no key, no room, or somebody else has the version.
        """
        return self._filler.keep(stored, layout, filled, out)

    def doubt(self, key: VersionKey) -> None:
        """After CHUNK_MISMATCH, say: the next `ensure` hashes the copy, and replaces it if it does not hold.

        It is not removed here: another process may have replaced it meanwhile, or be reading it.
        """
        with narrowed(self._folder.root):
            self._folder.unmark(key.path_digest())


def _no_progress(_: int) -> None:
    """Nobody watches."""
