"""Looking at the catalog and moving names in it: list, show, alias, yank, quarantine, release."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from adapterd.cli.boundary import command
from adapterd.cli.inputs import REF_HELP, parse_alias, parse_name
from adapterd.cli.output import Report, facts, rows, size, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from adapterd.cli.client import RegistryClient, VersionInfo

Verb = Literal["yank", "quarantine", "release"]
RefArgument = Annotated[str, typer.Argument(metavar="REF", help=REF_HELP)]
NameArgument = Annotated[str, typer.Argument(metavar="TENANT/NAME")]
AliasArgument = Annotated[str, typer.Argument(metavar="TENANT/NAME:ALIAS")]


def register(app: typer.Typer) -> None:
    """Put this room's commands on `app`."""
    command(app, "list")(list_)
    command(app, "show")(show)
    command(app, "yank")(yank)
    command(app, "quarantine")(quarantine)
    command(app, "release")(release)
    alias = typer.Typer(help="Movable names of versions.", no_args_is_help=True)
    command(alias, "alias.set")(alias_set)
    command(alias, "alias.list")(alias_list)
    command(alias, "alias.history")(alias_history)
    app.add_typer(alias, name="alias")


def list_(
    what: Annotated[
        str | None, typer.Argument(metavar="[TENANT|TENANT/NAME]", help="Default: the token's own tenant.")
    ] = None,
) -> Report:
    """List a tenant's adapters, or an adapter's versions."""
    from adapterd.cli.connection import connect
    from adapterd.loader.identity import check_name

    with connect() as client:
        if what is not None and "/" in what:
            return _versions(client, *parse_name(what))
        tenant = check_name("tenant", what) if what else _own_tenant(client)
        return _adapters(client, tenant)


def _own_tenant(client: RegistryClient) -> str:
    tenant = client.whoami().get("tenant")
    if not tenant:
        raise typer.BadParameter("an operator's token has no tenant of its own: name one", param_hint="TENANT")
    return str(tenant)


def _adapters(client: RegistryClient, tenant: str) -> Report:
    items = client.adapters(tenant)
    lines = ((a.get("name"), a.get("versions"), _aliases(a), a.get("updated_at")) for a in items)
    return Report(
        {"tenant": tenant, "adapters": items},
        [f"{tenant}/{a['name']}" for a in items],
        lambda: [rows(table("adapter", "versions", "aliases", "updated", right=["versions"]), lines)],
    )


def _aliases(adapter: dict[str, Any]) -> str:
    return ", ".join(sorted(adapter.get("aliases") or {})) or "-"


def _versions(client: RegistryClient, tenant: str, name: str) -> Report:
    items = client.versions(tenant, name)
    lines = (
        (
            v.get("number"),
            f"sha256:{v.get('version_digest')}",
            v.get("state"),
            v.get("publisher"),
            v.get("created_at"),
        )
        for v in items
    )
    return Report(
        {"adapter": f"{tenant}/{name}", "versions": items},
        [f"{tenant}/{name}@sha256:{v['version_digest']}" for v in items],
        lambda: [rows(table("version", "digest", "state", "publisher", "created", right=["version"]), lines)],
    )


def show(ref: RefArgument) -> Report:
    """Show one version: files, base, publisher, state."""
    from adapterd.cli.connection import connect

    with connect() as client:
        version = _version(client, ref)
    return Report({"ref": str(version.ref), "version": dict(version.raw)}, [str(version.ref)], lambda: _shown(version))


def _version(client: RegistryClient, text: str) -> VersionInfo:
    from adapterd.loader.identity import Ref

    found = client.resolve_one(Ref.parse(text))
    return client.version(found.tenant, found.adapter, f"sha256:{found.digest}")


def _shown(version: VersionInfo) -> Iterator[RenderableType]:
    yield facts(
        [
            ("ref", version.ref),
            ("version", version.number),
            ("state", version.state),
            ("base", f"{version.base.id}@{version.base.revision}"),
            ("publisher", version.publisher),
            ("created", version.created_at),
        ]
    )
    files = ((f.path, size(f.size), f.sha256) for f in version.files)
    yield rows(table("file", "size", "sha256", right=["size"]), files)


