"""What a shell can hand over that is no text, no path and no token; and signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from adapterd.cli.credentials import write_private
from fakes.commands import Commands
from fakes.server import running_registry

SECRET = "adru_é"


@pytest.mark.parametrize("token", [SECRET, "a\nb", "a b", "\udcff"])
def test_a_token_that_cannot_be_one_is_not_sent_and_not_shown(shell: Commands, token: str) -> None:
    here = shell.with_variables(ADAPTERD_URL="http://127.0.0.1:1", ADAPTERD_TOKEN=token)
    result = here.run("list")
    assert (result.exit_code, "SETTINGS_INVALID ADAPTERD_TOKEN" in result.stderr) == (1, True)
    assert token not in result.output


def test_words_that_are_no_utf8(shell: Commands) -> None:
    here = shell.with_variables(ADAPTERD_URL="http://127.0.0.1:1", ADAPTERD_TOKEN="x")
    for words in (("tenant", "create", "\udcff"), ("key", "revoke", "acme", "\udcff"), ("tenant", "policy", "\udcff")):
        assert here.codes(*words, status=1) == ["REQUEST_INVALID"], words


@pytest.mark.parametrize("path", ["", ".", "/"])
def test_paths_that_name_nothing(shell: Commands, path: str, base_file: Path) -> None:
    assert shell.codes("keygen", path, status=5) == ["PATH_NOT_FOUND"]
    assert shell.codes("pull", "acme/finance", "--out", path, status=5) == ["PATH_NOT_FOUND"]


def test_a_file_is_refused_under_its_own_name(tmp_path: Path) -> None:
    taken, absent = tmp_path / "taken", tmp_path / "no" / "folder"
    taken.write_bytes(b"old")
    for path in (taken, absent):
        with pytest.raises(OSError) as caught:
            write_private(path, b"new")
        assert caught.value.filename == str(path)
    assert [p.name for p in tmp_path.iterdir()] == ["taken"]
    assert taken.read_bytes() == b"old"


def test_what_a_kill_left_is_no_obstacle(tmp_path: Path) -> None:
    """In a container a command has the same process id every time."""
    (tmp_path / f".key.{os.getpid()}.part").write_bytes(b"half")
    write_private(tmp_path / "key", b"whole")
    assert (tmp_path / "key").read_bytes() == b"whole"


def test_sigterm_ends_a_server(tmp_path: Path) -> None:
    """It leaves as after Ctrl-C: blocks are left, and nothing is told as a traceback."""
    with running_registry(tmp_path / "registry") as registry:
        environment = {**os.environ, "ADAPTERD_DATA_DIR": str(registry.settings.data_dir)}
        words = [sys.executable, "-m", "adapterd.cli", "serve", "--port", "0"]
        with subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            assert process.stderr.readline().startswith("adapterd registry on http://127.0.0.1:")
            process.send_signal(signal.SIGTERM)
            rest = process.stderr.read()
    assert (process.returncode, "Traceback" in rest) == (128 + signal.SIGTERM, False)
