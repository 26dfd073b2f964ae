"""Whether a disk takes anything, and what it says when it takes no more, as one of two codes."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from adapterd.loader.codes import Code

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Of a full disk, of a quota, and of a limit on the size of files (RLIMIT_FSIZE)."""


def require_writable(folder: Path) -> None:
    """Make the folder, for nobody else, if it is not there. Raises OSError unless files can be made in it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, "not writable", str(folder))


def storage_code(fault: OSError) -> Code:
    """STORAGE_FULL, where making room helps, or STORAGE_UNAVAILABLE."""
    return Code.STORAGE_FULL if fault.errno in FULL else Code.STORAGE_UNAVAILABLE
