"""Getting a version as a worker would: nothing is kept that the trust file does not vouch for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from adapterd.cli.boundary import command
from adapterd.cli.inputs import REF_HELP, BaseChoice
from adapterd.cli.output import Report, facts, progress, size

if TYPE_CHECKING:
    from adapterd.cli.verification import Verification, Wish
    from adapterd.loader.base_model import BaseSpec
    from adapterd.loader.identity import Ref
    from adapterd.loader.sources import Resolved, Source
    from adapterd.loader.store import StoredVersion
    from adapterd.loader.trust.policy import TrustStore
    from adapterd.loader.trust.verify import Checked

STATEMENT_SUFFIX = ".admission.dsse.json"


@dataclass(frozen=True)
class Fetched:
    """A version on this disk, verified.

    Attributes:
        package: a folder with exactly its files and `model.sig`, if it has one.
        statement: the very bytes that were verified.
    """

    resolved: Resolved
    package: Path
    checked: Checked
    statement: bytes
    base: BaseSpec
    trust: TrustStore

    @property
    def ref(self) -> Ref:
        """Pinned, and without the alias: that may point elsewhere tomorrow."""
        return replace(self.resolved.ref, alias=None)


class Remembering:
    """A source that remembers statement and signature: the bytes checked are the bytes kept."""

    def __init__(self, inner: Source) -> None:
        self._inner = inner
        self._statement: bytes | None = None
        self._signature: tuple[bytes | None] | None = None

    def resolve(self, ref: Ref, tenant: str) -> Resolved:
        return self._inner.resolve(ref, tenant)

    def statement(self, version: Resolved) -> bytes:
        if self._statement is None:
            self._statement = self._inner.statement(version)
        return self._statement

    def signature(self, version: Resolved) -> bytes | None:
        if self._signature is None:
            self._signature = (self._inner.signature(version),)
        return self._signature[0]

    def read(self, version: Resolved, path: str, offset: int = 0) -> AbstractContextManager[Iterator[bytes]]:
        return self._inner.read(version, path, offset)

    def close(self) -> None:
        self._inner.close()


def register(app: typer.Typer) -> None:
    """Put this room's command on `app`."""
    command(app, "pull")(pull)


def pull(
    ref: Annotated[str, typer.Argument(metavar="REF", help=REF_HELP)],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The folder to make. Default: the adapter's name.", show_default=False),
    ] = None,
) -> Report:
    """Download a version, verified against the trust file, with its admission statement beside it."""
    from adapterd.cli.credentials import named
    from adapterd.loader.identity import Ref
    from adapterd.loader.parts import naming
    from adapterd.loader.scratch import scratch_folder

    wanted = Ref.parse(ref)
    target = named(out or Path(wanted.name))
    proof = target.with_name(target.name + STATEMENT_SUFFIX)
    _must_be_free(target)
    with (
        naming(target),
        scratch_folder("pull", _parent(target)) as scratch,
        fetched(wanted, BaseChoice(None), scratch) as version,
    ):
        _put_in_place(version, target, proof)
        return _report(version, target, proof)


def _parent(target: Path) -> Path:
    parent = target.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    return parent


def _must_be_free(path: Path) -> None:
    from adapterd.loader.errors import Code, error

    if path.exists() or path.is_symlink():
        raise error(Code.ALREADY_EXISTS, str(path), "exists already", "Move it away, or name another with --out.")


@contextmanager
def fetched(ref: Ref, choice: BaseChoice, scratch: Path) -> Iterator[Fetched]:
    """The version in a store below `scratch`: statement, signature, digests and structure have been checked.

    Raises:
        Untrusted: the trust file does not vouch for it, or the bytes are not the signed ones.
        Refused, NotFound, Conflict, Unauthenticated, Unavailable, Failed.
    """
    from adapterd.cli.connection import load_trust, open_source
    from adapterd.loader.limits import DEFAULT_LIMITS
    from adapterd.loader.store import VerifiedStore

    trust = load_trust()
    with closing(Remembering(open_source())) as source:
        resolved = source.resolve(ref, ref.tenant)
        base = choice.load() if choice.text else _base_of(resolved)
        store = VerifiedStore(scratch / "store", trust, DEFAULT_LIMITS)
        with progress(f"fetching {resolved.ref}", _total_bytes(source, resolved, trust)) as advance:
            stored = store.ensure(resolved, source, base, progress=advance)
        package = _assembled(stored, source.signature(resolved), scratch / "package")
        yield Fetched(resolved, package, stored.checked, source.statement(resolved), base, trust)


