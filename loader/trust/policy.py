"""The trust file: whose signatures count, tenant by tenant. Nothing in it, nothing trusted (I8)."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from adapterd.loader.disk import storage_code
from adapterd.loader.errors import AdapterdError, Code, error
from adapterd.loader.identity import NAME_PATTERN, canonical_json, check_name, sha256_hex
from adapterd.loader.parts import write_whole
from adapterd.loader.regular_file import open_regular
from adapterd.loader.trust.keys import PUBLISHER_ALGORITHMS, Algorithm, PublicKey
from adapterd.loader.trust.strict_json import Fields, Malformed, parse

SCHEMA = "adapterd.trust/1"
MAX_TRUST_BYTES = 16 << 20
_NAME = re.compile(NAME_PATTERN)
_LABEL = re.compile(r"[^\x00-\x1f\x7f\ud800-\udfff]{0,128}")
_MAX_ENTRIES = 100_000


@dataclass(frozen=True, slots=True)
class TrustedKey:
    """One entry. A revoked key stays listed, so that its signatures are refused as revoked, not as unknown.

    Attributes:
        key: the public key.
        name: for people; nothing is decided by it.
        revoked: nothing that it signed is taken, whenever it was signed.
    """

    key: PublicKey
    name: str = ""
    revoked: bool = False

    def as_json(self) -> dict[str, Any]:
        return {"key_id": self.key.key_id, "name": self.name, "pem": self.key.pem, "revoked": self.revoked}


@dataclass(frozen=True, slots=True)
class TenantTrust:
    """What holds for one tenant.

    Attributes:
        publishers: whose packages are taken.
        require_publisher: refuse a version that no publisher signed.
    """

    publishers: tuple[TrustedKey, ...] = ()
    require_publisher: bool = True


class TrustStore:
    """Admission keys of the registries, and publisher keys per tenant.

    A tenant that is not listed needs a publisher signature and has no publisher: all of its versions are
    refused. Changes are made in place; `save` writes them. Law:
    `TrustStore.from_json(t.as_json()) == t`.

    `changes` counts the changes made to this object: what was found trusted before the last of them may no
    longer be. `path` is the file that says the same, or said it when it was last read or written; None for a
    store that was made or changed in memory since.
    """

    def __init__(self) -> None:
        self.changes = 0
        self.path: Path | None = None
        self._admission: tuple[TrustedKey, ...] = ()
        self._tenants: dict[str, TenantTrust] = {}

    # --- reading

    @property
    def admission_keys(self) -> tuple[TrustedKey, ...]:
        return self._admission

    @property
    def tenants(self) -> tuple[str, ...]:
        """All that are listed, sorted."""
        return tuple(sorted(self._tenants))

    def tenant(self, tenant: str) -> TenantTrust:
        """Of an unlisted tenant: no publisher, and one is required."""
        return self._tenants.get(tenant, TenantTrust())

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the content, whatever the file's layout."""
        return sha256_hex(canonical_json(self.as_json()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TrustStore) and self.as_json() == other.as_json()

    __hash__ = None  # type: ignore[assignment]  # it changes

    # --- changing

    def add_admission_key(self, key: PublicKey, name: str = "") -> None:
        """Trust a registry's statements. Adding a listed key changes its name and nothing else.

        Raises:
            Untrusted: KEY_UNSUPPORTED unless it is Ed25519.
        """
        if key.algorithm is not Algorithm.ED25519:
            raise error(Code.KEY_UNSUPPORTED, "key", f"admission keys are Ed25519, not {key.algorithm}")
        self._admission = _with_key(self._admission, key, name)
        self._change()

    def add_publisher_key(self, tenant: str, key: PublicKey, name: str = "") -> None:
        """Trust a publisher's packages in one tenant. Adding a listed key changes its name and nothing else.

        Raises:
            Untrusted: KEY_UNSUPPORTED unless it is ECDSA.
            Failed: REF_INVALID for a bad tenant name.
        """
        if key.algorithm not in PUBLISHER_ALGORITHMS:
            raise error(Code.KEY_UNSUPPORTED, "key", f"publisher keys are ECDSA, not {key.algorithm}")
        had = self.tenant(check_name("tenant", tenant))
        self._tenants[tenant] = replace(had, publishers=_with_key(had.publishers, key, name))
        self._change()

    def require_publisher(self, tenant: str, required: bool = True) -> None:
        """Whether this tenant's versions must be signed. A signature that is there is checked in any case.

        Raises:
            Failed: REF_INVALID for a bad tenant name.
        """
        self._tenants[check_name("tenant", tenant)] = replace(self.tenant(tenant), require_publisher=required)
        self._change()

    def revoke_key(self, key_id: str) -> None:
        """Take nothing more that this key signed, in any role and any tenant.

        Raises:
            NotFound: NOT_FOUND if no entry has it.
        """
        everything = [*self._admission, *(k for t in self._tenants.values() for k in t.publishers)]
        if all(k.key.key_id != key_id for k in everything):
            message = f"no key {key_id[:64]!r} in this trust file"
            raise error(Code.NOT_FOUND, "key", message, "See `adapterctl trust show`.")
        self._admission = _revoked(self._admission, key_id)
        self._tenants = {
            name: replace(t, publishers=_revoked(t.publishers, key_id)) for name, t in self._tenants.items()
        }
        self._change()

    def _change(self) -> None:
        self.changes += 1
        self.path = None

    # --- files

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "admission_keys": [k.as_json() for k in self._admission],
            "tenants": {
                name: {
                    "require_publisher": t.require_publisher,
                    "publishers": [k.as_json() for k in t.publishers],
                }
                for name, t in sorted(self._tenants.items())
            },
        }

    @classmethod
    def from_json(cls, value: object) -> TrustStore:
        """Raises Untrusted (TRUST_FILE_INVALID), naming the field."""
        try:
            return cls._parsed(value)
        except Malformed as e:
            raise error(Code.TRUST_FILE_INVALID, e.where, e.message) from e

    @classmethod
    def _parsed(cls, value: object) -> TrustStore:
        fields = Fields(value, "", need={"schema", "admission_keys", "tenants"})
        fields.exactly("schema", SCHEMA)
        store = cls()
        store._admission = _keys(fields, "admission_keys", frozenset({Algorithm.ED25519}))
        for name, entry in fields.mapping("tenants", most=_MAX_ENTRIES).items():
            if not _NAME.fullmatch(name):
                raise Malformed("tenants", f"{name[:80]!r} is not a tenant's name")
            tenant = Fields(entry, f"tenants.{name}", need={"require_publisher", "publishers"})
            publishers = _keys(tenant, "publishers", PUBLISHER_ALGORITHMS)
            store._tenants[name] = TenantTrust(publishers, tenant.boolean("require_publisher"))
        return store

    @classmethod
    def load(cls, path: Path | str) -> TrustStore:
        """Read a trust file.

        Raises:
            Untrusted: TRUST_NOT_CONFIGURED if there is none, TRUST_FILE_INVALID if it is not one, or if
                others than its owner may write to it.
        """
        try:
            with open_regular(Path(path)) as file:
                data, mode = file.read(MAX_TRUST_BYTES + 1), os.fstat(file.fileno()).st_mode
        except FileNotFoundError as e:
            raise error(
                Code.TRUST_NOT_CONFIGURED, str(path), "there is no trust file, so nothing can be trusted",
                "Make one with `adapterctl trust init`, then add keys with `adapterctl trust add-key`.",
            ) from e  # fmt: skip
        except OSError as e:
            raise error(Code.TRUST_FILE_INVALID, str(path), f"cannot be read: {e.strerror}") from e
        if mode & 0o022:
            raise error(
                Code.TRUST_FILE_INVALID, str(path), f"others may write to it (mode {mode & 0o777:04o})",
                f"Run `chmod 600 {path}` and look at it with `adapterctl trust show`.",
            )  # fmt: skip
        if len(data) > MAX_TRUST_BYTES:
            raise error(Code.TRUST_FILE_INVALID, str(path), f"more than {MAX_TRUST_BYTES} bytes")
        try:
            store = cls._parsed(parse(data))
        except Malformed as e:
            raise error(Code.TRUST_FILE_INVALID, str(path), str(e)) from e
        store.path = Path(path)
        return store

    def reload(self, path: Path | str) -> None:
        """Take over what the file says by now. A running worker's way to hear of a revocation.

        Raises as `load`; nothing changes then.
        """
        fresh = TrustStore.load(path)
        if fresh != self:
            self._admission, self._tenants = fresh._admission, fresh._tenants
            self.changes += 1
        self.path = fresh.path

    def save(self, path: Path | str) -> None:
        """Write the file whole or not at all, readable by its owner only.

        Raises:
            Unavailable: STORAGE_FULL, STORAGE_UNAVAILABLE naming the path.
        """
        target = Path(path)
        text = json.dumps(self.as_json(), indent=2) + "\n"
        try:
            write_whole(target, text.encode(), replace=True)
        except OSError as e:
            raise error(storage_code(e), str(target), f"cannot be written: {e.strerror}") from e
        self.path = target


