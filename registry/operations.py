"""What an operator does to a registry on its own machine: make it, upgrade it, check it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import delete, false

from adapterd.loader.errors import AdapterdError, Code, error
from adapterd.loader.parts import write_whole
from adapterd.loader.regular_file import open_regular
from adapterd.loader.trust.keys import Algorithm, PrivateKey, generate_admission_key
from adapterd.registry import schema
from adapterd.registry.blobs.local import storage_error, sync_folder
from adapterd.registry.database import Clock, Database, utcnow
from adapterd.registry.services import Services, build_services
from adapterd.registry.settings import Settings
from adapterd.registry.tenants.models import TenantRow
from adapterd.registry.tokens.interfaces import Scope
from adapterd.registry.tokens.service import MIN_SECRET_BYTES

LOCAL_ACTOR = "local"  # who sits at the machine; no token has this id, it is too short
OPERATOR_TOKEN_DAYS = 90
MAX_SECRET_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Initialised:
    """What `initialise` left behind.

    Attributes:
        operator_token: shown once; None when the registry had one already.
        admission_key_id: of the key that signs statements.
        database_url: its password hidden.
    """

    operator_token: str | None
    admission_key_id: str
    database_url: str


def initialise(settings: Settings, clock: Clock = utcnow) -> Initialised:
    """Make the data directory, the secrets, the schema and the first operator token.

    Each step is skipped when its result is there, so the command can be repeated after any failure.

    Raises:
        Unavailable: DATABASE_UNAVAILABLE, STORAGE_FULL, STORAGE_UNAVAILABLE.
        Failed: SETTINGS_INVALID for a secret file that is not one.
    """
    _make_private_folder(settings.data_dir)
    _make_private_file(settings.token_secret_file, lambda: secrets.token_bytes(MIN_SECRET_BYTES).hex().encode() + b"\n")
    _make_private_file(settings.admission_key_file, lambda: generate_admission_key().to_pem())
    admission_key = load_admission_key(settings)
    with _services(settings, clock) as services:
        schema.upgrade(services.db)
        token = services.tokens.issue_first_operator(expires_in_days=OPERATOR_TOKEN_DAYS, actor=LOCAL_ACTOR)
        return Initialised(token, admission_key.public.key_id, services.db.shown_url)


def upgrade(settings: Settings) -> None:
    """Bring the schema to this program's state. Raises what `Database` does."""
    with _database(settings) as db:
        schema.upgrade(db)


def check(settings: Settings) -> None:
    """Return if this registry can be served.

    Raises:
        Failed: SCHEMA_OUTDATED, or SETTINGS_INVALID for a secret that is missing or broken.
        Unavailable: DATABASE_UNAVAILABLE.
    """
    load_token_secret(settings)
    load_admission_key(settings)
    with _database(settings) as db:
        db.check_schema()
        with db.write() as session:  # nothing is changed, but it takes the right to
            session.execute(delete(TenantRow).where(false()))


def mint_operator_token(settings: Settings, clock: Clock = utcnow) -> str:
    """One more operator token, for who lost the first and sits at the machine. Raises as `check` does."""
    with _services(settings, clock) as services:
        services.db.check_schema()
        _, text = services.tokens.issue(
            None, kind="u", scopes=[Scope.OPERATOR], expires_in_days=OPERATOR_TOKEN_DAYS, actor=LOCAL_ACTOR
        )
        return text


def load_admission_key(settings: Settings) -> PrivateKey:
    """The key that signs admission statements. Raises Failed (SETTINGS_INVALID)."""
    path = settings.admission_key_file
    data = _read_secret(path)
    try:
        key = PrivateKey.from_pem(data)
    except AdapterdError as caught:
        raise _unusable(path, caught.problem.message) from caught
    if key.algorithm is not Algorithm.ED25519:
        raise _unusable(path, f"an Ed25519 key is wanted, this is {key.algorithm}")
    return key


def load_token_secret(settings: Settings) -> bytes:
    """The secret of the tokens' HMAC. Raises Failed (SETTINGS_INVALID)."""
    path = settings.token_secret_file
    try:
        secret = bytes.fromhex(_read_secret(path).decode("ascii").strip())
    except ValueError as caught:
        raise _unusable(path, "is not hexadecimal") from caught
    if len(secret) < MIN_SECRET_BYTES:
        raise _unusable(path, f"holds {len(secret)} bytes, {MIN_SECRET_BYTES} are needed")
    return secret


@contextmanager
def _database(settings: Settings) -> Iterator[Database]:
    db = Database(settings.effective_database_url)
    try:
        yield db
    finally:
        db.dispose()


@contextmanager
def _services(settings: Settings, clock: Clock) -> Iterator[Services]:
    with _database(settings) as db:
        yield build_services(db, load_token_secret(settings), clock)


def _read_secret(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            data, mode = file.read(MAX_SECRET_BYTES + 1), os.fstat(file.fileno()).st_mode
    except OSError as caught:
        raise _unusable(path, f"cannot be read: {caught.strerror}") from caught
    if mode & 0o077:
        raise _unusable(path, "can be read by others", f"Run `chmod 600 {path}`, and think of who may have read it.")
    if len(data) > MAX_SECRET_BYTES:
        raise _unusable(path, f"holds more than {MAX_SECRET_BYTES} bytes")
    return data


def _unusable(path: Path, message: str, hint: str = "Run `adapterctl db init`, or restore the file.") -> AdapterdError:
    return error(Code.SETTINGS_INVALID, str(path), message, hint)


def _make_private_folder(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as caught:
        raise storage_error(caught, str(path)) from caught


def _make_private_file(path: Path, make: Callable[[], bytes]) -> None:
    """Create the file whole and 0600, or leave the one that is there.

    Of two commands at once the second keeps the first one's secret.
    """
    if path.exists():
        return
    try:
        with suppress(FileExistsError):
            write_whole(path, make())
        sync_folder(path.parent)
    except OSError as caught:
        raise storage_error(caught, str(path)) from caught
