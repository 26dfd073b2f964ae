"""The loader's trust file, read again when it changes."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from adapterd.loader.errors import AdapterdError
from adapterd.loader.trust.policy import TrustStore

_LOG = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""How often the file is looked at, at most."""

_Seen = tuple[int, int, int] | None


class TrustWatch:
    """Keeps a trust store equal to its file.

    A file that cannot be read or does not hold changes nothing: what was trusted before goes on being trusted,
    nothing else is, and the log says so. An operator who edits the file badly must not stop a fleet; a revocation
    in such a file does not count until the file is whole.

    Args:
        path: of the trust file.
        clock: seconds.

    Raises:
        Untrusted: as `TrustStore.load`, at the start only.
    """

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self._path, self._clock = path, clock
        self._seen = _signature(path)
        self.store = TrustStore.load(path)
        self._looked = clock()

    def look(self) -> None:
        """Reads the file if it is another one than before; at most once in `LOOK_SECONDS`."""
        now = self._clock()
        if now - self._looked >= LOOK_SECONDS:
            self._looked = now
            if _signature(self._path) != self._seen:
                self.read()

    def read(self) -> None:
        """Reads the file now. `store.changes` says whether that changed anything."""
        self._seen = _signature(self._path)
        try:
            self.store.reload(self._path)
        except AdapterdError as failure:
            _LOG.error("the trust file does not hold, what was trusted before still is: %s", failure)


def _signature(path: Path) -> _Seen:
    """Another one whenever the file was written or replaced."""
    try:
        found = os.stat(path)  # noqa: PTH116
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
