"""Tenants, their policy, tokens and publisher keys on the server."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from adapterd.cli.boundary import command
from adapterd.cli.inputs import load_limits, load_public_key, parse_codes, read_small
from adapterd.cli.output import Report, facts, note, rows, table

if TYPE_CHECKING:
    from adapterd.cli.client import RegistryClient

Tenant = Annotated[str, typer.Argument(metavar="TENANT")]
DEFAULT_DAYS = 90
DEFAULT_SCOPES = ("adapters:read",)


def register(app: typer.Typer) -> None:
    """Put this room's commands on `app`."""
    tenant = typer.Typer(help="Tenants (operator).", no_args_is_help=True)
    command(tenant, "tenant.create")(tenant_create)
    command(tenant, "tenant.list")(tenant_list)
    command(tenant, "tenant.policy")(tenant_policy)
    app.add_typer(tenant, name="tenant")
    token = typer.Typer(help="Access tokens.", no_args_is_help=True)
    command(token, "token.create")(token_create)
    command(token, "token.list")(token_list)
    command(token, "token.revoke")(token_revoke)
    command(token, "token.save")(token_save)
    command(token, "token.whoami")(token_whoami)
    app.add_typer(token, name="token")
    key = typer.Typer(help="Publisher keys that the server accepts uploads from.", no_args_is_help=True)
    command(key, "key.add")(key_add)
    command(key, "key.list")(key_list)
    command(key, "key.revoke")(key_revoke)
    app.add_typer(key, name="key")


def tenant_create(name: Tenant) -> Report:
    """Make a tenant."""
    from adapterd.cli.connection import connect

    with connect() as client:
        made = client.create_tenant(name)
    return Report({"tenant": made}, [name], lambda: [facts(made.items())])


def tenant_list() -> Report:
    """List all tenants."""
    from adapterd.cli.connection import connect

    with connect() as client:
        items = client.tenants()
    lines = ((t.get("name"), t.get("created_at")) for t in items)
    return Report(
        {"tenants": items}, [str(t["name"]) for t in items], lambda: [rows(table("tenant", "created"), lines)]
    )


def tenant_policy(
    name: Tenant,
    *,
    require_signature: Annotated[
        bool | None,
        typer.Option("--require-signature/--allow-unsigned", help="Whether uploads must be signed."),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option("--allow", help="Codes that uploaders may allow; replaces the list.", show_default=False),
    ] = None,
    refuse: Annotated[
        list[str] | None,
        typer.Option("--refuse", help="Warnings that are refusals here; replaces the list.", show_default=False),
    ] = None,
    limits: Annotated[
        Path | None, typer.Option(help="JSON file with the tenant's caps (operator).", show_default=False)
    ] = None,
) -> Report:
    """Show a tenant's policy, or change what is given."""
    from adapterd.cli.connection import connect

    changes: dict[str, Any] = {}
    if require_signature is not None:
        changes["require_signature"] = require_signature
    if allow is not None:
        changes["allow"] = sorted(code.value for code in parse_codes(allow))
    if refuse is not None:
        changes["refuse"] = sorted(code.value for code in parse_codes(refuse))
    if limits is not None:
        changes["limits"] = load_limits(limits).as_json()
    with connect() as client:
        policy, tag = client.policy(name)
        if changes:
            policy = client.set_policy(name, {**policy, **changes}, tag)
    return Report({"tenant": name, "policy": policy}, [name], lambda: [facts(policy.items())])


def token_create(
    name: Annotated[str | None, typer.Argument(metavar="[TENANT]", help="Whose token it is.")] = None,
    *,
    tenant: Annotated[str | None, typer.Option(help="The same as the argument.", show_default=False)] = None,
    all_tenants: Annotated[
        bool, typer.Option("--all-tenants", help="An operator's token, for a worker that serves all tenants.")
    ] = False,
    kind: Annotated[str, typer.Option(help="u (person), s (service) or w (worker).")] = "u",
    scope: Annotated[
        list[str] | None, typer.Option(help="Repeatable. Default: adapters:read.", show_default=False)
    ] = None,
    days: Annotated[int, typer.Option(min=1, help="Days until it expires.")] = DEFAULT_DAYS,
    adapter: Annotated[
        list[str] | None,
        typer.Option(help="Pattern of adapter names. Repeatable. Default: all.", show_default=False),
    ] = None,
) -> Report:
    """Make a token. It is shown once, on stdout, and never again."""
    from adapterd.cli.connection import connect

    owner = tenant or name
    if (owner is None) != all_tenants or None not in (tenant, name):
        raise typer.BadParameter("name one TENANT, or --all-tenants", param_hint="TENANT")
    wanted = {
        "kind": kind,
        "scopes": scope or list(DEFAULT_SCOPES),
        "expires_in_days": days,
        "adapters": adapter or ["*"],
    }
    with connect() as client:
        made = client.create_token(owner, wanted)
    note("keep the token now: it cannot be shown again")
    return Report({"tenant": owner, **made}, [str(made["token"])], lambda: [facts(made.items())])


