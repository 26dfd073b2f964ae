"""The port that folders and registries implement."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from adapterd.loader.errors import AdapterdError, Code, error
from adapterd.loader.identity import BasePin, Ref, VersionKey


@dataclass(frozen=True, slots=True)
class Resolved:
    """What a reference stood for when it was asked; a claim of the source until the statement confirms it.

    Attributes:
        ref: with `digest` set.
        tenant, adapter: of the reference.
        version_digest: of the version; equal to `ref.digest`.
        version_number: the number that people use.
        base: the pin the version was admitted for.
    """

    ref: Ref
    tenant: str
    adapter: str
    version_digest: str
    version_number: int
    base: BasePin

    @property
    def key(self) -> VersionKey:
        return VersionKey(self.tenant, self.base, self.version_digest)


class Source(Protocol):
    """Hands out versions. Implementations raise only errors of our tree and may be used by threads."""

    def resolve(self, ref: Ref, tenant: str) -> Resolved:
        """What `ref` stands for, asked on behalf of `tenant`.

        Raises:
            NotFound: NOT_FOUND for a missing one and for one of another tenant, in the same words (I9).
            Conflict: REF_CONFLICT if the alias does not point to the digest; VERSION_WITHDRAWN.
            Unavailable: the source cannot be asked.
        """
        ...

    def statement(self, version: Resolved) -> bytes:
        """The admission statement's envelope. Raises Untrusted (STATEMENT_MISSING), Unavailable."""
        ...

    def signature(self, version: Resolved) -> bytes | None:
        """`model.sig`, or None if there is none. Raises Unavailable."""
        ...

    def read(self, version: Resolved, path: str, offset: int = 0) -> AbstractContextManager[Iterator[bytes]]:
        """The file's bytes from `offset` on. How many come is up to the source: the caller counts.

        Raises (at entry and while reading):
            NotFound: NOT_FOUND. Unavailable: broken off; ask again with a larger offset.
        """
        ...

    def close(self) -> None:
        """Give back connections; idempotent."""
        ...


def not_found(ref: Ref) -> AdapterdError:
    """One answer for missing and foreign alike (I9): it repeats what was asked and nothing else."""
    return error(
        Code.NOT_FOUND, str(ref), "there is no such adapter or version, or you have no access to it",
        "Check the name, the alias and the tenant; `adapterctl list` shows what you can see.",
    )  # fmt: skip


def check_alias_digest(ref: Ref, digest: str) -> None:
    """Raises Conflict (REF_CONFLICT) if `ref` names a digest, too, and it is another one."""
    if ref.digest is not None and ref.digest != digest:
        raise error(
            Code.REF_CONFLICT, str(ref), f"the alias {ref.wanted_alias!r} points to sha256:{digest}",
            "Drop the alias to get the digest, or the digest to get what the alias points to now.",
        )  # fmt: skip
