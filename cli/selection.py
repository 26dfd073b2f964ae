"""A folder as people have it: which of its files are the adapter, and sending just those."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from adapterd.cli.output import note, plain
from adapterd.loader.checks.findings import several
from adapterd.loader.errors import AdapterdError
from adapterd.loader.formats.archives import open_package
from adapterd.loader.formats.files import DirectoryPackage, FileReader, Package, names_in
from adapterd.loader.formats.package import STORED_FILES, Contents, judge_package, separable
from adapterd.loader.limits import Limits

SHOWN = 6


class Selected:
    """The files of a package that an adapter may have; the others are not opened."""

    def __init__(self, package: Package) -> None:
        self._package = package
        self._names = tuple(name for name in package.names() if name in STORED_FILES)

    def names(self) -> tuple[str, ...]:
        return self._names

    def sizes(self) -> dict[str, int]:
        sizes = self._package.sizes()
        return {name: sizes[name] for name in self._names}

    def open(self, name: str) -> FileReader:
        """Raises KeyError for a name that was not selected."""
        if name not in self._names:
            raise KeyError(name)
        return self._package.open(name)


@contextmanager
def opened(path: Path, limits: Limits, *, only_package: bool) -> Iterator[Package]:
    """`path` as `open_package` opens it, or of that the adapter's own files.

    Of a folder nothing else is even looked at: links, sub-folders and any number of other files do not matter.
    """
    if only_package and path.is_dir():
        with DirectoryPackage.open_dir(path, limits, STORED_FILES) as package:
            yield package
        return
    with open_package(path, limits) as everything:
        yield Selected(everything) if only_package else everything


def beside(path: Path, limits: Limits) -> tuple[str, ...]:
    """What `only_package` leaves out: the names at the top of a folder, or of an archive's entries."""
    if path.is_dir():
        names, more = names_in(path, limits)
        return (*(n for n in names if n not in STORED_FILES), *(["and more"] if more else []))
    with open_package(path, limits) as everything:
        return tuple(n for n in everything.names() if n not in STORED_FILES)


def offered(path: Path, limits: Limits) -> bool:
    """Ask whether to send just the package of a folder, where one is beside what is refused, and a person to ask.

    Without a terminal nothing is asked: the refusals name `--only-package`. Nor of an archive, which would have to
    be unpacked once more for it.
    """
    if not path.is_dir():
        return False
    try:
        with open_package(path, limits) as package:
            contents = judge_package(package.sizes(), limits)
    except AdapterdError:
        return False  # whoever opens it next says why
    if not separable(contents, limits):
        return False
    for name, value in sorting(contents):
        note(f"{name}: {plain(value)}")
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    import typer

    return typer.confirm("Send just the adapter's own files, and leave the others here?", err=True)


def sorting(contents: Contents) -> list[tuple[str, str]]:
    """Which files are the adapter, which are refused and which do not matter, as names and values."""
    rows = [("the adapter", ", ".join(contents.stored))]
    rows += [("refused", several(contents.refused, SHOWN))]
    rows += [("left out", several(contents.left_out, SHOWN))] if contents.left_out else []
    return rows
