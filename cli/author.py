"""What an author does with a package before it leaves the machine: verify, inspect, keygen, sign."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from adapterd.cli.boundary import command
from adapterd.cli.inputs import (
    BASE_HELP,
    BaseChoice,
    load_limits,
    load_private_key,
    load_public_key,
    parse_codes,
    parse_digests,
    subject_of,
)
from adapterd.cli.output import Report, facts, progress, size

if TYPE_CHECKING:
    from rich.console import RenderableType

    from adapterd.cli.verification import Policy, Signature, Verification, Wish
    from adapterd.loader.base_model import BaseSpec
    from adapterd.loader.identity import Ref
    from adapterd.loader.manifest import Manifest

Subject = Annotated[
    str,
    typer.Argument(
        metavar="PATH|REF",
        help=r"A folder, zip or tar(.gz) with an adapter, or a REF (tenant/name[:alias]\[@sha256:…]).",
    ),
]
Base = Annotated[str | None, typer.Option("--base", help=BASE_HELP, show_default=False)]
BaseId = Annotated[
    str | None, typer.Option(help="The base's id, when --base is a model directory.", show_default=False)
]
BaseRevision = Annotated[str | None, typer.Option(help="Its revision: 40-hex commit or sha256:….", show_default=False)]
Keys = Annotated[
    list[Path] | None,
    typer.Option("--key", help="Publisher's public key (PEM). Repeatable.", show_default=False),
]
PolicyName = Annotated[
    str | None,
    typer.Option("--policy", help="strict, warn or permissive: what a bad signature means.", show_default=False),
]
LimitsFile = Annotated[Path | None, typer.Option("--limits", help="JSON file with caps.", show_default=False)]
Allow = Annotated[
    list[str] | None,
    typer.Option("--allow", help="Turn this refusal into a warning. Repeatable.", show_default=False),
]
Refuse = Annotated[
    list[str] | None,
    typer.Option("--refuse", help="Turn this warning into a refusal. Repeatable.", show_default=False),
]
Declared = Annotated[
    list[str] | None,
    typer.Option("--sha256", help="NAME=HEX: a digest that must hold. Repeatable.", show_default=False),
]
OnlyPackage = Annotated[
    bool, typer.Option("--only-package", help="Take the adapter's own files alone, whatever lies beside them.")
]
SigningKey = Annotated[Path, typer.Option("--key", "-k", help="Private key (PEM), as `adapterctl keygen` makes it.")]
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder with the adapter.")]

PUBLIC_SUFFIX = ".pub"


def register(app: typer.Typer) -> None:
    """Put this room's commands on `app`."""
    command(app, "verify")(verify)
    command(app, "inspect")(inspect)
    command(app, "keygen")(keygen)
    command(app, "sign")(sign)


def verify(
    subject: Subject,
    *,
    base: Base = None,
    base_id: BaseId = None,
    base_revision: BaseRevision = None,
    key: Keys = None,
    policy: PolicyName = None,
    limits: LimitsFile = None,
    allow: Allow = None,
    refuse: Refuse = None,
    sha256: Declared = None,
    only_package: OnlyPackage = False,
) -> Report:
    """Check structure, effect and signature of an adapter; a folder is checked offline."""
    wish = wish_of(key, policy, limits, allow, refuse, sha256)
    choice = BaseChoice(base, base_id, base_revision)
    target = subject_of(subject)
    if isinstance(target, Path):
        answer = verify_folder(target, choice, wish, only_package=only_package)
    else:
        answer = _verify_ref(target, choice, wish)
    ids = [answer.manifest.version_digest] if answer.manifest else []
    return Report(answer.as_json(), ids, lambda: _verdict_view(answer), answer.problems, answer.status)


def inspect(
    subject: Subject,
    *,
    base: Base = None,
    base_id: BaseId = None,
    base_revision: BaseRevision = None,
    limits: LimitsFile = None,
) -> Report:
    """Show what an adapter holds: modules, ranks, scaling, dtype, bytes, norms, and how much of the base it adapts."""
    from adapterd.cli.modules import manifest_view
    from adapterd.loader.checks.share import share_of

    target = subject_of(subject)
    if isinstance(target, Path):
        choice = BaseChoice(base, base_id, base_revision)
        answer = verify_folder(target, choice, wish_of(None, None, limits, None, None, None))
        body = {k: v for k, v in answer.as_json().items() if k != "signature"}
        manifest, problems, status = answer.manifest, answer.problems, answer.status
        share = share_of((m.name for m in manifest.modules), choice.load()) if manifest else None
    else:
        _, manifest, spec = catalog_manifest(target)
        body = {"subject": subject, "problems": [], "manifest": manifest.as_json()}
        problems, status, share = (), 0, share_of((m.name for m in manifest.modules), spec)
    ids = [module.name for module in manifest.modules] if manifest else []
    body["coverage"] = share.as_json() if share else None
    return Report(body, ids, lambda: manifest_view(manifest, share), problems, status)


