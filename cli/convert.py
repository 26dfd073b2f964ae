"""`convert`: a copy of an adapter with PEFT's own tensor names, made here and checked like any other."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from adapterd.cli.author import Allow, Base, BaseId, BaseRevision, Folder, LimitsFile
from adapterd.cli.boundary import command
from adapterd.cli.inputs import BaseChoice, load_limits, parse_codes
from adapterd.cli.output import Report, facts, progress, rows, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from adapterd.loader.base_model import BaseSpec
    from adapterd.loader.checks import Verdict
    from adapterd.loader.convert import Conversion
    from adapterd.loader.errors import Code
    from adapterd.loader.formats.files import DirectoryPackage
    from adapterd.loader.limits import Limits
    from adapterd.loader.manifest import Manifest


def register(app: typer.Typer) -> None:
    """Put this room's command on `app`."""
    command(app, "convert")(convert)


def convert(
    directory: Folder,
    *,
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to make; nothing is overwritten.")],
    base: Base = None,
    base_id: BaseId = None,
    base_revision: BaseRevision = None,
    limits: LimitsFile = None,
    allow: Allow = None,
) -> Report:
    """Write a copy whose tensors have PEFT's names, where the base proves them; values are never touched."""
    caps, allowed = load_limits(limits), parse_codes(allow or ())
    spec = BaseChoice(base, base_id, base_revision).load()
    with _open(directory, caps) as package:
        plan, verdict = _written(package, out, spec, caps, allowed)
    if verdict.manifest is None:  # only for the type: a refusal has been raised
        raise ValueError("no manifest")
    body = _body(directory, out, plan, _left_out(directory, plan, caps), verdict)
    ids = [f"{change.old} {change.new}" for change in plan.changes]
    return Report(body, ids, lambda: _view(body, plan, verdict.manifest), verdict.problems)


def _open(directory: Path, limits: Limits) -> DirectoryPackage:
    """The package alone where a whole one is there; else all of the folder, so that its refusal says what is."""
    from adapterd.loader.formats.files import DirectoryPackage, names_in
    from adapterd.loader.formats.package import STORED_FILES
    from adapterd.loader.identity import CONFIG_FILE, WEIGHTS_FILE

    names, _ = names_in(directory, limits)
    whole = {CONFIG_FILE, WEIGHTS_FILE} <= set(names)
    return DirectoryPackage.open_dir(directory, limits, STORED_FILES if whole else None)


def _written(
    package: DirectoryPackage, out: Path, base: BaseSpec, limits: Limits, allow: frozenset[Code]
) -> tuple[Conversion, Verdict]:
    """The copy appears whole and accepted, or not at all.

    Raises:
        Refused: it cannot be proved, or the copy is not accepted for another reason.
        Conflict: ALREADY_EXISTS.
    """
    from adapterd.cli.credentials import named
    from adapterd.loader.checks import examine
    from adapterd.loader.convert import plan_conversion
    from adapterd.loader.errors import error_from
    from adapterd.loader.formats.files import DirectoryPackage
    from adapterd.loader.parts import naming
    from adapterd.loader.scratch import scratch_folder

    target = named(out)
    _must_be_free(target)
    plan = plan_conversion(package, base, limits)
    parent = target.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    with naming(target), scratch_folder("convert", parent) as scratch:
        copy = scratch / "copy"
        copy.mkdir()
        _write_copy(package, plan, copy)
        with DirectoryPackage.open_dir(copy, limits) as written:
            verdict = examine(written, base, limits=limits, allow=allow)
        if verdict.manifest is None:
            raise error_from(verdict.problems)
        _must_be_free(target)
        copy.rename(target)
    return plan, verdict


def _must_be_free(target: Path) -> None:
    from adapterd.loader.errors import Code, error

    if target.exists() or target.is_symlink():
        raise error(Code.ALREADY_EXISTS, str(target), "exists already", "Move it away, or name another with --out.")


def _write_copy(package: DirectoryPackage, plan: Conversion, copy: Path) -> None:
    from adapterd.loader.convert import write_weights
    from adapterd.loader.formats.files import blocks
    from adapterd.loader.identity import WEIGHTS_FILE

    with progress("converting", plan.weights.size) as advance, (copy / WEIGHTS_FILE).open("xb") as weights:
        write_weights(plan, weights, advance)
        weights.flush()
        os.fsync(weights.fileno())
    for name in plan.copied:
        with (copy / name).open("xb") as file:
            file.writelines(blocks(package.open(name)))
            file.flush()
            os.fsync(file.fileno())


def _left_out(directory: Path, plan: Conversion, limits: Limits) -> list[str]:
    from adapterd.loader.formats.files import names_in
    from adapterd.loader.identity import WEIGHTS_FILE

    names, _ = names_in(directory, limits)
    return [name for name in names if name != WEIGHTS_FILE and name not in plan.copied]


def _body(directory: Path, out: Path, plan: Conversion, left_out: Sequence[str], verdict: Verdict) -> dict[str, Any]:
    return {
        "source": str(directory),
        "directory": str(out),
        "version_digest": verdict.manifest.version_digest if verdict.manifest else None,
        "tensors": len(plan.renames),
        "changes": [{"from": c.old, "to": c.new, "steps": [s.name.lower() for s in c.steps]} for c in plan.changes],
        "copied": list(plan.copied),
        "left_out": list(left_out),
        "problems": [p.as_json() for p in verdict.problems],
    }


def _view(body: dict[str, Any], plan: Conversion, manifest: Manifest | None) -> Iterator[RenderableType]:
    done = [f"{step.value}: {count}" for step, count in sorted(plan.steps.items())]
    yield facts(
        [
            ("folder", body["directory"]),
            ("version digest", f"sha256:{manifest.version_digest}" if manifest else None),
            ("tensors", f"{len(plan.renames)}, {len(plan.changes)} renamed; values and order are the same"),
            ("what", "; ".join(done) or "nothing to change: a copy"),
            ("left out", ", ".join(body["left_out"]) or None),
            ("verdict", "ok"),
        ]
    )
    if plan.changes:
        yield rows(table("from", "to"), ((change.old, change.new) for change in plan.changes))
