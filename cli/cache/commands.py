"""`adapterctl cache …`, as the shell sees it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from adapterd.cli.boundary import command
from adapterd.cli.inputs import REF_HELP
from adapterd.cli.output import Report, rows, size, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from adapterd.gpu_cache.daemon.client import DaemonClient
    from adapterd.gpu_cache.daemon.messages import KeptAnswer
    from adapterd.loader.errors import Problem
    from adapterd.loader.identity import Ref

SOCKET_VARIABLE = "ADAPTERD_CACHE_SOCKET"

SocketOption = Annotated[
    Path | None,
    typer.Option(
        "--socket", envvar=SOCKET_VARIABLE, show_envvar=False, show_default=False,
        help=f"Socket of the worker's daemon.  [default: {SOCKET_VARIABLE}]",
    ),
]  # fmt: skip
WAIT_SECONDS = 30.0
WaitOption = Annotated[
    float,
    typer.Option("--wait", min=0, max=60, help="Seconds until it is there; 0 only begins. It goes on all the same."),
]
RefsArgument = Annotated[list[str], typer.Argument(metavar="REF…", help=REF_HELP)]


class To(StrEnum):
    """How near to the engine."""

    VRAM = "vram"
    HOST = "host"


def register(app: typer.Typer) -> None:
    """Put the commands on `app`."""
    cache = typer.Typer(help="A running worker's cache, over its daemon's socket.", no_args_is_help=True)
    for function in (status, prefetch, pin, unpin, evict, drain, metrics, watch):
        command(cache, f"cache.{function.__name__}")(function)
    app.add_typer(cache, name="cache")


def status(
    context: typer.Context,
    *,
    socket: SocketOption = None,
    adapters: Annotated[bool, typer.Option("--adapters", "-a", help="List the adapters, too.")] = False,
    live: Annotated[bool, typer.Option("--watch", "-w", help="Follow it; without a terminal, as `watch`.")] = False,
) -> Report:
    """Show who has how much of a worker's memories, and in which state."""
    from adapterd.cli.cache.view import adapters_table, status_view
    from adapterd.cli.cache.watching import live_view

    with connect(socket) as client:
        if live and not (sys.stdout.isatty() and _plain_output(context)):
            return _followed(client, context, None)
        if live:
            live_view(client)
        told = client.status()

    def view() -> Iterable[RenderableType]:
        yield from status_view(told)
        if adapters:
            yield adapters_table(told.adapters)

    return Report(_body(told), [held.id for held in told.adapters], view)


def prefetch(
    refs: RefsArgument,
    *,
    to: Annotated[To, typer.Option(help="How near to the engine.")] = To.VRAM,
    wait: WaitOption = WAIT_SECONDS,
    socket: SocketOption = None,
) -> Report:
    """Bring adapters before somebody wants them."""
    with connect(socket) as client:
        return _each(refs, lambda ref: _arrived(client.prefetch(ref, to.value, wait), wait))


def pin(refs: RefsArgument, *, wait: WaitOption = WAIT_SECONDS, socket: SocketOption = None) -> Report:
    """Bring adapters into VRAM and keep them there, until `unpin`."""
    with connect(socket) as client:
        return _each(refs, lambda ref: _arrived(client.pin(ref, wait), wait))


def unpin(refs: RefsArgument, *, socket: SocketOption = None) -> Report:
    """Let pinned adapters go when room is needed."""
    with connect(socket) as client:
        return _each(refs, lambda ref: _body(client.unpin(ref)))


def evict(refs: RefsArgument, *, socket: SocketOption = None) -> Report:
    """Drop adapters from VRAM and host memory; refused while they are leased or pinned."""
    with connect(socket) as client:
        return _each(refs, lambda ref: _body(client.evict(ref)))


def drain(
    *,
    socket: SocketOption = None,
    off: Annotated[bool, typer.Option("--off", help="Take new leases again.")] = False,
) -> Report:
    """Refuse new leases, let go of pins, and let the leases that are there finish."""
    with connect(socket) as client:
        told = client.drain(not off)
    return Report(_body(told), ["drained" if told.drained else "draining" if told.draining else "serving"])


def metrics(*, socket: SocketOption = None) -> Report:
    """Print the worker's metrics in the text format of Prometheus."""
    with connect(socket) as client:
        told = client.metrics()
    return Report(_body(told), told.text.splitlines())


def watch(
    context: typer.Context,
    *,
    socket: SocketOption = None,
    count: Annotated[int | None, typer.Option(min=1, help="Stop after so many changes.", show_default=False)] = None,
) -> Report:
    """Print what is resident, then each change on a line."""
    with connect(socket) as client:
        return _followed(client, context, count)


def connect(socket: Path | None) -> DaemonClient:
    """A connection to the daemon.

    Raises:
        Failed: SETTINGS_INVALID if no socket is named.
        Unavailable: SERVER_UNREACHABLE.
    """
    from adapterd.gpu_cache.daemon.client import DaemonClient
    from adapterd.loader.errors import Code, error

    if socket is None:
        raise error(
            Code.SETTINGS_INVALID, SOCKET_VARIABLE, "no socket is named",
            f"Give --socket PATH, or export {SOCKET_VARIABLE}=PATH: where the worker's daemon listens.",
        )  # fmt: skip
    return DaemonClient(socket)


def _followed(client: DaemonClient, context: typer.Context, count: int | None) -> Report:
    from adapterd.cli.cache.watching import follow

    told = follow(client, count, ids=bool(context.params["quiet"]), silent=bool(context.params["json"]))
    return Report({"changes": told})


def _plain_output(context: typer.Context) -> bool:
    return not (context.params["json"] or context.params["quiet"])


def _each(texts: Sequence[str], ask: Callable[[Ref], dict[str, Any]]) -> Report:
    """Every REF on its own: one that is refused stops no other, and decides the status."""
    from adapterd.cli.output import problems_json
    from adapterd.loader.errors import AdapterdError, error_from
    from adapterd.loader.identity import Ref

    done: list[dict[str, Any]] = []
    problems: list[Problem] = []
    for ref in [Ref.parse(text) for text in texts]:
        try:
            done.append(ask(ref))
        except AdapterdError as refused:
            problems.extend(refused.problems)
    return Report(
        {"adapters": done, "problems": problems_json(problems)},
        [str(each["ref"]) for each in done],
        lambda: [rows(table(*done[0]), (tuple(map(_cell, each.items())) for each in done))] if done else [],
        problems,
        error_from(problems).exit_status if problems else 0,
    )


def _arrived(told: KeptAnswer, wait: float) -> dict[str, Any]:
    """Raises Unavailable (LEASE_TIMEOUT)."""
    from adapterd.loader.errors import Code, error

    if wait and not told.ready:
        raise error(
            Code.LEASE_TIMEOUT, str(told.ref), f"not there after {wait:g} s", "It is on its way; `watch` shows it."
        )
    return _body(told)


def _cell(pair: tuple[str, Any]) -> object:
    name, value = pair
    if isinstance(value, bool):
        return "yes" if value else "no"
    return size(value) if name.endswith("_bytes") else value


def _body(told: Any) -> dict[str, Any]:
    """An answer's fields, without those of the protocol."""
    body: dict[str, Any] = told.model_dump(mode="json", exclude={"protocol", "ok"})
    return body