def alias_set(
    alias: AliasArgument,
    version: Annotated[str, typer.Argument(help="A version number, sha256:…, or another REF of the same adapter.")],
) -> Report:
    """Point an alias to a version; refused if somebody else moves it at the same time."""
    from adapterd.cli.connection import connect

    tenant, name, word = parse_alias(alias)
    with connect() as client:
        digest = _digest_of(client, tenant, name, version)
        before = client.alias(tenant, name, word)
        client.set_alias(tenant, name, word, digest, before)
    body = {"alias": f"{tenant}/{name}:{word}", "version_digest": digest, "before": before}
    return Report(body, [f"{tenant}/{name}@sha256:{digest}"], lambda: [facts(body.items())])


def _digest_of(client: RegistryClient, tenant: str, name: str, which: str) -> str:
    from adapterd.loader.errors import Code, error

    if which.isdecimal() or which.startswith("sha256:"):
        return client.version(tenant, name, which).digest
    found = _version(client, which)
    if (found.tenant, found.adapter) != (tenant, name):
        raise error(Code.REF_INVALID, which, f"is no version of {tenant}/{name}")
    return found.digest


def alias_list(name: NameArgument) -> Report:
    """List an adapter's aliases."""
    from adapterd.cli.connection import connect

    tenant, adapter = parse_name(name)
    with connect() as client:
        aliases: dict[str, Any] = client.adapter(tenant, adapter).get("aliases") or {}
    lines = sorted((word, _pointed(target)) for word, target in aliases.items())
    body = {"adapter": f"{tenant}/{adapter}", "aliases": aliases}
    return Report(
        body,
        [f"{tenant}/{adapter}:{word}" for word, _ in lines],
        lambda: [rows(table("alias", "version"), lines)],
    )


def _pointed(target: object) -> str:
    """An alias's target as the server gives it: a digest, or an object that has one."""
    digest = target.get("version_digest") if isinstance(target, dict) else target
    return f"sha256:{str(digest).removeprefix('sha256:')}"


def alias_history(alias: AliasArgument) -> Report:
    """Show where an alias has pointed, newest first."""
    from adapterd.cli.connection import connect

    tenant, name, word = parse_alias(alias)
    with connect() as client:
        items = client.alias_history(tenant, name, word)
    lines = ((i.get("moved_at"), i.get("number"), f"sha256:{i.get('version_digest')}", i.get("by")) for i in items)
    return Report(
        {"alias": f"{tenant}/{name}:{word}", "history": items},
        [f"sha256:{i['version_digest']}" for i in items],
        lambda: [rows(table("moved", "version", "digest", "by", right=["version"]), lines)],
    )


def yank(ref: RefArgument) -> Report:
    """Withdraw a version from new use; whoever pins its digest keeps it."""
    return _withdraw(ref, "yank")


def quarantine(ref: RefArgument) -> Report:
    """Stop a version from being served at all, until it is released."""
    return _withdraw(ref, "quarantine")


def release(ref: RefArgument) -> Report:
    """Undo `yank` or `quarantine`; a withdrawn version is named by its digest (`adapterctl list TENANT/NAME`)."""
    return _withdraw(ref, "release")


def _withdraw(text: str, verb: Verb) -> Report:
    """A digest in the REF is taken as it is, so that a quarantined version can be named, too."""
    from adapterd.cli.connection import connect
    from adapterd.loader.identity import Ref

    ref = Ref.parse(text)
    with connect() as client:
        digest = ref.digest if ref.digest and not ref.alias else client.resolve_one(ref).digest
        client.withdraw(ref.tenant, ref.name, digest, verb)
        state = client.version(ref.tenant, ref.name, f"sha256:{digest}").state
    body = {"ref": f"{ref.tenant}/{ref.name}@sha256:{digest}", "state": state}
    return Report(body, [body["ref"]], lambda: [facts(body.items())])
