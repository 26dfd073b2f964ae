"""A pipe where a file is wanted: refused with the code of what it was to be, and never waited for."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from adapterd.cli.uploader import Memory
from adapterd.loader.trust.policy import TrustStore
from fakes.commands import Commands

SECONDS = 20.0
"""After which a command that waits gets an end of file, so that the test fails and does not hang."""


@contextmanager
def pipe(path: Path) -> Iterator[Path]:
    os.mkfifo(path)
    over = threading.Event()

    def end_the_wait() -> None:
        while not over.wait(SECONDS):
            os.close(os.open(path, os.O_RDWR))

    watch = threading.Thread(target=end_the_wait)
    watch.start()
    try:
        yield path
    finally:
        over.set()
        watch.join()


CASES: list[tuple[str, str, int]] = [
    ("verify PACKAGE --base BASE --limits PIPE", "SETTINGS_INVALID", 1),
    ("verify PACKAGE --base BASE --key PIPE", "SETTINGS_INVALID", 1),
    ("verify PACKAGE --base PIPE", "BASE_TABLE_INVALID", 1),
    ("verify PIPE --base BASE", "ARCHIVE_SPECIAL_FILE", 6),
    ("inspect PIPE --base BASE", "ARCHIVE_SPECIAL_FILE", 6),
    ("sign PACKAGE --key PIPE", "SETTINGS_INVALID", 1),
    ("convert PACKAGE --base BASE --out OUT --limits PIPE", "SETTINGS_INVALID", 1),
    ("diff PACKAGE PIPE --base BASE", "ARCHIVE_SPECIAL_FILE", 6),
    ("diff PACKAGE PACKAGE --base BASE --limits PIPE", "SETTINGS_INVALID", 1),
    ("fit PACKAGE --base PIPE --budget 1GiB", "BASE_TABLE_INVALID", 1),
    ("fit PACKAGE --base BASE --budget 1GiB --limits PIPE", "SETTINGS_INVALID", 1),
    ("upload PACKAGE acme/a --base BASE --sign PIPE", "SETTINGS_INVALID", 1),
    ("base add PIPE", "BASE_TABLE_INVALID", 1),
    ("base add BASE --alternative old=PIPE", "BASE_TABLE_INVALID", 1),
    ("key add acme PIPE", "SETTINGS_INVALID", 1),
    ("tenant policy acme --limits PIPE", "SETTINGS_INVALID", 1),
    ("trust add-key PIPE --tenant acme", "SETTINGS_INVALID", 1),
]


@pytest.mark.parametrize(("words", "code", "status"), CASES, ids=[words for words, _, _ in CASES])
def test_in_an_argument(
    shell: Commands, package: Path, base_file: Path, tmp_path: Path, words: str, code: str, status: int
) -> None:
    trust = shell.home / "config/adapterd/trust.json"
    trust.parent.mkdir(parents=True)
    TrustStore().save(trust)
    here = shell.with_variables(ADAPTERD_URL="http://127.0.0.1:1", ADAPTERD_TOKEN="x")
    with pipe(tmp_path / "pipe") as path:
        named = {"PACKAGE": package, "BASE": base_file, "OUT": tmp_path / "out", "PIPE": path}
        given = [str(named.get(word, word)).replace("=PIPE", f"={path}") for word in words.split()]
        assert here.codes(*given, status=status) == [code]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("where", "words", "code", "status"),
    [
        ("config/adapterd/token", "list", "SETTINGS_INVALID", 1),
        ("config/adapterd/trust.json", "trust show", "TRUST_FILE_INVALID", 3),
    ],
)
def test_in_the_configuration(shell: Commands, where: str, words: str, code: str, status: int) -> None:
    place = shell.home / where
    place.parent.mkdir(parents=True)
    with pipe(place):
        here = shell.with_variables(ADAPTERD_URL="http://127.0.0.1:1")
        assert here.codes(*words.split(), status=status) == [code]


@pytest.mark.parametrize("name", ["token.secret", "admission.key"])
def test_in_the_servers_folder(shell: Commands, tmp_path: Path, name: str) -> None:
    here = shell.with_variables(ADAPTERD_DATA_DIR=str(tmp_path / "data"))
    assert here.run("db", "init").exit_code == 0
    (tmp_path / "data" / name).unlink()
    with pipe(tmp_path / "data" / name):
        assert here.codes("db", "check", status=1) == ["SETTINGS_INVALID"]


def test_in_the_place_of_an_uploads_memory_it_was_never_ours(tmp_path: Path) -> None:
    with pipe(tmp_path / "memory") as path:
        memory = Memory(path)
        assert memory.load() is None
        key = memory.begin()
    assert memory.load() == key


def test_a_device_is_no_file_either(shell: Commands, package: Path, base_file: Path) -> None:
    for device in ("/dev/zero", "/dev/null"):
        assert shell.codes("verify", package, "--base", base_file, "--limits", device, status=1) == ["SETTINGS_INVALID"]
