"""`merge`: a base and one adapter into a model of its own, offline, for deployments that serve just one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from adapterd.cli.author import Allow, BaseId, BaseRevision, Keys, LimitsFile, PolicyName, Subject, wish_of
from adapterd.cli.boundary import command
from adapterd.cli.inputs import BaseChoice, subject_of
from adapterd.cli.output import Report, facts, progress, rows, size, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from adapterd.cli.verification import Verification, Wish
    from adapterd.loader.base_model import BaseSpec
    from adapterd.loader.errors import Problem
    from adapterd.loader.formats.files import Package
    from adapterd.loader.identity import Ref
    from adapterd.loader.manifest import Manifest
    from adapterd.loader.merge import Plan

BaseFolder = Annotated[
    Path, typer.Option("--base", help="The base model's directory: config.json and safetensors.", metavar="DIR")
]
Out = Annotated[Path, typer.Option("--out", "-o", help="The folder to make; nothing is overwritten.", metavar="DIR")]
Dequantize = Annotated[
    str | None,
    typer.Option(help="bf16, fp16 or fp32: write a quantised base's weights as floats.", show_default=False),
]
Requantize = Annotated[bool, typer.Option("--requantize", help="Put merged weights back into the base's own scheme.")]

DTYPES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}


@dataclass(frozen=True)
class Adapter:
    """An adapter whose verdict is good, with its files still open.

    Attributes:
        subject: its pinned REF, or the path that was given.
        base: the table that it is for, as the base's directory has it.
    """

    subject: str
    package: Package
    base: BaseSpec
    manifest: Manifest
    problems: tuple[Problem, ...]


def register(app: typer.Typer) -> None:
    """Put this room's command on `app`."""
    command(app, "merge")(merge)


def merge(
    subject: Subject,
    *,
    base: BaseFolder,
    out: Out,
    base_id: BaseId = None,
    base_revision: BaseRevision = None,
    dequantize: Dequantize = None,
    requantize: Requantize = False,
    key: Keys = None,
    policy: PolicyName = None,
    limits: LimitsFile = None,
    allow: Allow = None,
) -> Report:
    """Write the base with an adapter merged into its weights; the base itself is never touched."""
    from adapterd.cli.credentials import named
    from adapterd.loader.base_files import read_config
    from adapterd.loader.merge.output import must_be_free

    wish = wish_of(key, policy, limits, allow, None, None)
    dtype = _dtype(dequantize, requantize=requantize)
    must_be_free(named(out), base)
    read_config(base)  # a base that is none is told before anything is fetched
    choice = BaseChoice(str(base), base_id, base_revision)
    with _adapter(subject_of(subject), choice, wish) as adapter:
        plan = _written(adapter, base, out, dtype, requantize=requantize)
    problems = (*adapter.problems, *_vanished(plan))
    body = _body(adapter, out, plan, problems)
    return Report(body, [str(out)], lambda: _view(body, plan), problems)


def _dtype(word: str | None, *, requantize: bool) -> str | None:
    if word is None:
        return None
    if requantize:
        raise typer.BadParameter("--requantize says otherwise: give one of the two", param_hint="--dequantize")
    if word not in DTYPES:
        raise typer.BadParameter(f"{word!r} is none of {', '.join(DTYPES)}", param_hint="--dequantize")
    return DTYPES[word]


# ------------------------------------------------------------------ the adapter, verified


@contextmanager
def _adapter(subject: Path | Ref, choice: BaseChoice, wish: Wish) -> Iterator[Adapter]:
    """A REF as `pull` gets it, verified against the trust file; a folder or archive as `verify` judges it.

    Raises:
        AdapterdError: it could not be had, is refused, or is for another base.
    """
    if isinstance(subject, Path):
        with _local(subject, choice, wish) as adapter:
            yield adapter
    else:
        with _published(subject, choice, wish) as adapter:
            yield adapter


@contextmanager
def _local(path: Path, choice: BaseChoice, wish: Wish) -> Iterator[Adapter]:
    from adapterd.cli.selection import opened

    with opened(path, wish.limits, only_package=False) as package:
        yield _judged(package, choice.load(), wish, str(path))


@contextmanager
def _published(ref: Ref, choice: BaseChoice, wish: Wish) -> Iterator[Adapter]:
    from dataclasses import replace

    from adapterd.cli.download import fetched
    from adapterd.loader.formats.files import DirectoryPackage
    from adapterd.loader.scratch import scratch_folder

    with (
        scratch_folder("verify") as scratch,
        fetched(ref, BaseChoice(None), scratch) as version,
        DirectoryPackage.open_dir(version.package, wish.limits) as package,
    ):
        adapter = _judged(package, version.base, wish, str(version.ref))
        yield replace(adapter, base=_same_base(choice, version.base))


