"""Base models: their module tables, made here and registered there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from adapterd.cli.boundary import command
from adapterd.cli.inputs import split_pinned
from adapterd.cli.output import Report, facts, progress, rows, table

if TYPE_CHECKING:
    from rich.table import Table

    from adapterd.loader.base_alternatives import Alternative
    from adapterd.loader.base_model import BaseSpec

ModelFolder = Annotated[Path, typer.Argument(metavar="DIR", help="Model directory: config.json and safetensors files.")]
Id = Annotated[str, typer.Option("--id", help="What the base is called, as in meta-llama/Llama-3.1-8B.")]
Revision = Annotated[str, typer.Option("--revision", help="40-hex commit, or sha256:… of the files.")]
Pinned = Annotated[str, typer.Argument(metavar="ID@REV")]
Out = Annotated[Path, typer.Option("--out", "-o", help="Where the table goes. An existing file is not overwritten.")]
Alternatives = Annotated[
    list[str] | None,
    typer.Option(
        "--alternative",
        metavar="NAME=FILE",
        help="Other names of the modules, which adapters may be written in: JSON with renames, prefixes or parts.",
        show_default=False,
    ),
]
WeightsDigest = Annotated[
    bool, typer.Option("--weights-digest", help="Read all weights and keep their digest with the base.")
]


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
    alternative: Alternatives = None,
    weights_digest: WeightsDigest = False,
) -> Report:
    """Register a base model with the server (operator).

    Where headers do not say how wide a module is (packed weights, new model types), the table comes from
    the model's class, which needs torch and transformers.
    """
    from adapterd.cli.connection import connect
    from adapterd.cli.inputs import BaseChoice

    with progress("reading the model", None):
        spec = BaseChoice(str(path.absolute()), base_id, revision).load()
    spec = _completed(spec, path, alternative or (), weights=weights_digest)
    with connect() as client:
        client.add_base(spec)
    return _spec_report(spec)


def list_() -> Report:
    """List the registered base models."""
    from adapterd.cli.connection import connect

    with connect() as client:
        items = client.bases()
    names = ("id", "revision", "modules", "module_table_digest", "weights_digest")
    lines = ([*map(b.get, names), ", ".join(b.get("alternatives", ())) or None] for b in items)
    heads = ("base", "revision", "modules", "table digest", "weights digest", "alternatives")
    return Report(
        {"bases": items},
        [f"{b['id']}@{b['revision']}" for b in items],
        lambda: [rows(table(*heads, right=["modules"]), lines)],
    )


def show(pinned: Pinned) -> Report:
    """Show a registered base model's modules."""
    spec = _fetch(pinned)
    lines = ((m.path, m.kind, m.in_features, m.out_features) for m in spec.modules)
    listed = table("module", "kind", "in", "out", right=["in", "out"])
    return Report(
        {"base": spec.as_json()},
        [m.path for m in spec.modules],
        lambda: [_facts(spec), rows(listed, lines), *_renames(spec)],
    )


def export(pinned: Pinned, out: Out) -> Report:
    """Write a registered base model's table to a file, for work without the server."""
    return _written(_fetch(pinned), out)


def make_table(
    path: ModelFolder,
    base_id: Id,
    revision: Revision,
    out: Out,
    alternative: Alternatives = None,
    weights_digest: WeightsDigest = False,
) -> Report:
    """Make a table from a model directory, without a server. Only headers are read, if they say enough."""
    from adapterd.loader.base_model import BaseSpec

    with progress("reading the model", None):
        spec = BaseSpec.from_directory(path, id=base_id, revision=revision)
    return _written(_completed(spec, path, alternative or (), weights=weights_digest), out)


def _completed(spec: BaseSpec, path: Path, alternatives: Iterable[str], *, weights: bool) -> BaseSpec:
    """`spec` with what was asked for beside the table."""
    import dataclasses

    spec = spec.with_alternatives([_alternative(text, spec) for text in alternatives])
    return dataclasses.replace(spec, weights_digest=_weights(path)) if weights else spec


def _alternative(text: str, spec: BaseSpec) -> Alternative:
    from adapterd.loader.base_alternatives import load_alternative

    name, found, file = text.partition("=")
    if not found:
        raise typer.BadParameter(f"{text!r} is not NAME=FILE", param_hint="--alternative")
    return load_alternative(name, Path(file), [m.path for m in spec.modules])


def _weights(path: Path) -> str:
    from adapterd.loader.base_weights import weights_bytes, weights_digest

    if not path.is_dir():
        raise typer.BadParameter("a table file has no weights; give the model directory", param_hint="--weights-digest")
    with progress("reading the weights", weights_bytes(path)) as advance:
        return weights_digest(path, advance)


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
    names = [a.name for a in spec.alternatives]
    extra = {"alternatives": names, "weights_digest": spec.weights_digest}
    body = {**spec.pin.as_json(), "modules": len(spec.modules), **extra, **more}
    shown = {**body, "alternatives": ", ".join(names) or None}
    return Report(body, [f"{spec.id}@{spec.revision}"], lambda: [facts(shown.items())])


def _facts(spec: BaseSpec) -> Any:
    pairs = [
        ("base", f"{spec.id}@{spec.revision}"),
        ("table digest", spec.table_digest),
        ("weights digest", spec.weights_digest),
        ("modules", len(spec.modules)),
    ]
    return facts(pairs)


def _renames(spec: BaseSpec) -> Iterator[Table]:
    for alternative in spec.alternatives:
        heads = (f"name in '{alternative.name}'", "module")
        yield rows(table(*heads), alternative.renames)
