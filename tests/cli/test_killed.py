"""Commands that are killed, interrupted or run out of disk: nothing half-written is taken for whole, and the same
command then does its work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.commands import INTERRUPTIBLE, Commands
from fakes.disk import file_size_limit
from fakes.packages import write_package
from fakes.shell_world import PINNED, ShellWorld, shell_world

STRUCK = """
import os, sys
from adapterd.cli.main import main

def struck(call, number, wanted, after):
    def once(*arguments, **options):
        hit = any(str(a).endswith(wanted) for a in arguments)
        if hit and not after:
            os.kill(os.getpid(), number)
        done = call(*arguments, **options)
        if hit and after:
            os.kill(os.getpid(), number)
        return done
    return once

name, number, wanted, after, *sys.argv[1:] = sys.argv[1:]
setattr(os, name, struck(getattr(os, name), int(number), wanted, after == "after"))
main()
"""
"""adapterctl in a process that gets a signal just before or after a call of `os` that names a file."""


def struck(shell: Commands, call: str, number: int, file: str, when: str, *words: object) -> int:
    """The status of a command to which that happened."""
    environment = {**os.environ, **{k: v for k, v in shell.environment.items() if v is not None}}
    line = [*INTERRUPTIBLE, sys.executable, "-c", STRUCK, call, number, file, when, *words]
    return subprocess.run([str(w) for w in line], env=environment, capture_output=True, check=False).returncode


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_what_a_killed_sign_left_is_not_signed(shell: Commands, package: Path, base_file: Path, key: Path) -> None:
    files = names(package)
    status = struck(shell, "replace", signal.SIGKILL, "model.sig", "before", "sign", package, "--key", key)
    assert (status, len(names(package))) == (-signal.SIGKILL, len(files) + 1)
    shell.json("sign", package, "--key", key)
    assert names(package) == sorted([*files, "model.sig"])
    verdict = shell.json("verify", package, "--base", base_file, "--key", f"{key}.pub")
    assert (verdict["signature"]["status"], verdict["problems"]) == ("valid", [])


def test_a_key_pair_is_whole_or_not_there(shell: Commands, tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    folder.mkdir()
    with file_size_limit(200):  # the public key fits, the private one does not
        assert shell.codes("keygen", folder / "a", status=8) == ["STORAGE_FULL"]
    assert names(folder) == []
    for number, status in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        assert struck(shell, "link", number, "a.pub", "after", "keygen", folder / "a") == status
        assert names(folder) == []
    shell.json("keygen", folder / "a")
    assert names(folder) == ["a", "a.pub"]


def test_a_key_that_came_first_is_left_alone(tmp_path: Path) -> None:
    """Between the look and the write somebody else made one."""
    made = "import os; real = os.link; os.link = lambda *a, **o: (open(a[1], 'x').close(), real(*a, **o))\n"
    words = [sys.executable, "-c", made + "from adapterd.cli.main import main; main()", "keygen", str(tmp_path / "k")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, "ALREADY_EXISTS" in done.stderr) == (7, True)
    assert names(tmp_path) == ["k.pub"]


def test_a_conversion_names_the_folder_for_which_there_is_no_room(
    shell: Commands, package: Path, base_file: Path, tmp_path: Path
) -> None:
    (package / "README.md").write_bytes(bytes(50_000))
    before = names(tmp_path)
    with file_size_limit(20_000):
        body = shell.json("convert", package, "--base", base_file, "--out", tmp_path / "out", status=8)
    assert [(p["code"], p["where"]) for p in body["problems"]] == [("STORAGE_FULL", str(tmp_path / "out"))]
    assert names(tmp_path) == before


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_a_conversion_that_is_ended_is_done_by_the_same_command(
    shell: Commands, package: Path, base_file: Path, tmp_path: Path, number: int, status: int
) -> None:
    before, out = names(tmp_path), tmp_path / "out"
    words = ("convert", package, "--base", base_file, "--out", out)
    assert struck(shell, "rename", number, "/out", "before", *words) == status
    assert not out.exists()
    assert (names(tmp_path) == before) is (number != signal.SIGKILL)
    shell.json(*words)
    assert names(tmp_path) == sorted([*before, "out"]), "what the killed one left is gone"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShellWorld]:
    with shell_world(tmp_path_factory.mktemp("world")) as made:
        folder = tmp_path_factory.mktemp("published") / "package"
        write_package(folder)
        words = ("upload", folder, "acme/a", "--base", PINNED, "--sign", made.key, "--alias", "default")
        made.acme.json(*words)
        yield made


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
@pytest.mark.parametrize(
    ("call", "file", "when"), [("link", "out.admission.dsse.json", "after"), ("rename", "/out", "before")]
)
def test_a_pull_that_is_ended_is_done_by_the_same_command(
    world: ShellWorld, tmp_path: Path, call: str, file: str, when: str, number: int, status: int
) -> None:
    """Also between its two parts: the statement is there, and the folder is not."""
    out = tmp_path / "out"
    assert struck(world.acme, call, number, file, when, "pull", "acme/a", "--out", out) == status
    assert not out.exists()
    assert (names(tmp_path) == []) is (number != signal.SIGKILL)
    world.acme.json("pull", "acme/a", "--out", out)
    assert names(tmp_path) == ["out", "out.admission.dsse.json"]


def test_a_pull_that_ends_when_all_is_in_its_place_stays(world: ShellWorld, tmp_path: Path) -> None:
    words = ("pull", "acme/a", "--out", tmp_path / "out")
    assert struck(world.acme, "rename", signal.SIGINT, "/out", "after", *words) == 130
    assert names(tmp_path) == ["out", "out.admission.dsse.json"]


def test_a_statement_of_something_else_is_left_alone(world: ShellWorld, tmp_path: Path) -> None:
    proof = tmp_path / "out.admission.dsse.json"
    proof.write_bytes(b"another version's")
    assert world.acme.codes("pull", "acme/a", "--out", tmp_path / "out", status=7) == ["ALREADY_EXISTS"]
    assert (names(tmp_path), proof.read_bytes()) == ([proof.name], b"another version's")
