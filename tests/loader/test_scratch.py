"""Temporary folders go with their process, however it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from adapterd.loader.scratch import scratch_folder, shared_folder
from fakes.commands import INTERRUPTIBLE

HOLDER = """
import sys
from pathlib import Path
from adapterd.loader.scratch import scratch_folder
with scratch_folder("store", Path(sys.argv[1])) as folder:
    (folder / "large").write_bytes(bytes(1000))
    print(folder, flush=True)
    sys.stdin.read()
"""


def killed(root: Path) -> tuple[Path, subprocess.Popen[str]]:
    """A folder, and the process that has it."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return Path(process.stdout.readline().strip()), process


def test_a_killed_process_left_its_temporary_folder_for_ever(tmp_path: Path) -> None:
    folder, process = killed(tmp_path)
    with scratch_folder("store", tmp_path) as mine:
        assert folder.is_dir()  # it is alive
        assert mine.stat().st_mode & 0o777 == 0o700
        process.kill()
        process.communicate()
        with scratch_folder("loader", tmp_path):
            assert folder.is_dir()  # of another kind
        with scratch_folder("store", tmp_path) as other:
            assert sorted(tmp_path.iterdir()) == sorted([mine, other])
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_ours_or_is_shared_stays(tmp_path: Path) -> None:
    (tmp_path / "adapterd-store-theirs").mkdir()
    (tmp_path / "adapterd-store-theirs" / "notes").touch()
    (tmp_path / "adapterd-store-file").write_bytes(b"")
    (tmp_path / "adapterd-store-link").symlink_to(tmp_path)
    folder, process = killed(tmp_path)
    with shared_folder(folder):
        process.kill()
        process.communicate()
        with scratch_folder("store", tmp_path):
            assert folder.is_dir()
    with scratch_folder("store", tmp_path):
        assert not folder.exists()
    assert {path.name.rpartition("-")[2] for path in tmp_path.iterdir()} == {"theirs", "file", "link"}


INTERRUPTED = """
import os, signal, sys
from pathlib import Path
from adapterd.loader.scratch import scratch_folder

real = os.mkdir
def struck(*arguments):
    real(*arguments)
    os.kill(os.getpid(), int(sys.argv[2]))
os.mkdir = struck
with scratch_folder("store", Path(sys.argv[1])):
    raise SystemExit("it was not interrupted")
"""


def test_an_end_at_the_very_beginning_leaves_nothing(tmp_path: Path) -> None:
    """The folder is there, and the file that says whose it is, is not."""
    for number in (signal.SIGINT, signal.SIGKILL):
        words = [*INTERRUPTIBLE, sys.executable, "-c", INTERRUPTED, str(tmp_path), str(int(number))]
        assert subprocess.run(words, capture_output=True, check=False).returncode == -number
        assert len(list(tmp_path.iterdir())) == (number == signal.SIGKILL)
    with scratch_folder("store", tmp_path) as mine:
        assert list(tmp_path.iterdir()) == [mine]


def test_where_there_is_no_folder_it_is_said(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(FileNotFoundError), scratch_folder("store", missing):
        """Nothing is made."""
    assert list(tmp_path.iterdir()) == []


def test_sharing_what_is_gone_is_nothing(tmp_path: Path) -> None:
    with shared_folder(tmp_path / "gone"):
        pass
