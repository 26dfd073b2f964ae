"""Whatever goes wrong, the shell gets one line, one status and, if asked, one object."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from adapterd.cli.boundary import Edge, command, from_os_error
from adapterd.cli.output import Report, plain
from adapterd.loader.errors import AdapterdError, Code, Problem, error
from fakes.commands import Commands
from fakes.packages import write_package


def _tool(work: Callable[[], Report]) -> typer.Typer:
    """A command line with one command, `go`, that does `work`."""
    app = typer.Typer(cls=Edge, pretty_exceptions_enable=False)
    app.callback()(lambda: None)

    def go() -> Report:
        """Do it."""
        return work()

    command(app, "go")(go)
    return app


def _raise(fault: BaseException) -> Callable[[], Report]:
    def work() -> Report:
        raise fault

    return work


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (Code.INTERNAL, 1), (Code.SIGNATURE_INVALID, 3), (Code.UNAUTHENTICATED, 4), (Code.NOT_FOUND, 5),
        (Code.NONFINITE, 6), (Code.PRECONDITION_FAILED, 7), (Code.SERVER_UNREACHABLE, 8),
    ],
)  # fmt: skip
def test_a_problem_becomes_one_line_and_its_status(code: Code, status: int) -> None:
    app = _tool(_raise(error(code, "some place", "it is so", "Do that.")))
    result = CliRunner().invoke(app, ["go"])
    assert (result.exit_code, result.stdout) == (status, "")
    assert result.stderr == f"error {code} some place: it is so. Do that.\n"
    result = CliRunner().invoke(app, ["go", "--json"])
    assert json.loads(result.stdout) == {
        "schema": "adapterctl.go/1",
        "ok": False,
        "problems": [
            {
                "code": code,
                "severity": "reject",
                "where": "some place",
                "message": "it is so",
                "hint": "Do that.",
            }
        ],
    }


def test_ctrl_c_is_130_without_a_traceback() -> None:
    result = CliRunner().invoke(_tool(_raise(KeyboardInterrupt())), ["go", "--json"])
    assert (result.exit_code, result.stderr) == (130, "interrupted\n")
    assert json.loads(result.stdout)["interrupted"] is True


def test_a_bug_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        CliRunner().invoke(_tool(_raise(ZeroDivisionError())), ["go"], catch_exceptions=False)


@pytest.mark.parametrize(
    ("number", "code", "status"),
    [
        (errno.ENOSPC, Code.STORAGE_FULL, 8),
        (errno.EDQUOT, Code.STORAGE_FULL, 8),
        (errno.ENOENT, Code.PATH_NOT_FOUND, 5),
        (errno.EACCES, Code.PATH_NOT_FOUND, 5),
        (errno.ELOOP, Code.PATH_NOT_FOUND, 5),
        (errno.EEXIST, Code.ALREADY_EXISTS, 7),
        (errno.ENOTEMPTY, Code.ALREADY_EXISTS, 7),
        (errno.EIO, Code.STORAGE_UNAVAILABLE, 8),
    ],
)
def test_what_the_system_says_has_a_code(number: int, code: Code, status: int) -> None:
    fault = from_os_error(OSError(number, os.strerror(number), "/some/file"))
    assert (fault.code, fault.exit_status, fault.problem.where) == (code, status, "/some/file")


def test_debug_shows_where_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADAPTERD_DEBUG", "1")
    result = CliRunner().invoke(_tool(_raise(error(Code.NOT_FOUND, "x", "gone"))), ["go"])
    assert result.exit_code == 5
    assert "Traceback" in result.stderr
    assert result.stderr.endswith("error NOT_FOUND x: gone.\n")


@pytest.mark.parametrize(
    ("words", "said", "schema"),
    [
        (["verify"], "Missing argument", "adapterctl.verify/1"),
        (["alias", "set", "--nope"], "No such option: --nope", "adapterctl.alias.set/1"),
        (["verfiy", "x"], "Did you mean 'verify'", "adapterctl.main/1"),
        (
            ["verify", "x", "--policy", "lax"],
            "'lax' is none of strict, warn, permissive",
            "adapterctl.verify/1",
        ),
        (["verify", "x", "--allow", "NONSENSE"], "'NONSENSE' is not a problem code", "adapterctl.verify/1"),
        (["verify", "x", "--sha256", "model=zz"], "'model=zz' is not NAME=<64 hex>", "adapterctl.verify/1"),
    ],
)
def test_a_wrong_command_line_is_2_and_one_line(shell: Commands, words: list[str], said: str, schema: str) -> None:
    result = shell.run(*words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error REQUEST_INVALID command line: ")
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    body = shell.json(*words, status=2)
    assert body["schema"] == schema
    assert said in body["problems"][0]["message"]


def test_a_group_alone_shows_its_help(shell: Commands) -> None:
    result = shell.run("alias")
    assert result.exit_code == 2
    assert "history" in result.output


def test_what_strangers_wrote_cannot_paint_on_the_terminal() -> None:
    where = "tensor\x1b[2J\r\nerror\u202e"
    app = _tool(_raise(AdapterdError(Problem(Code.UNKNOWN_KEY, "reject", where, "x\x07y"))))
    result = CliRunner().invoke(app, ["go"])
    assert result.stderr == "error UNKNOWN_KEY tensor\\x1b[2J\\r\\nerror\\u202e: x\\x07y.\n"
    assert plain("été ✓") == "été ✓"


def test_tables_take_no_markup_and_no_colour_goes_into_a_pipe() -> None:
    from adapterd.cli.output import rows, table

    def work() -> Report:
        return Report({}, ["a"], lambda: [rows(table("name"), [["[red]x[/red]"]]), "[bold]y"])

    result = CliRunner().invoke(_tool(work), ["go"])
    assert "[red]x[/red]" in result.stdout
    assert "[bold]y" in result.stdout
    assert "\x1b" not in result.stdout
    assert CliRunner().invoke(_tool(work), ["go", "-q"]).stdout == "a\n"


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_reader_that_goes_away_is_no_traceback(base_file: Path, package: Path, form: list[str]) -> None:
    """`adapterctl … | head -0`: the pipe is closed before anything is written."""
    reading, writing = os.pipe()
    os.close(reading)
    assert _with_stdout(writing, "inspect", package, "--base", base_file, *form) == (1, "")


@pytest.mark.parametrize("folder", ["good", "missing"])
def test_a_full_disk_under_stdout_is_one_line(tmp_path: Path, base_file: Path, folder: str) -> None:
    write_package(tmp_path / "good")
    full = os.open("/dev/full", os.O_WRONLY)
    status, said = _with_stdout(full, "inspect", tmp_path / folder, "--base", base_file, "--json")
    assert status == 8
    last = said.splitlines()[-1]
    assert last == "error STORAGE_FULL stdout: no space left on the disk. Free some space and run it again."
    assert "Traceback" not in said


def _with_stdout(stdout: int, *words: object) -> tuple[int, str]:
    """Status and stderr of a real process; `stdout` is closed afterwards."""
    command = [sys.executable, "-m", "adapterd.cli", *map(str, words)]
    try:
        done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    finally:
        os.close(stdout)
    return done.returncode, done.stderr
