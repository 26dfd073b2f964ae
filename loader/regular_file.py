"""Opening what somebody names by its path: regular files only. Pipes would be waited for, devices read for ever."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


class NotRegular(OSError):
    """A pipe, a device or a socket is there."""

    def __init__(self, path: Path) -> None:
        super().__init__(errno.EINVAL, "not a regular file", str(path))


class TooLarge(OSError):
    """The file holds more than can be meant."""

    def __init__(self, path: Path, most: int) -> None:
        super().__init__(errno.EFBIG, f"holds more than {most} bytes", str(path))


def read_regular(path: Path, most: int) -> bytes:
    """All of a file of at most `most` bytes; never a part of it. Raises TooLarge, and as `open_regular`."""
    with open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise TooLarge(path, most)
    return data


def open_regular(path: Path, flags: int = 0) -> BinaryIO:
    """The file, to be read. Never waits for somebody to write.

    Args:
        flags: more of them, as `os.O_NOFOLLOW`; else it may be reached through links.

    Raises:
        NotRegular: it is no file of that kind.
        OSError: it cannot be opened; IsADirectoryError for a folder.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | flags)
    except OSError as fault:
        if fault.errno == errno.ENXIO:  # a socket
            raise NotRegular(path) from fault
        raise
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise NotRegular(path)
