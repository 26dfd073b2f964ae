"""RegistryClient: the registry's REST surface as methods; what decides anything becomes a frozen type."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from adapterd.cli.transport import PATIENT, Transport, json_object, parsed_problem, segment
from adapterd.loader.errors import Code, NotFound, Problem, error, error_from, reject
from adapterd.loader.identity import BasePin, FileEntry, Ref
from adapterd.loader.manifest import Manifest

if TYPE_CHECKING:
    import httpx

    from adapterd.loader.base_model import BaseSpec

T = TypeVar("T")
UploadState = Literal["open", "processing", "admitted", "refused"]


@dataclass(frozen=True)
class VersionInfo:
    """A version as the catalog describes it; `raw` is the server's own object, for `--json`."""

    tenant: str
    adapter: str
    number: int
    digest: str
    base: BasePin
    state: str
    publisher: str
    created_at: str
    files: tuple[FileEntry, ...]
    raw: Mapping[str, Any]

    @property
    def ref(self) -> Ref:
        """The pinned reference."""
        return Ref(self.tenant, self.adapter, digest=self.digest)

    def manifest(self) -> Manifest:
        """The manifest that the server made at admission. Raises Unavailable (SERVER_ERROR) without one."""
        return _read("manifest", lambda f: Manifest.from_json(f["manifest"]), self.raw)

    @classmethod
    def from_json(cls, f: Mapping[str, Any]) -> VersionInfo:
        files = tuple(FileEntry(e["path"], e["sha256"], e["size"]) for e in f["files"])
        return cls(
            f["tenant"], f["adapter"], f["number"], f["version_digest"], BasePin.from_json(f["base"]),
            f["state"], f["publisher"], f["created_at"], files, f,
        )  # fmt: skip


@dataclass(frozen=True)
class UploadInfo:
    """An upload session: how much of each file the server has, and what came of it."""

    id: str
    state: UploadState
    offsets: Mapping[str, int]
    version: VersionInfo | None
    problems: tuple[Problem, ...]

    @classmethod
    def from_json(cls, f: Mapping[str, Any]) -> UploadInfo:
        version = f.get("version")
        problems = (parsed_problem(p) for p in f.get("problems") or [])
        return cls(
            f["id"], f["state"], {e["path"]: e["offset"] for e in f.get("files") or []},
            VersionInfo.from_json(version) if version else None, tuple(p for p in problems if p),
        )  # fmt: skip


@dataclass(frozen=True)
class ResolvedInfo:
    """What a REF means just now."""

    tenant: str
    adapter: str
    digest: str
    number: int
    base: BasePin
    state: str

    @property
    def ref(self) -> Ref:
        """The pinned reference."""
        return Ref(self.tenant, self.adapter, digest=self.digest)


