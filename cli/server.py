"""The registry on this machine: its database and its HTTP server."""

from __future__ import annotations

import errno
import os
import socket
from typing import TYPE_CHECKING, Annotated

import typer

from adapterd.cli.boundary import command
from adapterd.cli.output import Report, facts, note

if TYPE_CHECKING:
    from adapterd.registry.settings import Settings

BACKLOG = 2048
GRACE_SECONDS = 10
"""For requests that run when the server is stopped. An upload that is cut off is continued from where it is."""


def register(app: typer.Typer) -> None:
    """Put this room's commands on `app`."""
    database = typer.Typer(
        help="The registry's database (ADAPTERD_DATA_DIR, ADAPTERD_DATABASE_URL).", no_args_is_help=True
    )
    command(database, "db.init")(db_init)
    command(database, "db.upgrade")(db_upgrade)
    command(database, "db.check")(db_check)
    app.add_typer(database, name="db")
    command(app, "serve")(serve)


def db_init(
    *,
    new_token: Annotated[
        bool, typer.Option("--new-token", help="Make one more operator token, if the first is lost.")
    ] = False,
) -> Report:
    """Make schema, admission key and one operator token, which is shown once. Safe to run again."""
    from adapterd.registry.operations import initialise, load_admission_key, mint_operator_token
    from adapterd.registry.settings import load_settings

    settings = load_settings()
    made = initialise(settings)
    token = made.operator_token or (mint_operator_token(settings) if new_token else None)
    body = {
        "database_url": made.database_url,
        "data_dir": str(settings.data_dir),
        "admission_key_id": made.admission_key_id,
        "admission_public_key": load_admission_key(settings).public.pem,
        "operator_token": token,
    }
    if token:
        note("keep the operator token now: it cannot be shown again")
    else:
        note("the registry was there already; --new-token makes another operator token")
    return Report(
        body,
        [token] if token else [],
        lambda: [facts((k, v) for k, v in body.items() if k != "admission_public_key")],
    )


def db_upgrade() -> Report:
    """Bring the schema to this program's state."""
    from adapterd.registry.operations import upgrade
    from adapterd.registry.settings import load_settings

    settings = load_settings()
    upgrade(settings)
    return Report({"data_dir": str(settings.data_dir), "upgraded": True}, ["upgraded"])


def db_check() -> Report:
    """Say whether this registry can be served."""
    from adapterd.registry.operations import check
    from adapterd.registry.settings import load_settings

    settings = load_settings()
    check(settings)
    return Report({"data_dir": str(settings.data_dir), "usable": True}, ["usable"])


def serve(
    host: Annotated[
        str | None, typer.Option(help="Default: ADAPTERD_HOST, else 127.0.0.1.", show_default=False)
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="0 picks a free one. Default: ADAPTERD_PORT, else 8347.",
            show_default=False,
        ),
    ] = None,
) -> Report:
    """Serve the registry over HTTP until it is stopped."""
    from adapterd.registry.operations import check
    from adapterd.registry.settings import load_settings

    given = {name: value for name, value in (("host", host), ("port", port)) if value is not None}
    settings = load_settings(**given)
    check(settings)
    listener = listen(settings.host, settings.port)
    url = url_of(listener)
    try:
        _run(settings, listener, url)
    finally:
        listener.close()
    return Report({"url": url, "stopped": True})


def _run(settings: Settings, listener: socket.socket, url: str) -> None:
    import uvicorn

    from adapterd.registry.app import create_app

    config = uvicorn.Config(
        create_app(settings), log_config=None, server_header=False, timeout_graceful_shutdown=GRACE_SECONDS
    )
    server = uvicorn.Server(config)
    note(f"adapterd registry on {url} (Ctrl-C stops it)")
    server.run(sockets=[listener])


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; taken before the server starts, so that a taken port is one clear line.

    Raises:
        Failed: PORT_IN_USE, or SETTINGS_INVALID for an address that is not this machine's.
    """
    from adapterd.loader.errors import Code, error

    where = f"{host}:{port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as fault:
        raise error(Code.SETTINGS_INVALID, "ADAPTERD_HOST", f"{host!r} is no address: {fault.strerror}") from fault
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as fault:
        listener.close()
        if fault.errno == errno.EADDRINUSE:
            hint = "Stop the other program, or choose another with --port."
            raise error(Code.PORT_IN_USE, where, "another program listens there", hint) from fault
        raise error(Code.SETTINGS_INVALID, where, f"cannot listen there: {os.strerror(fault.errno or 0)}") from fault
    return listener


def url_of(listener: socket.socket) -> str:
    """The address to put into ADAPTERD_URL."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
