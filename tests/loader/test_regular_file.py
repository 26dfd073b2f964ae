"""Opening what somebody names: files, and nothing that would be waited for."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from adapterd.loader.regular_file import NotRegular, open_regular


def bound(path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(path))
    finally:
        listener.close()


@pytest.mark.parametrize("make", [os.mkfifo, bound, lambda path: path.symlink_to("/dev/zero")])
def test_pipes_sockets_and_devices_are_refused_at_once(tmp_path: Path, make: Callable[[Path], object]) -> None:
    path = tmp_path / "other"
    make(path)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(NotRegular) as refused:
        open_regular(path)
    assert (refused.value.filename, refused.value.strerror) == (str(path), "not a regular file")
    assert len(os.listdir("/proc/self/fd")) == before


def test_folders_and_what_is_missing_are_called_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError) as folder:
        open_regular(tmp_path)
    assert folder.value.errno == errno.EISDIR
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "none")


def test_a_file_is_read_through_a_link_unless_that_is_not_wanted(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"text")
    (tmp_path / "link").symlink_to("file")
    with open_regular(tmp_path / "link") as file:
        assert file.read() == b"text"
    with pytest.raises(OSError) as refused:
        open_regular(tmp_path / "link", os.O_NOFOLLOW)
    assert refused.value.errno == errno.ELOOP
