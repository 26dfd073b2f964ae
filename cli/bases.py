"""Base models: their module tables, made here and registered there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from adapterd.cli.boundary import command
from adapterd.cli.inputs import split_pinned
from adapterd.cli.output import Report, facts, rows, table

if TYPE_CHECKING:
    from adapterd.loader.base_model import BaseSpec

ModelFolder = Annotated[Path, typer.Argument(metavar="DIR", help="Model directory: config.json and safetensors files.")]
Id = Annotated[str, typer.Option("--id", help="What the base is called, as in meta-llama/Llama-3.1-8B.")]
Revision = Annotated[str, typer.Option("--revision", help="40-hex commit, or sha256:… of the files.")]
Pinned = Annotated[str, typer.Argument(metavar="ID@REV")]
Out = Annotated[Path, typer.Option("--out", "-o", help="Where the table goes. An existing file is not overwritten.")]


def register(app: typer.Typer) -> None:
    """Put this room's commands on `app`."""
    base = typer.Typer(help="Base models and their module tables.", no_args_is_help=True)
    command(base, "base.add")(add)
    command(base, "base.list")(list_)
    command(base, "base.show")(show)
    command(base, "base.export")(export)
    command(base, "base.table")(make_table)
    app.add_typer(base, name="base")


def add(
    path: Annotated[Path, typer.Argument(metavar="DIR|FILE", help="Model directory, or a table file.")],
    base_id: Annotated[str | None, typer.Option("--id", help="Needed for a directory.", show_default=False)] = None,
    revision: Annotated[
        str | None, typer.Option("--revision", help="Needed for a directory.", show_default=False)
    ] = None,
) -> Report:
    """Register a base model with the server (operator)."""
    from adapterd.cli.connection import connect
    from adapterd.cli.inputs import BaseChoice

    spec = BaseChoice(str(path.absolute()), base_id, revision).load()
    with connect() as client:
        client.add_base(spec)
    return _spec_report(spec)


def list_() -> Report:
    """List the registered base models."""
    from adapterd.cli.connection import connect

    with connect() as client:
        items = client.bases()
    lines = ((b.get("id"), b.get("revision"), b.get("modules"), b.get("module_table_digest")) for b in items)
    return Report(
        {"bases": items},
        [f"{b['id']}@{b['revision']}" for b in items],
        lambda: [rows(table("base", "revision", "modules", "table digest", right=["modules"]), lines)],
    )


def show(pinned: Pinned) -> Report:
    """Show a registered base model's modules."""
    spec = _fetch(pinned)
    lines = ((m.path, m.kind, m.in_features, m.out_features) for m in spec.modules)
    listed = table("module", "kind", "in", "out", right=["in", "out"])
    return Report({"base": spec.as_json()}, [m.path for m in spec.modules], lambda: [_facts(spec), rows(listed, lines)])


def export(pinned: Pinned, out: Out) -> Report:
    """Write a registered base model's table to a file, for work without the server."""
    return _written(_fetch(pinned), out)


def make_table(path: ModelFolder, base_id: Id, revision: Revision, out: Out) -> Report:
    """Make a table from a model directory, without a server. Only headers are read."""
    from adapterd.loader.base_model import BaseSpec

    return _written(BaseSpec.from_directory(path, id=base_id, revision=revision), out)


def _fetch(pinned: str) -> BaseSpec:
    from adapterd.cli.connection import connect

    with connect() as client:
        return client.base(*split_pinned(pinned))


def _written(spec: BaseSpec, out: Path) -> Report:
    """The file appears whole or not at all."""
    import json

    from adapterd.cli.credentials import write_private

    write_private(out, (json.dumps(spec.as_json(), indent=1) + "\n").encode(), mode=0o644)
    return _spec_report(spec, file=str(out))


def _spec_report(spec: BaseSpec, **more: Any) -> Report:
    body = {**spec.pin.as_json(), "modules": len(spec.modules), **more}
    return Report(body, [f"{spec.id}@{spec.revision}"], lambda: [facts(body.items())])


def _facts(spec: BaseSpec) -> Any:
    pairs = [
        ("base", f"{spec.id}@{spec.revision}"),
        ("table digest", spec.table_digest),
        ("modules", len(spec.modules)),
    ]
    return facts(pairs)
