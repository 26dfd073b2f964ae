"""A registry in memory behind an httpx transport, to be lied with.

It publishes real packages with real checks, signatures and statements, and answers the REST calls that a
worker makes. Tests change its state (`flip_byte`, `swap_statements`, …) or its faults (`Faults`), and run
the real client against it. State is what a thief of the bucket, the database or the API could change.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from adapterd.loader.base_model import BaseSpec
from adapterd.loader.checks import examine
from adapterd.loader.errors import Code, Problem, reject
from adapterd.loader.formats.files import DirectoryPackage
from adapterd.loader.identity import SIGNATURE_FILE, WEIGHTS_FILE, Ref, version_digest
from adapterd.loader.limits import DEFAULT_LIMITS
from adapterd.loader.sources import RegistrySource
from adapterd.loader.trust import oms
from adapterd.loader.trust.admission import NO_PUBLISHER, AdmissionStatement, chunk_digests, issue
from adapterd.loader.trust.keys import PrivateKey, generate_admission_key
from adapterd.loader.trust.policy import TrustStore

URL = "http://registry.test"
NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)
BLOCK = 4096


@dataclass
class SimVersion:
    """One published version; every field may be tampered with."""

    number: int
    statement: AdmissionStatement
    envelope: bytes
    signature: bytes | None
    files: dict[str, bytes]
    state: str = "active"

    @property
    def digest(self) -> str:
        return self.statement.version_digest


@dataclass
class Faults:
    """How the wire misbehaves.

    Attributes:
        refuse_connections: the next so many requests find no server.
        statuses: statuses that the next requests are answered with, in order.
        break_after: break each file body off after so many bytes, with a connection error.
        cut_at: end each file body after so many bytes without an error.
        endless: go on sending zeros after the file.
        glued: these bytes hang on the last block of the file.
        ignore_range: answer 200 and the whole file to a Range request.
    """

    refuse_connections: int = 0
    statuses: list[int] = field(default_factory=list)
    break_after: int | None = None
    cut_at: int | None = None
    endless: bool = False
    glued: bytes = b""
    ignore_range: bool = False


class RegistrySimulator:
    """See the module. `requests` lists "METHOD path" of all that arrived; `sent` counts bytes of files."""

    def __init__(self) -> None:
        self.admission_key = generate_admission_key()
        self.versions: dict[tuple[str, str], list[SimVersion]] = {}
        self.aliases: dict[tuple[str, str, str], str] = {}
        self.faults = Faults()
        self.requests: list[str] = []
        self.ranges: list[str] = []
        self.sent = 0
        self.waited: list[float] = []
        self.rewrite_resolved: Callable[[dict[str, Any]], Any] = lambda item: item

    # --- publishing

    def publish(self, ref: str, directory: Path, base: BaseSpec, key: PrivateKey | None, **changes: Any) -> SimVersion:
        """Admit the package as the next version and move the alias; `changes` go into the statement."""
        parsed = Ref.parse(ref)
        with DirectoryPackage.open_dir(directory, DEFAULT_LIMITS) as package:
            verdict = examine(package, base)
            assert verdict.manifest is not None, verdict.problems
            chunks = chunk_digests(package.open(WEIGHTS_FILE))
        files = verdict.manifest.files
        signature = None if key is None else oms.sign(files, key, name=parsed.name)
        held = None if key is None or signature is None else oms.verify(signature, files, [key.public])
        listed = self.versions.setdefault((parsed.tenant, parsed.name), [])
        statement = AdmissionStatement(
            tenant=parsed.tenant,
            adapter=parsed.name,
            version_number=len(listed) + 1,
            base=base.pin,
            version_digest=version_digest(files),
            files=files,
            chunks=chunks,
            oms_root_digest=held.root_digest if held else None,
            signature_sha256=held.bundle_sha256 if held else None,
            publisher=held.key_id if held else NO_PUBLISHER,
            limits_id="default",
            policy_id="default",
            allowed=(),
            manifest_digest=verdict.manifest.digest,
            issued_at=NOW,
        )
        statement = replace(statement, **changes)
        content = {f.path: (directory / f.path).read_bytes() for f in files}
        envelope = issue(statement, self.admission_key)
        version = SimVersion(len(listed) + 1, statement, envelope, signature, content)
        listed.append(version)
        self.aliases[parsed.tenant, parsed.name, parsed.wanted_alias or "default"] = statement.version_digest
        return version

    def reissue(self, version: SimVersion, **changes: Any) -> None:
        """Sign a changed statement with the registry's own key: a compromised API."""
        version.statement = replace(version.statement, **changes)
        version.envelope = issue(version.statement, self.admission_key)

    # --- tampering

    def flip_byte(self, version: SimVersion, name: str, position: int) -> None:
        """What a stolen bucket can do."""
        data = bytearray(version.files[name])
        data[position] ^= 1
        version.files[name] = bytes(data)

    def swap_statements(self, one: SimVersion, other: SimVersion) -> None:
        one.envelope, other.envelope = other.envelope, one.envelope

    # --- what a client gets

    def source(self, token: str = "adrw_test") -> RegistrySource:
        """A real client on this registry; it does not wait between tries."""
        return RegistrySource(URL, token, httpx.MockTransport(self.handle), sleep=self.waited.append)

    def trust(self) -> TrustStore:
        trust = TrustStore()
        trust.add_admission_key(self.admission_key.public, "registry")
        return trust

    # --- the wire

    def handle(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(f"{request.method} {request.url.path}")
        if self.faults.refuse_connections:
            self.faults.refuse_connections -= 1
            raise httpx.ConnectError("[Errno 111] Connection refused", request=request)
        if self.faults.statuses:
            return httpx.Response(self.faults.statuses.pop(0), text="gateway")
        if "authorization" not in request.headers:
            return _problem(401, reject(Code.UNAUTHENTICATED, "", "no token"))
        if request.method == "POST" and request.url.path == "/v1/resolve":
            return self._resolve(json.loads(request.content)["refs"])
        return self._version_route(request)

    def _resolve(self, refs: list[str]) -> httpx.Response:
        return httpx.Response(200, json={"items": [self.rewrite_resolved(self._resolve_one(ref)) for ref in refs]})

    def _resolve_one(self, text: str) -> dict[str, Any]:
        ref = Ref.parse(text)
        digest = ref.digest
        if ref.wanted_alias is not None:
            digest = self.aliases.get((ref.tenant, ref.name, ref.wanted_alias))
        version = self._find(ref.tenant, ref.name, digest)
        if version is None:
            return {"ref": text, "problem": _body(404, reject(Code.NOT_FOUND, text, "nothing here"))}
        if ref.digest not in (None, digest):
            return {"ref": text, "problem": _body(409, reject(Code.REF_CONFLICT, text, "the alias moved on"))}
        return {
            "ref": text,
            "tenant": ref.tenant,
            "adapter": ref.name,
            "version_digest": digest,
            "number": version.number,
            "base": version.statement.base.as_json(),
            "state": version.state,
        }

    def _find(self, tenant: str, adapter: str, digest: str | None) -> SimVersion | None:
        listed = self.versions.get((tenant, adapter), [])
        return next((v for v in listed if v.digest == digest), None)

    def _version_route(self, request: httpx.Request) -> httpx.Response:
        match request.url.path.split("/"):
            case ["", "v1", "tenants", tenant, "adapters", adapter, "versions", pinned, *rest]:
                version = self._find(tenant, adapter, pinned.removeprefix("sha256:"))
            case _:
                version, rest = None, []
        if version is None:
            return _problem(404, reject(Code.NOT_FOUND, request.url.path, "nothing here"))
        match rest:
            case ["admission"]:
                return httpx.Response(200, content=version.envelope)
            case ["signature"] if version.signature is not None:
                return httpx.Response(200, content=version.signature)
            case ["files", name] if name in version.files and name != SIGNATURE_FILE:
                return self._file(request, version.files[name])
        return _problem(404, reject(Code.NOT_FOUND, request.url.path, "nothing here"))

    def _file(self, request: httpx.Request, data: bytes) -> httpx.Response:
        wanted = request.headers.get("Range", "")
        self.ranges.append(wanted)
        start = int(wanted.removeprefix("bytes=").removesuffix("-") or "0")
        if not start or self.faults.ignore_range:
            return httpx.Response(200, content=self._body(request, data))
        headers = {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"}
        return httpx.Response(206, headers=headers, content=self._body(request, data[start:]))

    def _body(self, request: httpx.Request, data: bytes) -> Iterator[bytes]:
        faults = self.faults
        ends = [n for n in (faults.break_after, faults.cut_at) if n is not None]
        end = min([*ends, len(data)])
        for offset in range(0, end, BLOCK):
            part = data[offset : min(offset + BLOCK, end)]
            part += faults.glued if offset + BLOCK >= end else b""
            self.sent += len(part)
            yield part
        if faults.break_after is not None and end < len(data):
            raise httpx.ReadError("connection reset by peer", request=request)
        while faults.endless:
            self.sent += BLOCK
            yield bytes(BLOCK)


def _body(status: int, problem: Problem) -> dict[str, Any]:
    return {
        "type": f"/problems/{problem.code.lower().replace('_', '-')}",
        "title": problem.code.value,
        "status": status,
        "detail": problem.message,
        "instance": "/",
        "code": problem.code.value,
        "where": problem.where,
        "hint": problem.hint,
        "problems": [problem.as_json()],
    }


def _problem(status: int, problem: Problem) -> httpx.Response:
    return httpx.Response(status, json=_body(status, problem), headers={"content-type": "application/problem+json"})
