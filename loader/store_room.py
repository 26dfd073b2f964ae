"""A store that keeps to a size: the version that was used longest ago goes first.

Each version's folder says in one small file how many bytes it has, and with that file's time when it was last
used. A load that finds its version here sets the time and looks at nothing else; only who needs room looks
through the store, one small file a version.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from adapterd.loader.errors import Code, error
from adapterd.loader.regular_file import NotRegular, open_regular
from adapterd.loader.store_folder import INCOMING_PREFIX, Entry, StoreFolder, write_file

_ROOM = "room"
_HINT = "Give the store more room (max_bytes), or serve the adapter from a host that has it."


@dataclass(frozen=True, slots=True, order=True)
class _Use:
    """What `Room` knows of a folder: last use (ns since 1970), its name, bytes."""

    when: int
    name: str
    nbytes: int


class Room:
    """The books of a store. Methods raise OSError, see `narrowed`, and what they say.

    Args:
        max_bytes: of all versions together, packed forms included; None for no bound. Small files beside a
            version (statements, marks) count when they are written, and are not asked room for.
    """

    def __init__(self, folder: StoreFolder, max_bytes: int | None, clock: Callable[[], datetime]) -> None:
        if max_bytes is not None and max_bytes <= 0:
            raise ValueError("max_bytes must be positive")
        self._folder, self._most, self._clock = folder, max_bytes, clock

    def check(self, nbytes: int) -> None:
        """Raises Unavailable (STORAGE_FULL) if a version of `nbytes` could not be kept even alone."""
        if self._most is not None and nbytes > self._most:
            message = f"the version has {nbytes} bytes, the whole store may have {self._most}"
            raise error(Code.STORAGE_FULL, str(self._folder.root), message, _HINT)

    def used(self, entry: Entry) -> None:
        """The version is used now. Needs its lock; takes constant time."""
        try:
            self._stamp(entry)
        except FileNotFoundError:
            self.record(entry)

    def record(self, entry: Entry, coming: int = 0) -> None:
        """Count what lies in the version's folder, and `coming` bytes more. Needs its lock."""
        write_file(_use_path(entry), f"{_measured(entry) + coming}\n".encode())
        self._stamp(entry)

    def reserve(self, entry: Entry, coming: int, waiting: Callable[[], object]) -> None:
        """Make room for `coming` bytes that will be written into the version's folder, and count them already.

        What another thread or process is using or fetching stays, and is not waited for. Needs the version's lock.

        Args:
            waiting: called while another one makes room; may raise to give up.

        Raises:
            Unavailable: STORAGE_FULL if what may go is not enough.
        """
        if self._most is None:
            return
        with self._folder.locked(_ROOM, waiting):
            self._make_room(entry, coming)
            self.record(entry, coming)

    def _make_room(self, entry: Entry, coming: int) -> None:
        assert self._most is not None
        uses = sorted(self._uses())
        self.check(coming + sum(use.nbytes for use in uses if use.name == entry.path.name))  # before others go for it
        over = sum(use.nbytes for use in uses) + coming - self._most
        for use in uses:
            abandoned = use.name.startswith(INCOMING_PREFIX)  # if nobody holds its lock
            if (over > 0 or abandoned) and use.name != entry.path.name and self._folder.remove(use.name):
                over -= use.nbytes
        if over > 0:
            message = f"{coming} bytes are needed, and of {self._most} too many are in use or on their way right now"
            raise error(Code.STORAGE_FULL, str(self._folder.root), message, f"Ask again in a moment. {_HINT}")

    def _uses(self) -> Iterator[_Use]:
        for name in self._folder.names():
            with suppress(FileNotFoundError, NotADirectoryError):  # gone meanwhile; or no version
                yield _use(Entry(self._folder.root / name))

    def _stamp(self, entry: Entry) -> None:
        now = int(self._clock().timestamp() * 1_000_000) * 1000
        os.utime(_use_path(entry), ns=(now, now))


def _use_path(entry: Entry) -> Path:
    return entry.path / "use"


def _use(entry: Entry) -> _Use:
    """From its small file; measured where that is missing or unreadable (a crash, an older store)."""
    try:
        with open_regular(_use_path(entry)) as file:
            text, when = file.read(32).strip(), os.fstat(file.fileno()).st_mtime_ns
    except (FileNotFoundError, IsADirectoryError, NotRegular):
        text, when = b"", entry.path.stat().st_mtime_ns
    return _Use(when, entry.path.name, int(text) if text.isdigit() else _measured(entry))


def _measured(entry: Entry) -> int:
    total = 0
    for folder, _, names in os.walk(entry.path):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.lstat(os.path.join(folder, name)).st_size  # noqa: PTH118 - os.walk gives strings
    return total
