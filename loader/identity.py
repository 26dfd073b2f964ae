"""What things are called, and what they are: references, digests, pins and the key of a version.

A name is for people. Identity is (tenant, base pin, version digest) (I6), and nothing else becomes
a cache key, a path or a row's key.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import rfc8785

from adapterd.loader.errors import Code, error

NAME_PATTERN = r"[a-z0-9][a-z0-9._-]{0,63}"
_NAME = re.compile(NAME_PATTERN)
_DIGEST = re.compile(r"[0-9a-f]{64}")
_REVISION = re.compile(r"[0-9a-f]{40}|sha256:[0-9a-f]{64}")
_REF = re.compile(
    rf"(?P<tenant>{NAME_PATTERN})/(?P<name>{NAME_PATTERN})(?::(?P<alias>{NAME_PATTERN}))?(?:@sha256:(?P<digest>[0-9a-f]{{64}}))?"
)

DEFAULT_ALIAS = "default"
VERSION_TYPE = "adapterd.version/1"
SIGNATURE_FILE = "model.sig"
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"


def canonical_json(value: Any) -> bytes:
    """RFC 8785 (JCS) bytes of a JSON value."""
    return rfc8785.dumps(value)


def sha256_hex(data: bytes) -> str:
    """SHA-256 as bare lower hex."""
    return hashlib.sha256(data).hexdigest()


def check_name(kind: str, value: str) -> str:
    """`value`, if it is a name as tenants, adapters and aliases have them. Raises Failed (REF_INVALID)."""
    if _NAME.fullmatch(value):
        return value
    raise error(
        Code.REF_INVALID, kind, f"{value[:80]!r} is not a name",
        "Use 1 to 64 of a-z, 0-9, '.', '_' and '-', starting with a letter or a digit.",
    )  # fmt: skip


def check_digest(where: str, value: str) -> str:
    """`value`, if it is 64 lower hex digits. Raises Failed (REF_INVALID)."""
    if _DIGEST.fullmatch(value):
        return value
    raise error(Code.REF_INVALID, where, f"{value[:80]!r} is not a SHA-256 in lower hex")


def check_revision(value: str) -> str:
    """`value`, if it is a commit (40 hex) or `sha256:` and 64 hex. Raises Failed (REF_INVALID)."""
    if _REVISION.fullmatch(value):
        return value
    raise error(
        Code.REF_INVALID, "revision", f"{value[:80]!r} does not pin a base model",
        "Give the 40-hex commit of the model repository, or sha256:… of its files; a branch name moves.",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ref:
    """`tenant/name[:alias][@sha256:…]`; neither alias nor digest means the alias `default`.

    Law: `Ref.parse(str(ref)) == ref`.
    """

    tenant: str
    name: str
    alias: str | None = None
    digest: str | None = None

    @classmethod
    def parse(cls, text: str) -> Ref:
        """Raises Failed (REF_INVALID)."""
        match = _REF.fullmatch(text)
        if match is None:
            raise error(
                Code.REF_INVALID, "REF", f"{text[:160]!r} is not a reference",
                "Write tenant/name, tenant/name:alias or tenant/name@sha256:<64 hex>.",
            )  # fmt: skip
        return cls(match["tenant"], match["name"], match["alias"], match["digest"])

    def __str__(self) -> str:
        alias = f":{self.alias}" if self.alias else ""
        digest = f"@sha256:{self.digest}" if self.digest else ""
        return f"{self.tenant}/{self.name}{alias}{digest}"

    @property
    def wanted_alias(self) -> str | None:
        """The alias that must be looked up: the given one, `default` if there is no digest, else None."""
        return self.alias or (None if self.digest else DEFAULT_ALIAS)


@dataclass(frozen=True, slots=True, order=True)
class FileEntry:
    """One stored file: its path inside the package (POSIX, no folders above it), SHA-256 (hex) and size (bytes)."""

    path: str
    sha256: str
    size: int


def version_digest(files: Iterable[FileEntry]) -> str:
    """SHA-256 of the RFC 8785 form of all stored files but `model.sig`, sorted by the bytes of path."""
    kept = sorted((f for f in files if f.path != SIGNATURE_FILE), key=lambda f: f.path.encode())
    body = {
        "files": [{"path": f.path, "sha256": f.sha256, "size": f.size} for f in kept],
        "type": VERSION_TYPE,
    }
    return sha256_hex(canonical_json(body))


class _HashedOnce:
    """Keeps its hash, as a str does: keys are looked up far more often than they are made."""

    __slots__ = ("_hash",)
    if TYPE_CHECKING:  # no annotation at run time: who asks for a key's fields gets no other one
        _hash: int


@dataclass(frozen=True, slots=True)
class BasePin(_HashedOnce):
    """Which base model, exactly: id, revision and the digest of its module table (hex)."""

    id: str
    revision: str
    module_table_digest: str

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            found = hash((self.id, self.revision, self.module_table_digest))
            object.__setattr__(self, "_hash", found)
            return found

    def as_json(self) -> dict[str, str]:
        return {"id": self.id, "revision": self.revision, "module_table_digest": self.module_table_digest}

    @classmethod
    def from_json(cls, fields: dict[str, str]) -> BasePin:
        return cls(fields["id"], fields["revision"], fields["module_table_digest"])


@dataclass(frozen=True, slots=True)
class VersionKey(_HashedOnce):
    """The identity of a version everywhere: catalog, disk store, host slab, VRAM, prefix key (I6)."""

    tenant: str
    base: BasePin
    digest: str

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            found = hash((self.tenant, self.base, self.digest))
            object.__setattr__(self, "_hash", found)
            return found

    def path_digest(self) -> str:
        """A name for a folder or a row that nobody chose: SHA-256 of the RFC 8785 form of the key, hex."""
        body = {"base": self.base.as_json(), "digest": self.digest, "tenant": self.tenant}
        return sha256_hex(canonical_json(body))