class RegistryClient:
    """The registry over HTTP, one method a thing that adapterctl does.

    Every method raises an AdapterdError whose code is the server's own, SERVER_UNREACHABLE when there
    is none, and SERVER_ERROR for an answer that is not what the surface promises.
    """

    def __init__(self, url: str, token: str | None, *, transport: httpx.BaseTransport | None = None) -> None:
        self.url = url
        self.http = Transport(url, token, transport=transport)

    def __enter__(self) -> RegistryClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    # Who and where
    def whoami(self) -> dict[str, Any]:
        return self.http.json("GET", "/v1/whoami")

    def admission_keys(self) -> list[dict[str, Any]]:
        return list(self.http.items("/v1/admission-keys"))

    # Administration
    def create_tenant(self, name: str) -> dict[str, Any]:
        return self.http.json("POST", "/v1/tenants", json={"name": name})

    def tenants(self) -> list[dict[str, Any]]:
        return list(self.http.items("/v1/tenants"))

    def policy(self, tenant: str) -> tuple[dict[str, Any], str | None]:
        """And its tag, for who changes it."""
        answer = self.http.send("GET", f"{_tenant(tenant)}/policy")
        return json_object(answer), answer.headers.get("ETag")

    def set_policy(self, tenant: str, policy: Mapping[str, object], seen: str | None = None) -> dict[str, Any]:
        """Raises Conflict (PRECONDITION_FAILED) unless the present one has the tag that was seen."""
        headers = {"If-Match": seen} if seen else {}
        return self.http.json("PUT", f"{_tenant(tenant)}/policy", json=policy, headers=headers)

    def create_token(self, tenant: str | None, wanted: Mapping[str, object]) -> dict[str, Any]:
        """`wanted`: kind, scopes, expires_in_days, adapters. The secret is in the answer, this once."""
        return self.http.json("POST", _tokens(tenant), json=wanted)

    def tokens(self, tenant: str | None) -> list[dict[str, Any]]:
        """None: the operator's."""
        return list(self.http.items(_tokens(tenant)))

    def revoke_token(self, tenant: str | None, token_id: str) -> None:
        self.http.send("DELETE", f"{_tokens(tenant)}/{segment(token_id)}")

    def add_key(self, tenant: str, name: str, public_key_pem: str) -> dict[str, Any]:
        body = {"name": name, "public_key_pem": public_key_pem}
        return self.http.json("POST", f"{_tenant(tenant)}/keys", json=body)

    def keys(self, tenant: str) -> list[dict[str, Any]]:
        return list(self.http.items(f"{_tenant(tenant)}/keys"))

    def revoke_key(self, tenant: str, key_id: str) -> None:
        self.http.send("POST", f"{_tenant(tenant)}/keys/{segment(key_id)}:revoke")

    # Base models
    def add_base(self, spec: BaseSpec) -> dict[str, Any]:
        return self.http.json("POST", "/v1/base-models", json=spec.as_json())

    def bases(self) -> list[dict[str, Any]]:
        return list(self.http.items("/v1/base-models"))

    def base(self, base_id: str, revision: str) -> BaseSpec:
        """The module table that the server checks against."""
        from adapterd.loader.base_model import BaseSpec

        query = {"id": base_id, "revision": revision}
        return BaseSpec.from_json(self.http.json("GET", "/v1/base-models/table", params=query))

    # Uploads
    def create_upload(self, tenant: str, wanted: Mapping[str, object], idempotency_key: str) -> UploadInfo:
        """`wanted`: adapter, base, files, allow, alias. The same key gives the same session."""
        headers = {"Idempotency-Key": idempotency_key}
        return _upload(self.http.json("POST", f"{_tenant(tenant)}/uploads", json=wanted, headers=headers))

    def upload(self, tenant: str, upload_id: str) -> UploadInfo:
        return _upload(self.http.json("GET", f"{_tenant(tenant)}/uploads/{segment(upload_id)}"))

    def send_chunk(self, tenant: str, upload_id: str, path: str, offset: int, data: bytes) -> int:
        """Append `data` at `offset`; the offset after it. Raises Conflict (OFFSET_MISMATCH)."""
        url = f"{_tenant(tenant)}/uploads/{segment(upload_id)}/files/{segment(path)}"
        headers = {"Upload-Offset": str(offset), "Content-Type": "application/octet-stream"}
        answer = self.http.send("PATCH", url, content=data, headers=headers).headers.get("Upload-Offset", "")
        if not answer.isdecimal():
            raise error(Code.SERVER_ERROR, url, "the answer names no Upload-Offset")
        return int(answer)

    def finalize(self, tenant: str, upload_id: str) -> UploadInfo:
        """Waits as long as the server hashes and checks."""
        url = f"{_tenant(tenant)}/uploads/{segment(upload_id)}:finalize"
        return _upload(self.http.json("POST", url, timeout=PATIENT))

    def abandon_upload(self, tenant: str, upload_id: str) -> None:
        self.http.send("DELETE", f"{_tenant(tenant)}/uploads/{segment(upload_id)}")

    # Catalog
    def adapters(self, tenant: str) -> list[dict[str, Any]]:
        return list(self.http.items(f"{_tenant(tenant)}/adapters"))

    def adapter(self, tenant: str, name: str) -> dict[str, Any]:
        return self.http.json("GET", _adapter(tenant, name))

    def versions(self, tenant: str, name: str) -> list[dict[str, Any]]:
        return list(self.http.items(f"{_adapter(tenant, name)}/versions"))

    def version(self, tenant: str, name: str, which: str) -> VersionInfo:
        """`which`: a number, or `sha256:` and the digest."""
        answer = self.http.json("GET", f"{_adapter(tenant, name)}/versions/{segment(which)}")
        return _read("version", VersionInfo.from_json, answer)

    def withdraw(self, tenant: str, name: str, digest: str, verb: Literal["yank", "quarantine", "release"]) -> None:
        self.http.send("POST", f"{_adapter(tenant, name)}/versions/sha256:{digest}:{verb}")

    def alias(self, tenant: str, name: str, alias: str) -> str | None:
        """The digest that it points to now, or None."""
        try:
            answer = self.http.json("GET", f"{_adapter(tenant, name)}/aliases/{segment(alias)}")
        except NotFound:
            return None
        return _read("alias", lambda f: str(f["version_digest"]), answer)

    def set_alias(self, tenant: str, name: str, alias: str, digest: str, current: str | None) -> dict[str, Any]:
        """Move it from `current` (None: it must not exist). Raises Conflict if somebody else moved it."""
        headers = {"If-Match": f'"{current}"'} if current else {"If-None-Match": "*"}
        url = f"{_adapter(tenant, name)}/aliases/{segment(alias)}"
        return self.http.json("PUT", url, json={"version_digest": digest}, headers=headers)

    def alias_history(self, tenant: str, name: str, alias: str) -> list[dict[str, Any]]:
        return list(self.http.items(f"{_adapter(tenant, name)}/aliases/{segment(alias)}/history"))

    def resolve(self, refs: Sequence[Ref]) -> Iterator[ResolvedInfo]:
        """One answer a REF, in order. Raises the problem of the first that means nothing."""
        answer = self.http.json("POST", "/v1/resolve", json={"refs": [str(r) for r in refs]})
        for item in answer.get("items", []):
            yield _resolved(item)

    def resolve_one(self, ref: Ref) -> ResolvedInfo:
        """The one answer to one REF."""
        for found in self.resolve([ref]):
            return found
        raise error(Code.SERVER_ERROR, "/v1/resolve", "the answer has no items")


