"""What the entries of an archive may be: names that mean one file everywhere, plain files and folders, under quotas."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from adapterd.loader.errors import Code, Problem, Refused, reject
from adapterd.loader.formats.names import canonical, folded, leaves, name_problem
from adapterd.loader.formats.package import MAC_FOLDER
from adapterd.loader.formats.readers import FileReader
from adapterd.loader.formats.text import shown
from adapterd.loader.limits import Limits

STORED, DEFLATED = 0, 8
RATIO_FREE_BYTES = 16 << 20
"""Below this, an archive may grow by any factor: a long README of one letter is no attack."""

PACK_AGAIN = "Pack the folder again, with plain zip or tar."
_ONLY_FILES = "Pack the files themselves: an adapter needs two."


@dataclass(frozen=True, slots=True)
class Place:
    """Where an entry's bytes lie in the archive, and what they must become.

    Attributes:
        offset, packed: the bytes in the archive.
        size: unpacked.
        method: STORED or DEFLATED.
        crc32: of the unpacked bytes; None where the format has none.
    """

    offset: int
    packed: int
    size: int
    method: int = STORED
    crc32: int | None = None


def corrupt(message: str, where: str = "archive") -> Problem:
    return reject(Code.ARCHIVE_CORRUPT, shown(where), message, PACK_AGAIN)


def unsupported(message: str, where: str = "archive") -> Problem:
    return reject(Code.ARCHIVE_UNSUPPORTED, shown(where), message, PACK_AGAIN)


def fail(problem: Problem) -> NoReturn:
    raise Refused(problem)


def as_text(raw: bytes) -> str:
    """An entry's name for people."""
    return shown(raw.decode("utf-8", "surrogateescape"))


def take(source: FileReader, offset: int, length: int) -> bytes:
    """Bytes that the archive says are there. Raises Refused (ARCHIVE_CORRUPT)."""
    if offset < 0 or offset + length > source.size:
        raise Refused(corrupt("is cut off, or points past its own end"))
    return source.read_at(offset, length)


def check_growth(unpacked: int, packed: int, limits: Limits) -> None:
    """Raises Refused (ARCHIVE_BOMB) once `unpacked` bytes are more than a quota."""
    if unpacked > limits.max_unpacked_bytes:
        message = f"unpacks to {unpacked} bytes or more, at most {limits.max_unpacked_bytes}"
        raise Refused(reject(Code.ARCHIVE_BOMB, "archive", message, _ONLY_FILES))
    if unpacked > max(RATIO_FREE_BYTES, packed * limits.max_unpack_ratio):
        message = f"unpacks to more than {limits.max_unpack_ratio} times its size"
        raise Refused(reject(Code.ARCHIVE_BOMB, "archive", message, _ONLY_FILES))


def check_count(count: int, limits: Limits) -> None:
    """Raises Refused (ARCHIVE_TOO_MANY_ENTRIES)."""
    if count > limits.max_archive_entries:
        message = f"{count} entries or more, at most {limits.max_archive_entries}"
        raise Refused(reject(Code.ARCHIVE_TOO_MANY_ENTRIES, "archive", message, _ONLY_FILES))


