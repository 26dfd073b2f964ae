"""Following a worker's cache: a live view on a terminal, a line a change elsewhere."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NoReturn

from adapterd.cli.boundary import to_stdout
from adapterd.cli.cache.view import change_line, status_view
from adapterd.cli.output import console_for, plain

if TYPE_CHECKING:
    from adapterd.gpu_cache.daemon.client import DaemonClient
    from adapterd.gpu_cache.daemon.messages import Gone, Located, ResidencyAnswer

REFRESH_SECONDS = 1.0
"""Leases and counts change without a change of residency."""


def live_view(client: DaemonClient) -> NoReturn:
    """The status, again and again, until Ctrl-C. Raises KeyboardInterrupt."""
    from rich.console import Group
    from rich.live import Live

    known: ResidencyAnswer | None = None
    screen = Live(console=console_for(sys.stdout), auto_refresh=False, screen=True, redirect_stdout=False)
    with screen as live:
        while True:
            known = client.watch(known, REFRESH_SECONDS)
            live.update(Group(*status_view(client.status())), refresh=True)


def follow(client: DaemonClient, count: int | None, *, ids: bool, silent: bool) -> list[dict[str, Any]]:
    """What is resident, and then each change, a line each; until there were `count`, or Ctrl-C.

    Args:
        ids: prints nothing else.
        silent: prints nothing at all.

    Returns:
        What was told, if there is an end to it.
    """
    told: list[dict[str, Any]] = []
    known: ResidencyAnswer | None = None
    seen = 0
    while count is None or seen < count:
        known = client.watch(known)
        changes: list[Located | Gone] = [*known.adapters, *known.gone]
        for change in changes if count is None else changes[: count - seen]:
            seen += 1
            if count is not None:
                told.append(_body(change))
            if not silent:
                _print(change, ids=ids)
    return told


def _print(change: Located | Gone, *, ids: bool) -> None:
    with to_stdout():
        sys.stdout.write(f"{plain(change.id) if ids else change_line(change)}\n")


def _body(change: Located | Gone) -> dict[str, Any]:
    body: dict[str, Any] = change.model_dump(mode="json")
    return body if "tier" in body else {**body, "tier": "absent"}
