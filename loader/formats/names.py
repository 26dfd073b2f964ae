"""Names of files in packages and archives: which ones are names everywhere, and mean one file everywhere."""

from __future__ import annotations

import unicodedata

from adapterd.loader.errors import Code, Problem, reject
from adapterd.loader.formats.text import shown

MAX_NAME_BYTES = 255

# Whatever suffix they have, Windows opens a device (learn.microsoft.com, "Naming Files, Paths, and Namespaces").
_DEVICES = frozenset(
    {"con", "prn", "aux", "nul", "conin$", "conout$"}
    | {f"{port}{digit}" for port in ("com", "lpt") for digit in "123456789¹²³"}
)
_HINT = "Give the file a plain name, and pack the adapter again."


def name_problem(name: str) -> Problem | None:
    """What is wrong with `name`, slashes between folders, on this system or on any other."""
    if leaves(name):
        return reject(Code.ARCHIVE_PATH, shown(name), "leads out of the package", _HINT)
    if message := _unusable(name):
        return reject(Code.ARCHIVE_BAD_NAME, shown(name), message, _HINT)
    return None


def leaves(name: str) -> bool:
    """Whether some system would look for the name outside of the package."""
    return "\\" in name or ":" in name or name.startswith("/") or ".." in name.split("/")


def _unusable(name: str) -> str:
    if any("\ud800" <= c <= "\udfff" for c in name):
        return "the file's name is not UTF-8"
    if not name.isprintable():
        return "has characters that cannot be seen"
    if len(name.encode()) > MAX_NAME_BYTES:
        return f"is longer than {MAX_NAME_BYTES} bytes"
    return next(filter(None, map(_unusable_part, name.removesuffix("/").split("/"))), "")


def _unusable_part(part: str) -> str:
    if part in ("", "."):
        return "is no file's name"
    if part[-1] in ". ":
        return "ends in a dot or a space, which some systems drop"
    if part.split(".", maxsplit=1)[0].rstrip().casefold() in _DEVICES:
        return "is the name of a device on some systems"
    return ""


def folded(name: str) -> str:
    """Equal for names that are one file on some system: case and composed letters do not count."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def canonical(name: str) -> str:
    """`name` without empty parts and `.`, as any system reads it; no final slash. `..` is not touched."""
    return "/".join(part for part in name.split("/") if part not in ("", "."))