def _judged(package: Package, base: BaseSpec, wish: Wish, subject: str) -> Adapter:
    from adapterd.cli.verification import verify_package
    from adapterd.loader.errors import error_from

    with progress("checking", sum(package.sizes().values())) as advance:
        answer: Verification = verify_package(package, base, wish, subject=subject, progress=advance)
    if not answer.ok or answer.manifest is None:
        raise error_from(answer.problems)
    return Adapter(subject, package, base, answer.manifest, answer.problems)


def _same_base(choice: BaseChoice, wanted: BaseSpec) -> BaseSpec:
    """The directory's table, if it is the one that the statement pins; and its weights, if their digest is known.

    Raises:
        Refused: BASE_MISMATCH, BASE_REVISION_MISMATCH, HASH_MISMATCH.
    """
    from adapterd.loader.base_weights import weights_bytes, weights_digest
    from adapterd.loader.errors import Code, error

    folder = Path(choice.text or "")
    if choice.id not in (None, wanted.id):
        raise error(Code.BASE_MISMATCH, "--base-id", f"is {choice.id}, the adapter is for {wanted.id}")
    if choice.revision not in (None, wanted.revision):
        message = f"is {choice.revision}, the adapter is for {wanted.revision}"
        raise error(Code.BASE_REVISION_MISMATCH, "--base-revision", message)
    found = BaseChoice(choice.text, wanted.id, wanted.revision).load()
    if found.modules != wanted.modules:
        message = f"its modules are not those of {wanted.id}@{wanted.revision}"
        raise error(Code.BASE_MISMATCH, str(folder), message, "Name the directory of the base that the adapter is for.")
    if wanted.weights_digest is not None:
        with progress("reading the base", weights_bytes(folder)) as advance:
            digest = weights_digest(folder, advance)
        if digest != wanted.weights_digest:
            message = f"its weights have the digest {digest}, those of the registered base {wanted.weights_digest}"
            raise error(Code.HASH_MISMATCH, str(folder), message, "Is it another revision, or a fine-tune of the base?")
    return found


# ------------------------------------------------------------------ the model


def _written(adapter: Adapter, base: Path, out: Path, dtype: str | None, *, requantize: bool) -> Plan:
    from adapterd.loader.identity import WEIGHTS_FILE
    from adapterd.loader.merge import Wish, new_folder, opened_base, plan_merge

    with opened_base(base) as folder:
        weights = adapter.package.open(WEIGHTS_FILE)
        plan = plan_merge(folder, adapter.base, adapter.manifest, weights, Wish(dtype, requantize))
        with progress("merging", plan.model.total_bytes) as advance:
            new_folder(plan.model, out, base, advance)
    return plan


def _vanished(plan: Plan) -> tuple[Problem, ...]:
    """One warning for all modules whose delta was rounded away."""
    from adapterd.loader.errors import Code, warn

    gone = [name for name, loss in plan.losses.items() if loss.vanished]
    if not gone:
        return ()
    dtype = plan.dtypes[gone[0]]
    message = f"the delta of {len(gone)} of {len(plan.losses)} modules is lost whole: it is smaller than a step of"
    hint = (
        "Merge into a base of float32, or serve the adapter: served, it is added to the outputs and not rounded away."
    )
    return (warn(Code.ZERO_DELTA, gone[0], f"{message} {dtype}", hint),)


def _body(adapter: Adapter, out: Path, plan: Plan, problems: tuple[Problem, ...]) -> dict[str, Any]:
    return {
        "subject": adapter.subject,
        "directory": str(out),
        "version_digest": adapter.manifest.version_digest,
        "base": adapter.manifest.base.as_json(),
        "mode": plan.mode,
        "quantization": plan.scheme.words if plan.scheme else None,
        "modules": [
            {"name": name, "tensor": plan.tensors[name], "dtype": plan.dtypes[name], **loss.as_json()}
            for name, loss in sorted(plan.losses.items())
        ],
        "vanished": sorted(name for name, loss in plan.losses.items() if loss.vanished),
        "total_bytes": plan.model.total_bytes,
        "left_out": list(plan.left_out),
        "problems": [p.as_json() for p in problems],
    }


def _view(body: dict[str, Any], plan: Plan) -> Iterator[RenderableType]:
    yield facts(
        [
            ("folder", body["directory"]),
            ("adapter", f"{body['subject']} (sha256:{body['version_digest']})"),
            ("base", f"{body['base']['id']}@{body['base']['revision']}"),
            ("mode", body["mode"] if plan.scheme is None else f"{body['mode']}, from {body['quantization']}"),
            ("size", size(body["total_bytes"])),
            ("left out", ", ".join(body["left_out"]) or None),
        ]
    )
    columns = ("module", "dtype", "largest delta", "largest error", "lost")
    losses = sorted(plan.losses.items())
    lines = (
        (name, plan.dtypes[name], f"{x.delta_max:.3g}", f"{x.lost_max:.3g}", f"{x.share:.2%}") for name, x in losses
    )
    yield rows(table(*columns, right=columns[2:]), lines)
