"""What an operator can set, read once at start from `ADAPTERD_*` and frozen."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from adapterd.loader.errors import Code, Failed, error, reject
from adapterd.registry.uploads.interfaces import StagingQuota

_DRIVERS = {"sqlite": "sqlite", "postgresql": "postgresql+psycopg", "postgres": "postgresql+psycopg"}


def _usual_folder() -> Path:
    """Raises Failed (SETTINGS_INVALID)."""
    try:
        return Path.home() / ".adapterd"
    except RuntimeError as fault:  # in a container, say, under a user that it does not know
        raise error(
            Code.SETTINGS_INVALID, "ADAPTERD_DATA_DIR", "is not set, and this user has no home directory",
            "Set ADAPTERD_DATA_DIR to the folder for the registry's data.",
        ) from fault  # fmt: skip


def _usual_checks() -> int:
    """As many as there are processors, within reason; two, so that one tenant's never keep another's out."""
    return min(8, max(2, os.cpu_count() or 1))


class Settings(BaseSettings):
    """The registry's settings; build it with `load_settings`, which turns a mistake into a Problem.

    Attributes:
        data_dir: home of everything local: database, blobs, upload staging, keys. 0700.
        database_url: `sqlite:///<file>` or `postgresql+psycopg://…`; empty means a file in `data_dir`.
        blobs: where stored files live: `local` (under `data_dir`) or `s3`.
        s3_endpoint: URL of an S3-compatible server, or empty for AWS's own.
        s3_bucket, s3_prefix, s3_region: where in it. The bucket must exist.
        s3_access_key_id, s3_secret_access_key: or empty, for boto3's own chain of credentials.
        host, port: where `adapterctl serve` listens.
        upload_ttl_hours: how long an upload session stays open.
        max_open_uploads, max_staged_bytes: what one tenant's open uploads may be together: how many, and how
            many bytes they may have declared.
        max_checks: uploads that are hashed and checked at once; those of one tenant are at most one fewer.
    """

    model_config = SettingsConfigDict(env_prefix="ADAPTERD_", frozen=True, extra="ignore")

    data_dir: Path = Field(default_factory=_usual_folder)
    database_url: str = ""
    blobs: Literal["local", "s3"] = "local"
    s3_endpoint: str = ""
    s3_bucket: str = ""
    s3_prefix: str = ""
    s3_region: str = "us-east-1"
    s3_access_key_id: str = ""
    s3_secret_access_key: SecretStr = SecretStr("")
    host: str = "127.0.0.1"
    port: int = Field(default=8347, ge=0, le=65535)
    upload_ttl_hours: int = Field(default=24, ge=1, le=24 * 30)
    max_open_uploads: int = Field(default=StagingQuota().uploads, ge=1)
    max_staged_bytes: int = Field(default=StagingQuota().nbytes, ge=1)
    max_checks: int = Field(default_factory=_usual_checks, ge=1, le=256)

    @field_validator("data_dir")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        try:
            return value.expanduser().absolute()
        except RuntimeError:
            raise ValueError(f"{value}: there is no such home directory") from None

    @field_validator("database_url")
    @classmethod
    def _served(cls, value: str) -> str:
        return _served_url(value) if value else value

    @model_validator(mode="after")
    def _s3_is_whole(self) -> Settings:
        if self.blobs == "s3" and not self.s3_bucket:
            raise ValueError("s3_bucket is needed when blobs is 's3'")
        if bool(self.s3_access_key_id) != bool(self.s3_secret_access_key.get_secret_value()):
            raise ValueError("s3_access_key_id and s3_secret_access_key go together")
        return self

    @property
    def effective_database_url(self) -> str:
        """`database_url`, or the file in `data_dir`."""
        return self.database_url or f"sqlite:///{self.data_dir / 'registry.sqlite3'}"

    @property
    def blobs_dir(self) -> Path:
        return self.data_dir / "blobs"

    @property
    def uploads_dir(self) -> Path:
        """Staging of open uploads, a folder each."""
        return self.data_dir / "uploads"

    @property
    def admission_key_file(self) -> Path:
        """PEM of the Ed25519 key that signs admission statements, 0600."""
        return self.data_dir / "admission.key"

    @property
    def token_secret_file(self) -> Path:
        """The secret of the tokens' HMAC, 0600."""
        return self.data_dir / "token.secret"


def load_settings(**given: Any) -> Settings:
    """Settings from the environment, overridden by `given`.

    Raises:
        Failed: SETTINGS_INVALID, a Problem for each bad value, named by its environment variable.
    """
    try:
        return Settings(**given)
    except ValidationError as caught:
        # Only place and rule are told: the value may be a secret.
        raise Failed(*(_problem(e["loc"], e["msg"]) for e in caught.errors(include_input=False))) from None


def _problem(place: tuple[int | str, ...], message: str) -> Any:
    name = f"ADAPTERD_{str(place[0]).upper()}" if place else "settings"
    return reject(Code.SETTINGS_INVALID, name, message.removeprefix("Value error, "))


def _served_url(value: str) -> str:
    try:
        url = make_url(value)
    except ArgumentError:
        raise ValueError("not a database URL; use sqlite:///<file> or postgresql+psycopg://…") from None
    driver = _DRIVERS.get(url.get_backend_name())
    if driver is None:
        raise ValueError("only sqlite:///<file> and postgresql+psycopg://… are served")
    if driver == "sqlite" and url.database in (None, "", ":memory:"):
        raise ValueError("an in-memory SQLite database is not served; name a file")
    return url.set(drivername=driver).render_as_string(hide_password=False)
