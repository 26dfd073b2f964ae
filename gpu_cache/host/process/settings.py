"""What a loader process is told at its start: one JSON document, from a file or a descriptor, read strictly."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_serializer, field_validator
from pydantic import model_validator as whole

from adapterd.gpu_cache.budgets import TenantBudget
from adapterd.loader.errors import Code, Failed, error, reject
from adapterd.loader.identity import canonical_json, sha256_hex
from adapterd.loader.layout import ALIGNMENT, PAGE_BYTES
from adapterd.loader.limits import DEFAULT_LIMITS, Limits
from adapterd.loader.regular_file import read_regular

if TYPE_CHECKING:
    from adapterd.loader.sources import Source

MAX_SETTINGS_BYTES = 4 << 20
MAX_TOKEN_BYTES = 4096


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FolderSettings(_Strict):
    """A folder of pulled versions."""

    kind: Literal["folder"] = "folder"
    root: Path

    @property
    def identity(self) -> str:
        """Digest of what it is: equal for two that hand out the same versions."""
        return _identity({"kind": self.kind, "root": str(self.root.resolve())})

    def open(self) -> Source:
        from adapterd.loader.sources.folder import FolderSource

        return FolderSource(self.root)


class RegistrySettings(_Strict):
    """A registry. Its token is given here, in a file, or in an environment variable: one of the three."""

    kind: Literal["registry"] = "registry"
    url: str
    token: SecretStr | None = None
    token_file: Path | None = None
    token_env: str | None = None

    @whole(mode="after")
    def _one_token(self) -> Self:
        if sum(t is not None for t in (self.token, self.token_file, self.token_env)) != 1:
            raise ValueError("give one of token, token_file and token_env")
        return self

    @field_serializer("token", when_used="json-unless-none")
    def _plainly(self, token: SecretStr) -> str:
        """For the descriptor through which a worker tells its loader; nothing else writes this down."""
        return token.get_secret_value()

    @property
    def identity(self) -> str:
        """As of a folder. The token is no part of it."""
        return _identity({"kind": self.kind, "url": self.url.rstrip("/")})

    def open(self) -> Source:
        from adapterd.loader.sources.registry import RegistrySource

        return RegistrySource(self.url, self._secret())

    def _secret(self) -> str:
        if self.token is not None:
            return self.token.get_secret_value()
        if self.token_file is not None:
            try:
                return read_regular(self.token_file, MAX_TOKEN_BYTES).decode().strip()
            except (OSError, ValueError) as cause:
                raise error(Code.SETTINGS_INVALID, "source.token_file", f"cannot be read: {cause}") from cause
        assert self.token_env is not None
        if not (value := os.environ.get(self.token_env)):
            raise error(Code.SETTINGS_INVALID, "source.token_env", f"{self.token_env} is not set")
        return value


SourceSettings = FolderSettings | RegistrySettings


class LoaderSettings(_Strict):
    """One loader process.

    Attributes:
        source: where versions come from.
        trust: the trust file; read again whenever it changes.
        store: folder of verified versions; None is a temporary one that goes with the process.
        store_bytes, store_key: as of `CacheConfig`; of the key its file is named here, and nothing else.
        slab_bytes: of the shared slab; rounded down to whole pages.
        page_bytes: workers must have the same.
        threads: that download, check and pack.
        tenants, default_budget: as of `CacheConfig`; the share of the slab is what counts here.
        limits: caps; names as of `Limits`, what is not named is the default.
        keep_host: whether images that nobody holds stay until room is needed.
        recheck: whether content checks are repeated on every cold load.
        close_seconds: how long the end waits for loads that run.
        remove_folder: whether the socket's folder goes with the process: it was made for it alone.
    """

    source: Annotated[SourceSettings, Field(discriminator="kind")]
    trust: Path
    store: Path | None = None
    store_bytes: int | None = Field(default=None, ge=1)
    store_key: Path | None = None
    slab_bytes: int
    page_bytes: int = Field(default=PAGE_BYTES, ge=ALIGNMENT, multiple_of=ALIGNMENT)
    threads: int = Field(default=2, ge=1, le=256)
    tenants: dict[str, TenantBudget] = {}
    default_budget: TenantBudget = TenantBudget()
    limits: Limits = DEFAULT_LIMITS
    keep_host: bool = True
    recheck: bool = False
    close_seconds: float = Field(default=5.0, ge=0)
    remove_folder: bool = False

    @field_validator("limits", mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        try:
            return Limits.from_json(value) if isinstance(value, dict) else value
        except Failed as e:
            raise ValueError(str(e)) from e

    @whole(mode="after")
    def _a_page(self) -> Self:
        if self.slab_bytes < self.page_bytes:
            raise ValueError(f"slab_bytes: {self.slab_bytes} bytes hold no page of {self.page_bytes}")
        return self

    @property
    def pages(self) -> int:
        return self.slab_bytes // self.page_bytes

    @classmethod
    def parse(cls, data: bytes, where: str = "settings") -> LoaderSettings:
        """Raises Failed (SETTINGS_INVALID), every mistake a problem. No value is repeated: one may be the token."""
        if len(data) > MAX_SETTINGS_BYTES:
            raise error(Code.SETTINGS_INVALID, where, f"more than {MAX_SETTINGS_BYTES} bytes")
        try:
            return cls.model_validate_json(data, strict=True)
        except ValidationError as e:
            problems = [
                reject(Code.SETTINGS_INVALID, ".".join(map(str, mistake["loc"])) or where, mistake["msg"])
                for mistake in e.errors(include_input=False, include_context=False, include_url=False)
            ]
            raise Failed(*problems) from None

    def as_json(self) -> bytes:
        """What `parse` reads. Holds the token."""
        return self.model_dump_json().encode()


def settings_of(source: Source) -> SourceSettings:
    """How a loader process is told of a worker's source. Raises Failed (SETTINGS_INVALID) if it cannot be told."""
    from adapterd.loader.sources.folder import FolderSource
    from adapterd.loader.sources.registry import RegistrySource

    if isinstance(source, FolderSource):
        return FolderSettings(root=source.root.absolute())
    if isinstance(source, RegistrySource):
        return RegistrySettings(url=source.url, token=SecretStr(source.token))
    raise error(
        Code.SETTINGS_INVALID, "source", f"a loader process cannot be given a {type(source).__name__}",
        'Use a FolderSource or a RegistrySource, or loader="thread".',
    )  # fmt: skip


def _identity(body: dict[str, str]) -> str:
    return sha256_hex(canonical_json(body))
