"""The trust file of this machine: whose signatures count. Nothing in it, nothing trusted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from adapterd.cli.boundary import command
from adapterd.cli.environment import trust_path
from adapterd.cli.inputs import load_public_key
from adapterd.cli.output import Report, facts, note, rows, table

if TYPE_CHECKING:
    from adapterd.loader.trust.policy import TrustStore

PublicKeyFile = Annotated[Path, typer.Argument(metavar="PUB", help="PEM public key.")]


def register(app: typer.Typer) -> None:
    """Put this room's commands on `app`."""
    trust = typer.Typer(help="The trust file that workers and this command check against.", no_args_is_help=True)
    command(trust, "trust.init")(init)
    command(trust, "trust.add-key")(add_key)
    command(trust, "trust.revoke-key")(revoke_key)
    command(trust, "trust.show")(show)
    app.add_typer(trust, name="trust")


def init(
    admission_key: Annotated[
        list[Path] | None,
        typer.Option("--admission-key", help="The registry's own public key (PEM). Repeatable.", show_default=False),
    ] = None,
    from_server: Annotated[
        bool, typer.Option("--from-server", help="Take the admission keys that ADAPTERD_URL shows now.")
    ] = False,
) -> Report:
    """Make the trust file. Without keys it trusts nothing; an existing file is not touched."""
    from adapterd.loader.parts import alone_in
    from adapterd.loader.trust.policy import TrustStore

    path, store = trust_path(), TrustStore()
    _must_be_new(path)
    for file in admission_key or ():
        store.add_admission_key(load_public_key(file), file.name)
    if from_server:
        _take_from_server(store)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with alone_in(path.parent):
        _must_be_new(path)
        store.save(path)
    return _report(store, path)


def _must_be_new(path: Path) -> None:
    from adapterd.loader.errors import Code, error

    if path.exists():
        hint = "Add to it: `adapterctl trust add-key PEM --tenant T` or `--admission`; or move it away first."
        raise error(Code.ALREADY_EXISTS, str(path), "there is a trust file", hint)


def _take_from_server(store: TrustStore) -> None:
    """First use decides: said aloud, with the fingerprints that the operator can confirm."""
    from adapterd.cli.connection import connect
    from adapterd.loader.trust.keys import PublicKey

    with connect() as client:
        for item in client.admission_keys():
            key = PublicKey.from_pem(str(item.get("public_key_pem", "")))
            store.add_admission_key(key, client.url)
            note(f"taken from {client.url} on first use: {key.key_id}; compare it with the operator's")


def add_key(
    public_key: PublicKeyFile,
    tenant: Annotated[
        str | None, typer.Option(help="Trust it as a publisher of this tenant.", show_default=False)
    ] = None,
    admission: Annotated[bool, typer.Option("--admission", help="Trust it as a registry's admission key.")] = False,
    name: Annotated[str | None, typer.Option(help="For people.", show_default=False)] = None,
    allow_unsigned: Annotated[
        bool, typer.Option("--allow-unsigned", help="Take this tenant's versions that nobody signed, too.")
    ] = False,
) -> Report:
    """Trust a key: a publisher's (--tenant) or a registry's (--admission)."""
    if (tenant is None) == (not admission):
        raise typer.BadParameter("say what it is for: --tenant T for a publisher, or --admission", param_hint="PUB")
    key = load_public_key(public_key)
    with _changed() as store:
        if tenant is None:
            store.add_admission_key(key, name or public_key.name)
        else:
            store.add_publisher_key(tenant, key, name or public_key.name)
            if allow_unsigned:
                store.require_publisher(tenant, False)
    return _report(store, trust_path(), added=key.key_id)


def revoke_key(key_id: Annotated[str, typer.Argument(metavar="KEY_ID")]) -> Report:
    """Take nothing more that this key signed, in any role."""
    with _changed() as store:
        store.revoke_key(key_id)
    return _report(store, trust_path(), revoked=key_id)


@contextmanager
def _changed() -> Iterator[TrustStore]:
    """What is trusted, to be changed and written again, while no other command of this kind does the same."""
    from adapterd.cli.connection import load_trust
    from adapterd.loader.parts import alone_in

    path = trust_path()
    if not path.parent.is_dir():
        load_trust()  # which says what is missing
    with alone_in(path.parent):
        store = load_trust()
        yield store
        store.save(path)


def show() -> Report:
    """Show what is trusted."""
    from adapterd.cli.connection import load_trust

    return _report(load_trust(), trust_path())


def _report(store: TrustStore, path: Path, **more: Any) -> Report:
    body = {"file": str(path), "digest": store.digest, "trust": store.as_json(), **more}
    ids = [str(value) for value in more.values()] or [line[0] for line in _lines(store)]
    listed = table("key", "role", "tenant", "name", "status")
    pairs = [("file", path), ("digest", store.digest)]
    return Report(body, ids, lambda: [facts(pairs), rows(listed, _lines(store))])


def _lines(store: TrustStore) -> list[tuple[str, str, str | None, str, str]]:
    lines: list[tuple[str, str, str | None, str, str]] = [
        (k.key.key_id, "admission", None, k.name, _status(k.revoked)) for k in store.admission_keys
    ]
    for tenant in store.tenants:
        publishers = store.tenant(tenant).publishers
        lines += [(k.key.key_id, "publisher", tenant, k.name, _status(k.revoked)) for k in publishers]
    return lines


def _status(revoked: bool) -> str:
    return "revoked" if revoked else "active"
