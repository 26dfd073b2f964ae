"""The trust file and the token file: private, whole, and fail closed."""

from __future__ import annotations

import os
import pwd
import stat
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adapterd.cli.credentials import MAX_TOKEN_BYTES, load_token, save_token, write_private
from adapterd.loader.errors import AdapterdError, Code
from adapterd.loader.parts import alone_in
from adapterd.loader.trust.keys import PublicKey, generate_admission_key, generate_publisher_key
from adapterd.loader.trust.policy import TrustStore
from fakes.commands import Commands


@pytest.fixture
def admission_pub(tmp_path: Path) -> Path:
    path = tmp_path / "admission.pub"
    path.write_text(generate_admission_key().public.pem)
    return path


def _load(shell: Commands) -> TrustStore:
    return TrustStore.load(shell.home / "config/adapterd/trust.json")


def test_nothing_is_trusted_before_init_and_nothing_by_it(shell: Commands) -> None:
    assert shell.codes("trust", "show", status=3) == ["TRUST_NOT_CONFIGURED"]
    body = shell.json("trust", "init")
    store = _load(shell)
    assert (store.admission_keys, store.tenants, body["digest"]) == ((), (), store.digest)
    assert stat.S_IMODE(Path(body["file"]).stat().st_mode) == 0o600
    assert shell.codes("trust", "init", status=7) == ["ALREADY_EXISTS"]


def test_keys_are_added_for_what_they_are_and_revoked(shell: Commands, key: Path, admission_pub: Path) -> None:
    shell.json("trust", "init", "--admission-key", admission_pub)
    publisher = PublicKey.from_pem(Path(f"{key}.pub").read_bytes())
    assert shell.run("trust", "add-key", f"{key}.pub").exit_code == 2  # what for?
    assert shell.codes("trust", "add-key", f"{key}.pub", "--admission", status=3) == ["KEY_UNSUPPORTED"]
    assert shell.codes("trust", "add-key", admission_pub, "--tenant", "acme", status=3) == ["KEY_UNSUPPORTED"]
    assert shell.run("trust", "add-key", f"{key}.pub", "--tenant", "acme", "-q").stdout == f"{publisher.key_id}\n"
    assert [k.key for k in _load(shell).tenant("acme").publishers] == [publisher]
    assert _load(shell).tenant("acme").require_publisher
    shell.json("trust", "add-key", f"{key}.pub", "--tenant", "beta", "--allow-unsigned")
    assert not _load(shell).tenant("beta").require_publisher
    shell.json("trust", "revoke-key", publisher.key_id)
    assert [k.revoked for t in ("acme", "beta") for k in _load(shell).tenant(t).publishers] == [True, True]
    assert shell.run("trust", "show").stdout.count("revoked") == 2
    assert shell.codes("trust", "revoke-key", "0" * 64, status=5) == ["NOT_FOUND"]


def test_a_trust_file_that_others_may_write_is_refused(shell: Commands) -> None:
    path = Path(shell.json("trust", "init")["file"])
    path.chmod(0o666)
    assert shell.codes("trust", "show", status=3) == ["TRUST_FILE_INVALID"]


def test_the_environment_names_another_file(shell: Commands, tmp_path: Path) -> None:
    elsewhere = shell.with_variables(ADAPTERD_TRUST=str(tmp_path / "deep/er/t.json"))
    assert elsewhere.json("trust", "init")["file"] == str(tmp_path / "deep/er/t.json")
    assert shell.codes("trust", "show", status=3) == ["TRUST_NOT_CONFIGURED"]


def test_a_change_waits_for_another_one_to_be_written(shell: Commands, tmp_path: Path) -> None:
    """Of two that read, change and write, none must take back what the other did: a revocation, say."""
    shell.json("trust", "init")
    keys = [tmp_path / "one.pub", tmp_path / "two.pub"]
    for path in keys:
        path.write_text(generate_publisher_key().public.pem)
    environment = {**os.environ, **{k: v for k, v in shell.environment.items() if v is not None}}
    words = [sys.executable, "-m", "adapterd.cli", "trust", "add-key", str(keys[0]), "--tenant", "one"]
    with alone_in(shell.home / "config/adapterd"):
        mine = _load(shell)
        other = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL)
        _until_waiting(other)
        mine.add_publisher_key("two", PublicKey.from_pem(keys[1].read_text()))
        mine.save(shell.home / "config/adapterd/trust.json")
    assert other.wait(60) == 0
    assert _load(shell).tenants == ("one", "two")


