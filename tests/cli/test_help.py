"""`--help` is instant: it loads nothing that only a command's work needs."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = (
    "torch",
    "fastapi",
    "sqlalchemy",
    "httpx",
    "numpy",
    "cryptography",
    "uvicorn",
    "adapterd.loader.checks",
)


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["verify", "--help"],
        ["base", "add", "--help"],
        ["worker", "--help"],
        ["bench", "kernels", "--help"],
        ["--version"],
    ],
)
def test_help_loads_nothing_heavy(words: list[str]) -> None:
    code = (
        "import sys\n"
        "from adapterd.cli.main import app\n"
        f"status = app({words!r}, standalone_mode=False)\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules], status, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr.strip() == "[] 0"
    assert done.stdout.strip()


def test_every_command_has_json_and_quiet_and_says_what_it_does() -> None:
    from typer.main import get_command

    from adapterd.cli.main import app

    found = dict(_leaves(get_command(app), ""))
    assert {
        "verify",
        "inspect",
        "keygen",
        "sign",
        "upload",
        "pull",
        "list",
        "show",
        "serve",
        "demo",
    } <= found.keys()
    assert {"alias set", "base table", "token create", "key add", "trust init", "db init"} <= found.keys()
    for name, one in found.items():
        options = {opt for p in one.params for opt in p.opts}
        assert {"--json", "--quiet"} <= options, name
        assert one.help, name


def _leaves(here, path):  # type: ignore[no-untyped-def]
    if not hasattr(here, "commands"):
        yield path.strip(), here
        return
    for name, child in here.commands.items():
        yield from _leaves(child, f"{path} {name}")
