"""`db` and `serve` as an operator runs them, the server as a process of its own."""

from __future__ import annotations

import os
import re
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from adapterd.loader.trust.keys import PublicKey
from fakes.commands import INTERRUPTIBLE, Commands


@pytest.fixture
def operator(shell: Commands, tmp_path: Path) -> Commands:
    return shell.with_variables(ADAPTERD_DATA_DIR=str(tmp_path / "data"))


def _environment(shell: Commands) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ADAPTERD_", "XDG_"))}
    return {**kept, **{k: v for k, v in shell.environment.items() if v is not None}}


@contextmanager
def _process(shell: Commands, *words: str) -> Iterator[subprocess.Popen[str]]:
    command = [*INTERRUPTIBLE, sys.executable, "-m", "adapterd.cli", *words]
    process = subprocess.Popen(
        command, env=_environment(shell), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_init_shows_one_token_once_and_can_be_repeated(operator: Commands, tmp_path: Path) -> None:
    body = operator.json("db", "init")
    assert body["operator_token"].startswith("adru_")
    assert PublicKey.from_pem(body["admission_public_key"]).key_id == body["admission_key_id"]
    assert stat.S_IMODE((tmp_path / "data/admission.key").stat().st_mode) == 0o600
    again = operator.json("db", "init")
    assert (again["operator_token"], again["admission_key_id"]) == (None, body["admission_key_id"])
    operator.json("db", "check")
    operator.json("db", "upgrade")


def test_a_lost_operator_token_is_replaced_at_the_machine(operator: Commands) -> None:
    first = operator.json("db", "init")["operator_token"]
    second = operator.json("db", "init", "--new-token")["operator_token"]
    assert second and second != first


def test_what_is_not_there_says_how_to_make_it(operator: Commands) -> None:
    for words in (["db", "check"], ["serve", "--port", "0"]):
        result = operator.run(*words)
        assert result.exit_code == 1, words
        assert "adapterctl db init" in result.stderr
        assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [("ADAPTERD_PORT", "many"), ("ADAPTERD_DATABASE_URL", "mysql://x"), ("ADAPTERD_BLOBS", "tape")],
)
def test_a_wrong_setting_is_named(operator: Commands, name: str, value: str) -> None:
    result = operator.with_variables(**{name: value}).run("serve")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error SETTINGS_INVALID {name}: ")


def test_a_port_in_use_is_one_line(operator: Commands) -> None:
    operator.json("db", "init")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert operator.codes("serve", "--port", port, status=1) == ["PORT_IN_USE"]
    assert operator.codes("serve", "--host", "192.0.2.1", "--port", "0", status=1) == ["SETTINGS_INVALID"]


def test_serve_answers_until_ctrl_c(operator: Commands) -> None:
    token = operator.json("db", "init")["operator_token"]
    with _process(operator, "serve", "--port", "0") as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert found, line
        with httpx.Client(base_url=found[0], timeout=30) as http:
            assert http.get("/readyz").status_code == 200
        here = operator.with_variables(ADAPTERD_URL=found[0], ADAPTERD_TOKEN=token)
        assert here.json("token", "whoami")["caller"]["scopes"] == ["operator"]
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert "Traceback" not in err
    assert err.endswith("interrupted\n")
