"""The edge between a command and the shell: options that every command has, and every foreseeable fault.

A command is a function that returns a `Report` or raises an `AdapterdError`; nothing else of it knows
about `--json`, `-q`, exit statuses or tracebacks.
"""

from __future__ import annotations

import errno
import functools
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

import typer
from typer.core import TyperGroup

from adapterd.cli.output import (
    EXIT_INTERRUPTED,
    Report,
    note,
    plain,
    print_json,
    print_problem,
    print_report,
    problems_json,
)

if TYPE_CHECKING:
    from adapterd.loader.errors import AdapterdError

P = ParamSpec("P")

DEBUG_VARIABLE = "ADAPTERD_DEBUG"
EXIT_BROKEN_PIPE = 1

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print ids only, one a line.")]


def schema_of(path: str) -> str:
    """The `schema` of a command's JSON object; `path` is the command with dots, e.g. `alias.set`."""
    return f"adapterctl.{path}/1"


def command(app: typer.Typer, path: str) -> Callable[[Callable[P, Report]], Callable[P, Report]]:
    """Register a function as the command `path` (a dot between group and name) of `app`."""

    def register(function: Callable[P, Report]) -> Callable[P, Report]:
        app.command(path.rsplit(".", 1)[-1])(_with_output(function, schema_of(path)))
        return function

    return register


def _with_output(function: Callable[..., Report], schema: str) -> Callable[..., None]:
    """`function` with `--json` and `-q`, its report printed and its faults told."""

    @functools.wraps(function)
    def run(*args: Any, json: bool, quiet: bool, **options: Any) -> None:
        work = functools.partial(function, *args, **options)
        raise typer.Exit(_guarded(work, schema, as_json=json, quiet=quiet))

    signature = inspect.signature(function, eval_str=True)
    common = [
        inspect.Parameter("json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=JsonOption),
        inspect.Parameter("quiet", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=QuietOption),
    ]
    parameters = [*signature.parameters.values(), *common]
    run.__signature__ = signature.replace(parameters=parameters, return_annotation=None)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


class _OutputLostError(Exception):
    """Standard output takes no more; nothing can be told there, not even this."""

    def __init__(self, fault: OSError) -> None:
        super().__init__(str(fault))
        self.fault = fault


@contextmanager
def to_stdout() -> Iterator[None]:
    """Around whatever is written to stdout: a lost stdout is no fault of the command."""
    try:
        yield
        sys.stdout.flush()
    except OSError as fault:
        raise _OutputLostError(fault) from fault


def _guarded(function: Callable[[], Report], schema: str, *, as_json: bool, quiet: bool) -> int:
    """Run it, print, and turn what went wrong into one line and a status."""
    try:
        return _attempted(function, schema, as_json=as_json, quiet=quiet)
    except _OutputLostError as lost:
        return _output_lost(lost.fault)


def _attempted(function: Callable[[], Report], schema: str, *, as_json: bool, quiet: bool) -> int:
    from adapterd.loader.errors import AdapterdError

    try:
        report = function()
    except AdapterdError as fault:
        return _told(fault, schema, as_json=as_json)
    except OSError as fault:
        return _told(from_os_error(fault), schema, as_json=as_json)
    except UnicodeEncodeError as fault:
        return _told(_half_text(fault), schema, as_json=as_json)
    except KeyboardInterrupt:
        note("interrupted")
        return _failed_json({"interrupted": True, "problems": []}, schema, EXIT_INTERRUPTED, as_json=as_json)
    with to_stdout():
        print_report(report, schema, as_json=as_json, quiet=quiet)
    return report.status


def _half_text(fault: UnicodeEncodeError) -> AdapterdError:
    """The shell hands on bytes that are no UTF-8 as half characters; a path may have them, nothing else may."""
    from adapterd.loader.errors import Code, error

    message = f"{fault.object[:80]!r} is not UTF-8 text"
    return error(Code.REQUEST_INVALID, "command line", message, "Type it again in UTF-8.")


def _told(fault: AdapterdError, schema: str, *, as_json: bool) -> int:
    if os.environ.get(DEBUG_VARIABLE) == "1":
        traceback.print_exc(file=sys.stderr)
    for problem in fault.problems:
        print_problem(problem)
    return _failed_json({"problems": problems_json(fault.problems)}, schema, fault.exit_status, as_json=as_json)


def _failed_json(body: Mapping[str, object], schema: str, status: int, *, as_json: bool) -> int:
    if as_json:
        with to_stdout():
            print_json(schema, body, ok=False)
    return status


def _output_lost(fault: OSError) -> int:
    """A full disk is told; a reader that went away (`adapterctl … | head`) has what it wanted.

    Python would try to flush once more when it shuts down, so stdout is led away first.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if fault.errno == errno.EPIPE:
        return EXIT_BROKEN_PIPE
    told = from_os_error(OSError(fault.errno, fault.strerror, "stdout"))
    print_problem(told.problem)
    return told.exit_status


def from_os_error(fault: OSError) -> AdapterdError:
    """The most specific problem for what the operating system said about a file or the disk."""
    from adapterd.loader.disk import FULL
    from adapterd.loader.errors import Code, error

    where = str(fault.filename or "file system")
    words = fault.strerror or str(fault)
    if fault.errno in FULL:
        return error(Code.STORAGE_FULL, where, "no space left on the disk", "Free some space and run it again.")
    if isinstance(fault, FileExistsError) or fault.errno == errno.ENOTEMPTY:
        return error(Code.ALREADY_EXISTS, where, "exists already", "Move it away or name another place.")
    missing = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
    if isinstance(fault, missing) or fault.errno in (errno.ELOOP, errno.ENAMETOOLONG):
        return error(Code.PATH_NOT_FOUND, where, f"cannot be used: {words.lower()}")
    return error(Code.STORAGE_UNAVAILABLE, where, f"the operating system said: {words}")


class Edge(TyperGroup):
    """The root command. Usage faults get the same line, status and JSON form as all others."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        status = self._status_of(words, prog_name, complete_var, extra)
        if standalone_mode:
            sys.exit(status)
        return status

    def _status_of(self, words: list[str], prog_name: str | None, complete: str | None, extra: dict[str, Any]) -> int:
        try:
            status = super().main(words, prog_name, complete, standalone_mode=False, **extra)
        except typer.TyperException as fault:
            return self._misused(fault, words)
        except (KeyboardInterrupt, typer.Abort):
            note("interrupted")
            return EXIT_INTERRUPTED
        return status if isinstance(status, int) else 0

    def _misused(self, fault: typer.TyperException, words: list[str]) -> int:
        """A wrong command line: one line, and where the right one is described."""
        from adapterd.loader.errors import Code, reject

        path, message = self._path_of(words), fault.format_message()
        if not message:  # `adapterctl alias` alone has already shown its help
            return fault.exit_code
        hint = f"See `{' '.join(['adapterctl', *path])} --help`."
        problem = reject(Code.REQUEST_INVALID, "command line", " ".join(plain(message).split()), hint)
        print_problem(problem)
        if "--json" in words:
            print_json(schema_of(".".join(path) or "main"), {"problems": [problem.as_json()]}, ok=False)
        return fault.exit_code

    def _path_of(self, words: list[str]) -> list[str]:
        """The names of groups and command at the front of the command line."""
        path: list[str] = []
        here: Any = self
        for word in words:
            here = getattr(here, "commands", {}).get(word)
            if here is None:
                break
            path.append(word)
        return path
