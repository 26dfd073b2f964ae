"""`upload`: check here as the server will, sign if asked, send, and say what the version is called."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from adapterd.cli.author import Allow, Base, BaseId, BaseRevision, LimitsFile, OnlyPackage
from adapterd.cli.boundary import command
from adapterd.cli.inputs import NO_BASE, BaseChoice, load_limits, load_private_key, parse_codes, parse_name
from adapterd.cli.output import Report, facts, note, progress, size

if TYPE_CHECKING:
    from adapterd.cli.client import RegistryClient, VersionInfo
    from adapterd.cli.uploader import Plan
    from adapterd.cli.verification import Verification, Wish
    from adapterd.loader.base_model import BaseSpec
    from adapterd.loader.formats.files import Package
    from adapterd.loader.identity import FileEntry

MAX_CONFIG_BYTES = 1 << 20


def register(app: typer.Typer) -> None:
    """Put this room's command on `app`."""
    command(app, "upload")(upload)


def upload(
    directory: Annotated[Path, typer.Argument(metavar="PATH", help="A folder, zip or tar(.gz) with the adapter.")],
    name: Annotated[str, typer.Argument(metavar="TENANT/NAME", help="The adapter to publish a version of.")],
    *,
    base: Base = None,
    base_id: BaseId = None,
    base_revision: BaseRevision = None,
    sign: Annotated[
        Path | None, typer.Option("--sign", help="Sign first, with this private key.", show_default=False)
    ] = None,
    alias: Annotated[str | None, typer.Option(help="Point this alias to the new version.", show_default=False)] = None,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Continue an interrupted upload of the same files.")
    ] = True,
    limits: LimitsFile = None,
    allow: Allow = None,
    only_package: OnlyPackage = False,
) -> Report:
    """Publish a version: checked here first, sent in chunks, continued by the same command if interrupted."""
    from adapterd.cli.connection import connect
    from adapterd.cli.selection import beside, offered, opened
    from adapterd.cli.signing import sign_opened
    from adapterd.cli.verification import Wish
    from adapterd.loader.formats.files import file_entries
    from adapterd.loader.identity import SIGNATURE_FILE

    tenant, adapter = parse_name(name)
    key = load_private_key(sign) if sign else None
    wish = Wish(limits=load_limits(limits), allow=parse_codes(allow or ()))
    alone = only_package or offered(directory, wish.limits)
    with connect() as client, opened(directory, wish.limits, only_package=alone) as found:
        base_spec = _base(client, found, BaseChoice(base, base_id, base_revision))
        checked, files = _checked(found, directory, base_spec, wish)
        package = sign_opened(found, directory, files, key) if key else found
        files += file_entries(package, [n for n in package.names() if n == SIGNATURE_FILE])
        plan = _plan(tenant, adapter, base=base_spec, files=files, wish=wish, alias=alias)
        version = _send(client, package, plan, resume=resume)
    return _report(version, alias, checked, beside(directory, wish.limits) if alone else ())


def _base(client: RegistryClient, package: Package, choice: BaseChoice) -> BaseSpec:
    """The named base, or the one that `adapter_config.json` names, if the registry has it once."""
    if choice.text is not None:
        return choice.load()
    wanted = _configured_base(package)
    found = [b for b in client.bases() if b.get("id") == wanted[0] and wanted[1] in (None, b.get("revision"))]
    if len(found) == 1:
        return client.base(found[0]["id"], found[0]["revision"])
    there = ", ".join(f"{b.get('id')}@{b.get('revision')}" for b in client.bases()) or "none"
    raise typer.BadParameter(f"{NO_BASE}. Registered: {there}", param_hint="--base")


def _configured_base(package: Package) -> tuple[str | None, str | None]:
    """Id and revision as the configuration has them; only a hint, the checks come later.

    Raises Refused, with all that the names give away, for a package without a configuration.
    """
    from adapterd.loader.errors import error_from
    from adapterd.loader.formats.files import read_all
    from adapterd.loader.formats.package import judge_package
    from adapterd.loader.identity import CONFIG_FILE
    from adapterd.loader.limits import DEFAULT_LIMITS

    if CONFIG_FILE not in package.names():
        raise error_from(judge_package(package.sizes(), DEFAULT_LIMITS).problems)
    if package.sizes().get(CONFIG_FILE, MAX_CONFIG_BYTES + 1) > MAX_CONFIG_BYTES:
        return None, None
    try:
        config = json.loads(read_all(package.open(CONFIG_FILE)))
    except (ValueError, RecursionError):
        return None, None
    if not isinstance(config, dict):
        return None, None
    return config.get("base_model_name_or_path"), config.get("revision")


def _checked(package: Package, path: Path, base: BaseSpec, wish: Wish) -> tuple[Verification, tuple[FileEntry, ...]]:
    """The local verdict, and the files to send but `model.sig`. Raises Refused with all problems if it is no."""
    from adapterd.cli.verification import verify_package
    from adapterd.loader.errors import error_from

    with progress("checking", sum(package.sizes().values())) as advance:
        verdict = verify_package(package, base, wish, subject=str(path), progress=advance)
    if not verdict.ok or verdict.manifest is None:
        raise error_from(verdict.problems)
    return verdict, verdict.manifest.files


def _plan(
    tenant: str, adapter: str, *, base: BaseSpec, files: tuple[FileEntry, ...], wish: Wish, alias: str | None
) -> Plan:
    from adapterd.cli.uploader import Plan
    from adapterd.loader.identity import check_name

    if alias is not None:
        check_name("alias", alias)
    allowed = tuple(sorted(code.value for code in wish.allow))
    return Plan(tenant, adapter, base.id, base.revision, files, allowed, alias)


def _send(client: RegistryClient, package: Package, plan: Plan, *, resume: bool) -> VersionInfo:
    from adapterd.cli.uploader import Memory, Uploader

    memory = Memory.of(plan, client.url)
    _tell_if_published(client, plan)
    if resume and memory.load() is not None:
        note("continuing the interrupted upload of these files")
    with progress(f"uploading {size(plan.total_bytes)}", plan.total_bytes) as advance:
        return Uploader(client, plan, package, memory, advance).run(resume=resume)


def _report(version: VersionInfo, alias: str | None, checked: Verification, left_out: Sequence[str]) -> Report:
    body = {
        "ref": str(version.ref),
        "version_digest": version.digest,
        "version": {
            "tenant": version.tenant,
            "adapter": version.adapter,
            "number": version.number,
            "version_digest": version.digest,
            "base": version.base.as_json(),
            "publisher": version.publisher,
        },
        "alias": alias,
        "left_out": list(left_out),
        "problems": [p.as_json() for p in checked.problems],
    }
    shown: list[tuple[str, object]] = [
        ("ref", version.ref),
        ("version", version.number),
        ("digest", f"sha256:{version.digest}"),
        ("base", f"{version.base.id}@{version.base.revision}"),
        ("publisher", version.publisher),
        ("alias", alias),
    ]
    if left_out:
        shown.append(("left out", ", ".join(left_out)))
    return Report(body, [str(version.ref)], lambda: [facts(shown)], checked.problems)


def _tell_if_published(client: RegistryClient, plan: Plan) -> None:
    """The same files are the same version, and an upload of them only moves an alias: said, so that nobody wonders."""
    from adapterd.loader.errors import AdapterdError
    from adapterd.loader.identity import version_digest

    try:
        found = client.version(plan.tenant, plan.adapter, f"sha256:{version_digest(plan.files)}")
    except AdapterdError:  # only a remark: what is wrong with the server, the upload itself will say
        return
    note(f"these files are version {found.number} already; no other version will be made")
