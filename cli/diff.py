"""`diff`: two versions, module by module; each a REF of the registry, or a folder or archive here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from adapterd.cli.author import Base, BaseId, BaseRevision, LimitsFile, catalog_manifest, verify_folder
from adapterd.cli.boundary import command
from adapterd.cli.inputs import BaseChoice, load_limits, subject_of
from adapterd.cli.output import Report, facts

if TYPE_CHECKING:
    from adapterd.cli.verification import Wish
    from adapterd.loader.manifest import Manifest

Side = Annotated[str, typer.Argument(metavar="PATH|REF", help="A folder or archive (with --base), or a REF.")]


@dataclass(frozen=True)
class _Sided:
    """One side: what it is called, and what it holds."""

    name: str
    manifest: Manifest


def register(app: typer.Typer) -> None:
    """Put this room's command on `app`."""
    command(app, "diff")(diff)


def diff(
    left: Side,
    right: Side,
    *,
    base: Base = None,
    base_id: BaseId = None,
    base_revision: BaseRevision = None,
    limits: LimitsFile = None,
) -> Report:
    """Compare two versions, module by module: what was added and removed, ranks, scalings and norms."""
    from adapterd.cli.modules import change_table, changes, norm_ratio, total_norm
    from adapterd.cli.verification import Wish
    from adapterd.loader.checks import ALLOWABLE

    # A comparison is no verdict: opinions about a version do not stand in its way.
    wish, choice = Wish(limits=load_limits(limits), allow=ALLOWABLE), BaseChoice(base, base_id, base_revision)
    a, b = (_side(text, choice, wish) for text in (left, right))
    found = changes(a.manifest, b.manifest)
    same_files = a.manifest.version_digest == b.manifest.version_digest
    norms = total_norm(a.manifest), total_norm(b.manifest)
    body = {
        "left": a.name,
        "right": b.name,
        "same_files": same_files,
        "bases": [a.manifest.base.as_json(), b.manifest.base.as_json()],
        "norm_ratio": norm_ratio(*norms),
        "modules": [change.as_json() for change in found],
    }
    about: list[tuple[str, object]] = [
        ("left", a.name),
        ("right", b.name),
        ("files", "the same" if same_files else "different"),
        ("base", _bases(a.manifest, b.manifest)),
        ("modules", f"{len(a.manifest.modules)} and {len(b.manifest.modules)}, {len(found)} differ"),
        ("norm", f"{norms[0]:.4g} → {norms[1]:.4g}"),
    ]
    return Report(body, [change.name for change in found], lambda: [facts(about), change_table(found)])


def _side(text: str, choice: BaseChoice, wish: Wish) -> _Sided:
    """Raises Refused for a folder that is no adapter; NotFound; what a registry answers."""
    from adapterd.loader.errors import error_from

    target = subject_of(text)
    if not isinstance(target, Path):
        ref, manifest, _ = catalog_manifest(target)
        return _Sided(ref, manifest)
    answer = verify_folder(target, choice, wish)
    if answer.manifest is None:
        raise error_from(answer.problems)
    return _Sided(text, answer.manifest)


def _bases(left: Manifest, right: Manifest) -> str:
    names = [f"{m.base.id}@{m.base.revision}" for m in (left, right)]
    return names[0] if names[0] == names[1] else " → ".join(names)
