"""What a command says and where: data on stdout, progress and diagnosis on stderr, one status for the shell.

Everything that a stranger wrote (tensor names, hints, a server's words) goes through `plain` before it
reaches a terminal, so that no escape sequence in a file can paint on the screen.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

    from adapterd.loader.errors import Problem

EXIT_OK = 0
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

PIPE_WIDTH = 200
"""Columns of a table that goes into a file or a pipe: no terminal tells us, and digests must not be cut."""


@dataclass(frozen=True)
class Report:
    """What a command has to tell, in the three forms that it can be asked for.

    Attributes:
        body: the fields of the `--json` object, beside `schema` and `ok`.
        ids: what `-q` prints, one a line.
        view: makes what people see; None prints the ids.
        problems: told on stderr; those that reject have made `status` what it is.
        status: the exit status (docs/surfaces.md).
    """

    body: Mapping[str, object]
    ids: Sequence[str] = ()
    view: Callable[[], Iterable[RenderableType]] | None = None
    problems: Sequence[Problem] = field(default=())
    status: int = EXIT_OK


def plain(text: object) -> str:
    """`text` on one line, with control and other unprintable characters shown as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def print_json(schema: str, body: Mapping[str, object], *, ok: bool) -> None:
    """The one object of `--json`."""
    document = {"schema": schema, "ok": ok, **body}
    sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=True) + "\n")


def print_report(report: Report, schema: str, *, as_json: bool, quiet: bool) -> None:
    """Write `report` in the wanted form, and its problems to stderr."""
    for problem in report.problems:
        print_problem(problem)
    if as_json:
        print_json(schema, report.body, ok=report.status == EXIT_OK)
    elif quiet or report.view is None:
        sys.stdout.writelines(f"{plain(line)}\n" for line in report.ids)
    else:
        from rich.text import Text

        console = console_for(sys.stdout)
        for part in report.view():
            console.print(part, markup=False, highlight=False, soft_wrap=isinstance(part, str | Text))


def print_problem(problem: Problem) -> None:
    """`error CODE where: message. hint` in one line on stderr."""
    word = "error" if problem.severity == "reject" else "warning"
    where = f" {plain(problem.where)}" if problem.where else ""
    message = plain(problem.message)
    end = "" if message.endswith((".", "!", "?")) else "."
    hint = f" {plain(problem.hint)}" if problem.hint else ""
    note(f"{word} {problem.code}{where}: {message}{end}{hint}")


def note(line: str) -> None:
    """One line of diagnosis on stderr."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def console_for(stream: IO[str]) -> Console:
    """rich's console on `stream`; colour only on a terminal and without NO_COLOR."""
    from rich.console import Console

    if stream.isatty():
        return Console(file=stream, highlight=False)
    columns = os.environ.get("COLUMNS", "")
    width = int(columns) if columns.isdecimal() and int(columns) else PIPE_WIDTH
    return Console(file=stream, highlight=False, width=width, color_system=None)


def table(*columns: str, right: Iterable[str] = (), title: str | None = None) -> Table:
    """An empty table; `right` names the columns with numbers."""
    from rich import box
    from rich.table import Table

    numbers = set(right)
    made = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    for name in columns:
        made.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
    return made


def rows(into: Table, lines: Iterable[Sequence[object]]) -> Table:
    """`into` with `lines`, every cell as plain text."""
    from rich.text import Text

    for line in lines:
        into.add_row(*(Text("-" if cell is None else plain(cell)) for cell in line))
    return into


def facts(pairs: Iterable[tuple[str, object]]) -> Text:
    """Names and values, a line each; a long value is never broken, so that it can be copied."""
    from rich.text import Text

    lines = [(name, "-" if value is None else plain(value)) for name, value in pairs]
    width = max((len(name) for name, _ in lines), default=0)
    parts = [Text.assemble((f"{name:<{width}}", "bold"), f"  {value}") for name, value in lines]
    return Text("\n").join(parts)


def size(nbytes: int) -> str:
    """Bytes for people: `1.5 MiB`."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


@contextmanager
def progress(label: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on stderr while bytes move; yields `advance(nbytes)`. Silent unless stderr is a terminal."""
    if not sys.stderr.isatty():
        yield _ignore
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=console_for(sys.stderr), transient=True) as bar:
        task = bar.add_task(plain(label), total=total)

        def advance(nbytes: int) -> None:
            bar.advance(task, nbytes)

        yield advance


def _ignore(_: int) -> None:
    """Nobody watches."""


def problems_json(problems: Iterable[Problem]) -> list[dict[str, Any]]:
    """Problems as docs/surfaces.md writes them."""
    return [p.as_json() for p in problems]