def _assembled(stored: StoredVersion, signature: bytes | None, package: Path) -> Path:
    """The store keeps `model.sig` apart; people, and the reference tool, want it inside."""
    from adapterd.cli.credentials import write_private
    from adapterd.loader.identity import SIGNATURE_FILE

    package.mkdir(mode=0o755)
    for entry in stored.statement.files:
        (stored.directory / entry.path).rename(package / entry.path)
    if signature is not None:
        write_private(package / SIGNATURE_FILE, signature, mode=0o644)
    return package


def _base_of(resolved: Resolved) -> BaseSpec:
    """From the registry; the signed statement's pin has the table's digest, so a false table is found out."""
    from adapterd.cli.connection import connect

    with connect() as client:
        return client.base(resolved.base.id, resolved.base.revision)


def _total_bytes(source: Source, resolved: Resolved, trust: TrustStore) -> int:
    """How much is coming, for the progress bar."""
    from adapterd.loader.trust.admission import open_statement

    keys = [k.key for k in trust.admission_keys]
    return open_statement(source.statement(resolved), keys).total_bytes


def _put_in_place(version: Fetched, target: Path, proof: Path) -> None:
    """Package and statement appear by a rename each; the folder comes last and means that all is there.

    A statement alone is of a pull that was killed: the same one is as good as new.
    """
    from adapterd.cli.credentials import write_private
    from adapterd.loader.parts import sweep_beside

    sweep_beside(proof)
    try:
        if not _is_there(version.statement, proof):
            write_private(proof, version.statement, mode=0o644)
        version.package.rename(target)
    except FileExistsError:
        raise  # one of the two is somebody else's
    except BaseException:
        if version.package.exists():  # else all is in its place
            proof.unlink(missing_ok=True)
        raise
    _sync(target.absolute().parent)


def _is_there(data: bytes, path: Path) -> bool:
    from adapterd.loader.regular_file import open_regular

    try:
        with open_regular(path) as file:
            return file.read(len(data) + 1) == data
    except OSError:
        return False


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _report(version: Fetched, target: Path, proof: Path) -> Report:
    statement = version.checked.statement
    ref = version.ref
    body = {
        "ref": str(ref),
        "directory": str(target),
        "statement": str(proof),
        "number": statement.version_number,
        "version_digest": statement.version_digest,
        "base": statement.base.as_json(),
        "publisher": statement.publisher,
        "total_bytes": statement.total_bytes,
    }
    shown: list[tuple[str, object]] = [
        ("ref", ref),
        ("version", statement.version_number),
        ("folder", target),
        ("statement", proof),
        ("publisher", statement.publisher),
        ("size", size(statement.total_bytes)),
    ]
    return Report(body, [str(ref)], lambda: [facts(shown)])


def verify_ref(ref: Ref, choice: BaseChoice, wish: Wish) -> Verification:
    """Fetch as a worker does, into a folder that is thrown away, and check the content as an author does.

    Strict, unless the wish names another policy: a valid signature of one of the tenant's publishers in
    the trust file (or of the wish's keys) is wanted even where that file lets unsigned versions pass.

    Raises:
        AdapterdError: it could not be had, or is not to be trusted.
    """
    from adapterd.cli.verification import Policy, verify_package
    from adapterd.loader.formats.files import DirectoryPackage
    from adapterd.loader.scratch import scratch_folder

    with (
        scratch_folder("verify") as scratch,
        fetched(ref, choice, scratch) as version,
        DirectoryPackage.open_dir(version.package, wish.limits) as package,
        progress("checking", sum(package.sizes().values())) as advance,
    ):
        publishers = version.trust.tenant(version.resolved.tenant).publishers
        keys = wish.keys or tuple(k.key for k in publishers if not k.revoked)
        strict = replace(wish, keys=keys, policy=wish.policy or Policy.STRICT)
        return verify_package(package, version.base, strict, subject=str(ref), progress=advance)