def keygen(
    path: Annotated[
        Path, typer.Argument(help="Where the private key goes; the public one beside it with .pub.")
    ] = Path("adapterd-publisher.pem"),
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The same as the argument.", show_default=False)
    ] = None,
) -> Report:
    """Make a publisher's key pair (ECDSA P-256). Nothing is ever overwritten."""
    from adapterd.cli.credentials import named, write_together
    from adapterd.loader.errors import Code, error
    from adapterd.loader.trust.keys import generate_publisher_key

    private = named(out or path)
    public = private.with_name(private.name + PUBLIC_SUFFIX)
    for taken in (private, public):
        if taken.exists() or taken.is_symlink():
            raise error(Code.ALREADY_EXISTS, str(taken), "a key is never overwritten", "Name another place.")
    key = generate_publisher_key()
    write_together((public, key.public.pem.encode(), 0o644), (private, key.to_pem(), 0o600))
    body = {"private_key": str(private), "public_key": str(public), "key_id": key.public.key_id}
    return Report(body, [key.public.key_id], lambda: [facts(body.items())])


def sign(directory: Folder, key: SigningKey) -> Report:
    """Sign every file of the folder (OpenSSF Model Signing) and write `model.sig`."""
    from adapterd.cli.signing import sign_package, signable_names
    from adapterd.loader.errors import Code, error
    from adapterd.loader.formats.files import DirectoryPackage, file_entries
    from adapterd.loader.identity import SIGNATURE_FILE
    from adapterd.loader.limits import DEFAULT_LIMITS
    from adapterd.loader.parts import sweep_beside

    private = load_private_key(key)
    if directory.is_file():
        hint = "Unpack it and sign the folder, or sign and send at once: `adapterctl upload PATH --sign KEY`."
        raise error(Code.REQUEST_INVALID, str(directory), "an archive is not changed to hold a signature", hint)
    sweep_beside(directory / SIGNATURE_FILE)  # else what a killed `sign` left would be signed
    with DirectoryPackage.open_dir(directory, DEFAULT_LIMITS) as package:
        names = signable_names(package)
        with progress("hashing", sum(package.sizes().values())) as advance:
            entries = file_entries(package, names, advance)
        made = sign_package(package, directory, entries, private)
    body = {
        "signature": str(directory / SIGNATURE_FILE),
        "key_id": made.key_id,
        "root_digest": made.root_digest,
    }
    return Report(body, [made.root_digest], lambda: [facts(body.items())])


def wish_of(
    key: list[Path] | None,
    policy: str | None,
    limits: Path | None,
    allow: list[str] | None,
    refuse: list[str] | None,
    sha256: list[str] | None,
) -> Wish:
    """The options of `verify` and its like, read."""
    from adapterd.cli.verification import Wish

    return Wish(
        load_limits(limits), _policy(policy), tuple(load_public_key(path) for path in key or ()),
        parse_codes(allow or ()), parse_codes(refuse or ()), parse_digests(sha256 or ()),
    )  # fmt: skip


def _policy(name: str | None) -> Policy | None:
    from adapterd.cli.verification import Policy

    if name is None:
        return None
    try:
        return Policy(name)
    except ValueError:
        raise typer.BadParameter(f"{name!r} is none of strict, warn, permissive", param_hint="--policy") from None


def verify_folder(path: Path, choice: BaseChoice, wish: Wish, *, only_package: bool = False) -> Verification:
    """Verify a folder or an archive; what cannot be opened, and a base that cannot be had, are answers too."""
    from adapterd.cli.selection import opened
    from adapterd.cli.verification import failed, verify_package
    from adapterd.loader.errors import AdapterdError

    try:
        with opened(path, wish.limits, only_package=only_package) as package:
            base = choice.load()
            with progress("checking", sum(package.sizes().values())) as advance:
                return verify_package(package, base, wish, subject=str(path), progress=advance)
    except AdapterdError as fault:
        return failed(str(path), fault)


def _verify_ref(ref: Ref, choice: BaseChoice, wish: Wish) -> Verification:
    """Fetch into a folder that is thrown away, verify as a worker would, then check the content again."""
    from adapterd.cli.download import verify_ref
    from adapterd.cli.verification import failed
    from adapterd.loader.errors import AdapterdError

    try:
        return verify_ref(ref, choice, wish)
    except AdapterdError as fault:
        return failed(str(ref), fault)


def catalog_manifest(ref: Ref) -> tuple[str, Manifest, BaseSpec]:
    """The pinned REF, the manifest and the base of a version, as the registry has them."""
    from adapterd.cli.connection import connect

    with connect() as client:
        found = client.resolve_one(ref)
        version = client.version(found.tenant, found.adapter, f"sha256:{found.digest}")
        return str(version.ref), version.manifest(), client.base(version.base.id, version.base.revision)


def _verdict_view(answer: Verification) -> Iterator[RenderableType]:
    from adapterd.cli.selection import sorting

    pairs: list[tuple[str, object]] = [
        ("subject", answer.subject),
        ("verdict", "ok" if answer.ok else "not ok"),
    ]
    pairs.append(("signature", _signature_words(answer.signature)))
    if answer.manifest:
        m = answer.manifest
        pairs += [
            ("version digest", f"sha256:{m.version_digest}"),
            ("base", f"{m.base.id}@{m.base.revision}"),
            ("modules", len(m.modules)),
            ("size", size(m.total_bytes)),
        ]
    if answer.contents and answer.contents.refused:
        pairs += sorting(answer.contents)
    yield facts(pairs)


def _signature_words(signature: Signature) -> str:
    if signature.status == "valid":
        return f"valid, by key {signature.key_id}"
    return signature.status.replace("-", " ")
