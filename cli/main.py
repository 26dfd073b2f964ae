"""adapterctl: the command line of adapterd.

Nothing heavy is imported here; every command imports what it needs when it runs, so `--help` is instant.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from adapterd.cli import admin, author, bases, catalog, convert, diff, download, fit, merge, server, trust, upload
from adapterd.cli.bench import command as bench
from adapterd.cli.boundary import Edge, command
from adapterd.cli.cache import commands as cache
from adapterd.cli.output import Report
from adapterd.cli.worker import command as worker

EPILOG = (
    "Environment: ADAPTERD_URL (server), ADAPTERD_TOKEN (or `adapterctl token save`), "
    "ADAPTERD_TRUST (trust file), ADAPTERD_CACHE_SOCKET (a worker's daemon), NO_COLOR, ADAPTERD_DEBUG=1 (tracebacks). "
    "Exit status: 0 ok, 1 failure, 2 usage, 3 verification failed, 4 authentication needed, "
    "5 not found or no access, 6 refused, 7 conflict, 8 network or server, 130 interrupted."
)


def build() -> typer.Typer:
    """The whole command."""
    app = typer.Typer(
        cls=Edge,
        name="adapterctl",
        help="Publish, verify and serve signed LoRA adapters.",
        epilog=EPILOG,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    adapters = (author, convert, upload, download, merge, catalog, diff, fit)
    for room in (*adapters, bases, admin, trust, server, worker, cache, bench):
        room.register(app)
    command(app, "demo")(demo)
    return app


def _root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and stop.", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    """Publish, verify and serve signed LoRA adapters."""


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        sys.stdout.write(f"adapterctl {version('adapterd')}\n")
        raise typer.Exit


def demo(
    *,
    keep: Annotated[Path | None, typer.Option(help="Leave everything in this folder.", show_default=False)] = None,
    device: Annotated[str, typer.Option(help="cpu, or cuda:0 and so on.")] = "cpu",
) -> Report:
    """The main job, start to end, on embedded defaults, with a table of what happened."""
    from adapterd.cli.demo import run_demo

    return run_demo(device=device, keep=keep)


app = build()


def main() -> None:
    """The console script. A terminal that cannot show a character gets an escape and no traceback.

    SIGTERM ends it as Ctrl-C does, so that what was begun is taken back: scratch folders, the demo's server.
    """
    signal.signal(signal.SIGTERM, _terminate)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    app()


def _terminate(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)
