"""Files that appear whole: what a killed process left is swept, and what another one is writing is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from adapterd.loader.parts import SUFFIX, part, sweep_beside, sweep_parts, write_whole

KILLED = """
import os, signal, sys
from pathlib import Path
from adapterd.loader import parts

os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
parts.write_whole(Path(sys.argv[1]), b"half")
"""


def killed_while_writing(path: Path) -> Path:
    """A process dies; what it leaves."""
    done = subprocess.run([sys.executable, "-c", KILLED, path], check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = path.parent.glob(f"*{SUFFIX}")
    assert left.read_bytes() == b"half"
    return left


def test_what_a_kill_left_goes_with_the_next_write(tmp_path: Path) -> None:
    killed_while_writing(tmp_path / "key")
    write_whole(tmp_path / "key", b"whole")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("key", b"whole")]


def test_it_goes_also_without_a_write(tmp_path: Path) -> None:
    left = killed_while_writing(tmp_path / "key")
    sweep_beside(tmp_path / "other")
    assert left.exists(), "that is not what was begun at `other`"
    sweep_beside(tmp_path / "key")
    assert not left.exists()


def test_what_another_writes_right_now_stays(tmp_path: Path) -> None:
    with part(tmp_path) as (place, descriptor):
        sweep_parts(tmp_path)
        assert place.exists()
        os.write(descriptor, b"data")
        place.replace(tmp_path / "name")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("name", b"data")]


def test_only_parts_are_swept(tmp_path: Path) -> None:
    for name in ("a", ".a.notes", "b.part.txt"):
        (tmp_path / name).touch()
    (tmp_path / "folder.part").mkdir()
    (tmp_path / "link.part").symlink_to(tmp_path / "a")
    before = sorted(p.name for p in tmp_path.iterdir())
    sweep_parts(tmp_path)
    sweep_parts(tmp_path / "none")
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_a_file_is_never_replaced_unasked_and_its_mode_is_there_from_the_start(tmp_path: Path) -> None:
    write_whole(tmp_path / "a", b"one", mode=0o600)
    with pytest.raises(FileExistsError) as caught:
        write_whole(tmp_path / "a", b"two")
    assert caught.value.filename == str(tmp_path / "a")
    write_whole(tmp_path / "a", b"three", replace=True, mode=0o644)
    assert ((tmp_path / "a").read_bytes(), (tmp_path / "a").stat().st_mode & 0o777) == (b"three", 0o644)


def test_many_who_write_one_file_at_once_sweep_nothing_of_each_other(tmp_path: Path) -> None:
    def work(number: int) -> None:
        for _ in range(60):
            write_whole(tmp_path / "a", b"%d" % number, replace=True)

    with ThreadPoolExecutor(6) as pool:
        for done in [pool.submit(work, number) for number in range(6)]:
            done.result()
    assert names_in(tmp_path) == ["a"]


def names_in(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())