def token_list(
    tenant: Annotated[str | None, typer.Argument(metavar="[TENANT]", help="Default: whose token you use.")] = None,
) -> Report:
    """List tokens, without their secrets."""
    from adapterd.cli.connection import connect

    with connect() as client:
        items = client.tokens(tenant or _owner(client))
    columns = ("id", "kind", "scopes", "adapters", "expires_at", "revoked_at")
    return Report(
        {"tokens": items},
        [str(t["id"]) for t in items],
        lambda: [rows(table(*columns), _cells(items, columns))],
    )


def token_revoke(
    token_id: Annotated[str, typer.Argument(metavar="ID")],
    *,
    tenant: Annotated[
        str | None, typer.Option(help="Whose it is. Default: whose token you use.", show_default=False)
    ] = None,
) -> Report:
    """Revoke a token at once."""
    from adapterd.cli.connection import connect

    with connect() as client:
        owner = tenant or _owner(client)
        client.revoke_token(owner, token_id)
    return Report({"tenant": owner, "revoked": token_id}, [token_id])


def _owner(client: RegistryClient) -> str | None:
    """The tenant of the token in use; None for the operator."""
    tenant = client.whoami().get("tenant")
    return str(tenant) if tenant else None


def token_save() -> Report:
    """Store the token from stdin in a file that only you can read."""
    from adapterd.cli.credentials import checked_token, save_token

    token = checked_token(_typed_token(), "stdin")
    path = save_token(token)
    return Report({"file": str(path)}, [str(path)])


def _typed_token() -> bytes:
    """Typed without an echo on a terminal; else the first line of stdin, without a prompt; of a long one, the start."""
    import getpass

    from adapterd.cli.credentials import MAX_TOKEN_BYTES

    if sys.stdin.isatty():
        return getpass.getpass("token: ", stream=sys.stderr).encode()
    return sys.stdin.buffer.readline(MAX_TOKEN_BYTES + 2).rstrip(b"\r\n")


def token_whoami() -> Report:
    """Show what the current token may do."""
    from adapterd.cli.connection import connect

    with connect() as client:
        answer = client.whoami()
    return Report({"caller": answer}, [str(answer.get("tenant") or "operator")], lambda: [facts(answer.items())])


def key_add(
    tenant: Tenant,
    public_key: Annotated[Path, typer.Argument(metavar="PUB", help="PEM file, as `adapterctl keygen` makes it.")],
    name: Annotated[
        str | None, typer.Option(help="What people call it. Default: the file's name.", show_default=False)
    ] = None,
) -> Report:
    """Accept uploads signed with this key."""
    from adapterd.cli.connection import connect
    from adapterd.cli.inputs import MAX_KEY_BYTES

    load_public_key(public_key)  # a private key, or no key at all, never leaves this machine
    pem = read_small(public_key, MAX_KEY_BYTES).decode("ascii")
    with connect() as client:
        made = client.add_key(tenant, name or public_key.name, pem)
    return Report({"key": made}, [str(made["key_id"])], lambda: [facts(made.items())])


def key_list(tenant: Tenant) -> Report:
    """List a tenant's publisher keys."""
    from adapterd.cli.connection import connect

    with connect() as client:
        items = client.keys(tenant)
    columns = ("key_id", "name", "status")
    return Report(
        {"keys": items},
        [str(k["key_id"]) for k in items],
        lambda: [rows(table(*columns), _cells(items, columns))],
    )


def key_revoke(tenant: Tenant, key_id: Annotated[str, typer.Argument(metavar="KEY_ID")]) -> Report:
    """Take nothing more that this key signs."""
    from adapterd.cli.connection import connect

    with connect() as client:
        client.revoke_key(tenant, key_id)
    return Report({"tenant": tenant, "revoked": key_id}, [key_id])


def _cells(items: Sequence[dict[str, Any]], columns: Sequence[str]) -> list[list[object]]:
    return [[_joined(item.get(column)) for column in columns] for item in items]


def _joined(value: object) -> object:
    return ", ".join(map(str, value)) if isinstance(value, list) else value
