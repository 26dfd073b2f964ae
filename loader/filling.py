"""From the store to memory: the packed form if one is kept and holds, else the verified files, packed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from adapterd.loader.errors import AdapterdError, Code, NotFound, Unavailable, Untrusted, error
from adapterd.loader.formats.files import DirectoryPackage
from adapterd.loader.identity import WEIGHTS_FILE, VersionKey
from adapterd.loader.image import Memory, PackedImage
from adapterd.loader.layout import Layout
from adapterd.loader.limits import Limits
from adapterd.loader.pack import pack
from adapterd.loader.packed import PackedForm
from adapterd.loader.parallel import Helpers, default_threads
from adapterd.loader.seal import Seal
from adapterd.loader.store_folder import Entry, StoreFolder
from adapterd.loader.store_key import StoreKey
from adapterd.loader.store_room import Room
from adapterd.loader.stored import StoredVersion


@dataclass(frozen=True, slots=True)
class Filled:
    """What `VerifiedStore.fill` did.

    Attributes:
        origin: where the bytes were when the version was asked for.
        seal: of the packed form, made as it was packed, for `keep_packed`; None where nothing is to be kept.
    """

    origin: Literal["downloaded", "disk", "packed"]
    seal: Seal | None = None


class Filler:
    """The half of the store that reads tensors."""

    def __init__(
        self,
        folder: StoreFolder,
        room: Room,
        limits: Limits,
        key: StoreKey | None,
        doubt: Callable[[VersionKey], None],
        helpers: Helpers | None,
    ) -> None:
        self._folder, self._room, self._limits, self._key, self._doubt = folder, room, limits, key, doubt
        self._helpers = helpers

    def fill(self, stored: StoredVersion, layout: Layout, out: Memory, threads: int | None) -> Filled:
        """`VerifiedStore.fill`."""
        image, threads = PackedImage(layout, out), threads or default_threads()
        form = self._form(stored, layout)
        if form is not None and form.read(image, threads, self._helpers):
            return Filled("packed")
        self._pack(stored, layout, out, threads)
        return Filled(stored.source, None if form is None else form.sealed(image, threads, self._helpers))

    def keep(self, stored: StoredVersion, layout: Layout, filled: Filled, out: Memory) -> bool:
        """`VerifiedStore.keep_packed`."""
        form, name = self._form(stored, layout), stored.key.path_digest()
        if form is None or filled.seal is None:
            return False
        entry, kept = self._folder.entry(name), False
        # Neither a full disk nor a store without room is a failure of the load: it has its bytes.
        with suppress(OSError, Unavailable), self._folder.held(name) as mine:
            if mine and entry.mark_path.exists():
                kept = self._write(form, entry, PackedImage(layout, out), filled.seal)
        return kept

    def _write(self, form: PackedForm, entry: Entry, image: PackedImage, seal: Seal) -> bool:
        try:
            self._room.reserve(entry, image.nbytes, _go_on)
            form.write(image, seal)
        finally:
            self._room.record(entry)
        return True

    def _form(self, stored: StoredVersion, layout: Layout) -> PackedForm | None:
        if self._key is None:
            return None
        entry = self._folder.entry(stored.key.path_digest())
        return PackedForm(entry, stored.key, stored.statement.manifest_digest, layout, self._key)

    def _pack(self, stored: StoredVersion, layout: Layout, out: Memory, threads: int) -> None:
        chunks = stored.statement.chunks
        try:
            with DirectoryPackage.open_dir(stored.directory, self._limits) as package:
                weights = package.open(WEIGHTS_FILE)
                pack(stored.manifest, layout, weights, chunks, out, threads=threads, helpers=self._helpers)
        except Untrusted:
            self._doubt(stored.key)
            raise
        except (KeyError, NotFound, OSError) as cause:
            self._doubt(stored.key)
            raise _unreadable(stored, cause) from cause


def _unreadable(stored: StoredVersion, cause: Exception) -> AdapterdError:
    return error(
        Code.STORAGE_UNAVAILABLE, str(stored.directory), f"the stored copy cannot be read: {cause}",
        "Another process may have replaced or removed it; ask for the adapter again.",
    )  # fmt: skip


def _go_on() -> None:
    """Nobody gives up."""