def _tenant(tenant: str) -> str:
    return f"/v1/tenants/{segment(tenant)}"


def _tokens(tenant: str | None) -> str:
    """The operator's tokens belong to no tenant."""
    return f"{_tenant(tenant)}/tokens" if tenant else "/v1/tokens"


def _adapter(tenant: str, name: str) -> str:
    return f"{_tenant(tenant)}/adapters/{segment(name)}"


def _upload(fields: Mapping[str, Any]) -> UploadInfo:
    return _read("upload", UploadInfo.from_json, fields)


def _resolved(item: Mapping[str, Any]) -> ResolvedInfo:
    if item.get("problem"):
        problem = parsed_problem({**item["problem"], "severity": "reject"})
        raise error_from([problem or reject(Code.NOT_FOUND, str(item.get("ref", "")), "cannot be resolved")])
    return _read("resolve", _resolved_fields, item)


def _resolved_fields(f: Mapping[str, Any]) -> ResolvedInfo:
    pin = BasePin.from_json(f["base"])
    return ResolvedInfo(f["tenant"], f["adapter"], f["version_digest"], f["number"], pin, f["state"])


def _read(what: str, make: Callable[[Mapping[str, Any]], T], fields: Mapping[str, Any]) -> T:
    """`make(fields)`; an answer that lacks something is the server's fault and not a traceback of ours."""
    try:
        return make(fields)
    except (KeyError, TypeError, ValueError, AttributeError) as fault:
        raise error(Code.SERVER_ERROR, what, f"the server's answer is not as promised: {fault!r}") from fault