class Listing:
    """The entries of one archive, in its order; each is judged when it is met."""

    def __init__(self, limits: Limits, packed_bytes: int) -> None:
        self._limits = limits
        self._packed_bytes = packed_bytes
        self._files: dict[str, Place] = {}
        self._folders: list[str] = []
        self._seen_files: set[str] = set()
        self._seen_folders: set[str] = set()
        self._parents: set[str] = set()
        self._count = self._unpacked = 0
        self.problems: list[Problem] = []

    def count(self) -> None:
        """One more entry of any kind. Raises Refused (ARCHIVE_TOO_MANY_ENTRIES)."""
        self._count += 1
        check_count(self._count, self._limits)

    def refuse(self, problem: Problem) -> None:
        self.problems.append(problem)

    def fail(self, problem: Problem) -> NoReturn:
        """What makes the rest unreadable ends it, after what was found before."""
        raise Refused(*self.problems, problem)

    def link(self, raw: bytes) -> None:
        message = "is a link; links are not followed, not even inside the archive"
        self.refuse(reject(Code.UNSAFE_LINK, as_text(raw), message, "Pack the file itself (tar -h, zip without -y)."))

    def special(self, raw: bytes, what: str) -> None:
        self.refuse(reject(Code.ARCHIVE_SPECIAL_FILE, as_text(raw), what, _ONLY_FILES))

    def file(self, raw: bytes, place: Place) -> None:
        """Raises Refused (ARCHIVE_BOMB) once the sizes add up to too much."""
        self._unpacked += place.size
        check_growth(self._unpacked, self._packed_bytes, self._limits)
        name = self._named(raw)
        if not name:
            return
        key = folded(name)
        if key in self._seen_files or key in self._seen_folders or self._enters(name):
            self.refuse(_twice(name))
            return
        self._seen_files.add(key)
        self._files[name] = place

    def folder(self, raw: bytes) -> None:
        name = self._named(raw, folder=True)
        if not name:
            return
        if folded(name) in self._seen_files or self._enters(name):
            self.refuse(_twice(name))
            return
        self._seen_folders.add(folded(name))
        self._folders.append(name)

    def finish(self) -> dict[str, Place | None]:
        """Name → place, a folder's name with a final slash and None. Raises Refused with all that was found."""
        if self.problems:
            raise Refused(*self.problems)
        found: dict[str, Place | None] = {_outside_hidden(name): place for name, place in self._files.items()}
        found = {name: None if name.endswith("/") else place for name, place in found.items()}
        empty = (name for name in self._folders if folded(name) not in self._parents)
        found |= {_outside_hidden(f"{name}/"): None for name in empty}
        return _without_top(found)

    def _named(self, raw: bytes, *, folder: bool = False) -> str:
        """The canonical name; "" for one that is refused, and for the package's own folder."""
        try:
            name = raw.decode("utf-8")
        except UnicodeDecodeError:
            self.refuse(reject(Code.ARCHIVE_BAD_NAME, as_text(raw), "the entry's name is not UTF-8", PACK_AGAIN))
            return ""
        plain = name if leaves(name) else canonical(name)
        if not plain and folder:
            return ""
        problem = name_problem(plain)
        if problem is not None:
            self.refuse(problem)
        return "" if problem else plain

    def _enters(self, name: str) -> bool:
        """Notes the folders that lead to `name`; whether one of them is a file."""
        clash = False
        for parent in _parents(folded(name)):
            clash |= parent in self._seen_files
            self._seen_folders.add(parent)
            self._parents.add(parent)
        return clash


def _twice(name: str) -> Problem:
    message = "is there twice, or has the same name as another entry on some systems"
    return reject(Code.ARCHIVE_DUPLICATE, shown(name), message, PACK_AGAIN)


def _parents(name: str) -> Iterator[str]:
    parts = name.split("/")
    return ("/".join(parts[:i]) for i in range(1, len(parts)))


def _outside_hidden(name: str) -> str:
    """As a folder on disk is listed: what lies in a hidden folder is told as that folder."""
    parts = name.split("/")
    for i, part in enumerate(parts[:-1]):
        if part.startswith(".") or part == MAC_FOLDER:
            return "/".join(parts[: i + 1]) + "/"
    return name


def _without_top(found: dict[str, Place | None]) -> dict[str, Place | None]:
    """The content of the one folder in which everything lies, as `tar czf x.tgz x/` packs it.

    Hidden files and a Mac's own folder beside it do not count. Two folders, or a file beside one, are left
    as they are, and one level only is taken off.
    """
    tops = {name.split("/")[0] for name in found}
    shown_tops = {top for top in tops if not top.startswith(".") and top != MAC_FOLDER}
    if len(shown_tops) != 1:
        return found
    top = shown_tops.pop() + "/"
    if top.removesuffix("/") in found:
        return found
    return {stripped: place for name, place in found.items() if (stripped := name.removeprefix(top))}
