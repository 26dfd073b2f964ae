"""Disks that are full, and who looks at them."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """The kernel refuses to let a file grow over `size` bytes: what a full disk looks like to us."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


_watched: dict[str, list[str]] = {}


def _heard(event: str, arguments: tuple[object, ...]) -> None:
    if event in ("os.scandir", "os.listdir") and _watched and str(arguments[0]) in _watched:
        _watched[str(arguments[0])].append(event)


@contextmanager
def scans_of(folder: Path) -> Iterator[list[str]]:
    """A list that grows by one with each look at the names in `folder`."""
    if not _hooked:
        sys.addaudithook(_heard)  # stays for good: Python has no way to take it back
        _hooked.append(True)
    _watched[str(folder)] = seen = []
    try:
        yield seen
    finally:
        del _watched[str(folder)]


_hooked: list[bool] = []