def _until_waiting(process: subprocess.Popen[bytes]) -> None:
    """For a lock, or until it has ended without one."""
    pause = threading.Event()
    for _ in range(6000):
        if process.poll() is not None or f" {process.pid} " in Path("/proc/locks").read_text():
            return
        pause.wait(0.01)
    raise AssertionError("it neither waits nor ends")


def test_a_user_without_a_home_is_told_what_to_set(shell: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container that runs under a user it does not know."""

    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    unset: dict[str, Any] = dict.fromkeys(("HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"))
    homeless = replace(shell, variables=unset)
    for words in (("trust", "show"), ("trust", "init")):
        (problem,) = homeless.json(*words, status=1)["problems"]
        assert (problem["code"], problem["where"]) == ("SETTINGS_INVALID", "HOME")
    assert homeless.run("token", "save", stdin="adru_x\n").exit_code == 1


def test_a_token_is_stored_from_stdin_and_never_repeated(shell: Commands) -> None:
    result = shell.run("token", "save", stdin="adru_secret\n")
    path = shell.home / "config/adapterd/token"
    assert (result.exit_code, path.read_text()) == (0, "adru_secret\n")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "adru_secret" not in result.output
    assert shell.run("token", "save", stdin="").exit_code == 1
    result = shell.run("token", "save", stdin="two words\n")
    assert (result.exit_code, "two words" in result.output) == (1, False)
    assert path.read_text() == "adru_secret\n"


def test_the_environment_wins_over_the_file_which_must_be_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("ADAPTERD_TOKEN", raising=False)
    assert load_token() is None
    path = save_token("of-the-file")
    assert load_token() == "of-the-file"
    monkeypatch.setenv("ADAPTERD_TOKEN", "of-the-environment")
    assert load_token() == "of-the-environment"
    monkeypatch.delenv("ADAPTERD_TOKEN")
    path.chmod(0o640)
    with pytest.raises(AdapterdError) as caught:
        load_token()
    assert caught.value.code is Code.SETTINGS_INVALID
    assert "chmod 600" in caught.value.problem.hint


def test_more_than_a_token_is_refused_and_not_cut(
    shell: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest, longer = "x" * (MAX_TOKEN_BYTES - 1), "x" * MAX_TOKEN_BYTES + "y"
    saved = shell.run("token", "save", stdin=f"{longest}\n")
    assert saved.exit_code == 0
    refused = shell.run("token", "save", stdin=f"{longer}\n")
    assert (refused.exit_code, f"more than {MAX_TOKEN_BYTES} bytes" in refused.stderr) == (1, True)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(shell.home / "config"))
    monkeypatch.delenv("ADAPTERD_TOKEN", raising=False)
    assert load_token() == longest
    path = shell.home / "config/adapterd/token"
    for text in (longer, " " * MAX_TOKEN_BYTES + "\nsecond"):  # cut, the first is another token and the second none
        path.write_text(text)
        with pytest.raises(AdapterdError) as caught:
            load_token()
        assert (caught.value.code, caught.value.problem.where) == (Code.SETTINGS_INVALID, str(path))
        assert f"more than {MAX_TOKEN_BYTES} bytes" in caught.value.problem.message
    monkeypatch.setenv("ADAPTERD_TOKEN", longer)
    with pytest.raises(AdapterdError) as caught:
        load_token()
    assert caught.value.problem.where == "ADAPTERD_TOKEN"


def test_private_files_appear_whole_and_leave_nothing_beside_them(tmp_path: Path) -> None:
    write_private(tmp_path / "a", b"one")
    with pytest.raises(FileExistsError):
        write_private(tmp_path / "a", b"two")
    assert (tmp_path / "a").read_bytes() == b"one"
    write_private(tmp_path / "a", b"two", replace=True)
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("a", b"two")]