def _with_key(keys: tuple[TrustedKey, ...], key: PublicKey, name: str) -> tuple[TrustedKey, ...]:
    had = next((k for k in keys if k.key == key), None)
    if had is None:
        return (*keys, TrustedKey(key, name))
    return tuple(replace(k, name=name or k.name) if k is had else k for k in keys)


def _revoked(keys: Iterable[TrustedKey], key_id: str) -> tuple[TrustedKey, ...]:
    return tuple(replace(k, revoked=True) if k.key.key_id == key_id else k for k in keys)


def _keys(parent: Fields, name: str, wanted: frozenset[Algorithm]) -> tuple[TrustedKey, ...]:
    found: dict[str, TrustedKey] = {}
    for index, value in enumerate(parent.items(name, most=_MAX_ENTRIES)):
        where = parent.at(f"{name}[{index}]")
        entry = Fields(value, where, need={"key_id", "name", "pem", "revoked"})
        key = _key(entry, wanted)
        if key.key_id in found:
            raise Malformed(where, "this key stands twice in the list")
        found[key.key_id] = TrustedKey(key, entry.text("name", _LABEL), entry.boolean("revoked"))
    return tuple(found.values())


def _key(entry: Fields, wanted: frozenset[Algorithm]) -> PublicKey:
    try:
        key = PublicKey.from_pem(entry.text("pem", longest=16_384))
    except AdapterdError as e:
        raise Malformed(entry.at("pem"), e.problem.message) from e
    if key.algorithm not in wanted:
        raise Malformed(entry.at("pem"), f"a key of kind {key.algorithm} has no use here")
    # Whoever edits one of the two by hand must not be left with the other.
    entry.exactly("key_id", key.key_id)
    return key
