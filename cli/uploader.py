"""Sending a package: a session, raw chunks, finalize; and what is remembered so that it can be continued.

The memory of an upload is a small file named after everything that makes the upload the same one:
server, name, base, files and their digests, alias, allowed codes. The same command finds it again, whatever
ended the last run. It is written before the session is asked for, with the Idempotency-Key of that request,
so that not even a lost answer leaves a session behind that nobody knows.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    retry_if_result,
    stop_after_attempt,
    stop_after_delay,
    wait_exponential,
)

from adapterd.cli.client import RegistryClient, UploadInfo, VersionInfo
from adapterd.cli.credentials import write_private
from adapterd.cli.environment import state_dir
from adapterd.cli.output import note
from adapterd.loader.errors import (
    AdapterdError,
    Code,
    Conflict,
    Failed,
    NotFound,
    Refused,
    Unavailable,
    Untrusted,
    error,
    error_from,
)
from adapterd.loader.formats.files import FileReader, Package
from adapterd.loader.identity import FileEntry, canonical_json, sha256_hex
from adapterd.loader.regular_file import NotRegular, TooLarge, read_regular

CHUNK_BYTES = 8 << 20
ATTEMPTS = 6
"""Tries a chunk before giving up: about half a minute with the waits in between."""
MAX_WAIT_SECONDS = 10.0
FINALIZE_SECONDS = 3600.0
"""How long a server may take to hash and check; it is asked less and less often."""
MEMORY_SCHEMA = "adapterd.upload/1"
MAX_MEMORY_BYTES = 64 << 10
_KEY = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Plan:
    """What is to be uploaded, completely."""

    tenant: str
    adapter: str
    base_id: str
    base_revision: str
    files: tuple[FileEntry, ...]
    allow: tuple[str, ...]
    alias: str | None

    def as_json(self) -> dict[str, Any]:
        """The body that opens the session."""
        return {
            "adapter": self.adapter,
            "base": {"id": self.base_id, "revision": self.base_revision},
            "files": [{"path": f.path, "size": f.size, "sha256": f.sha256} for f in self.files],
            "allow": list(self.allow),
            "alias": self.alias,
        }

    @property
    def total_bytes(self) -> int:
        return sum(f.size for f in self.files)

    def fingerprint(self, url: str) -> str:
        """What makes two uploads the same one, hex."""
        return sha256_hex(canonical_json({"url": url, "tenant": self.tenant, **self.as_json()}))


class Memory:
    """The file of one plan."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @classmethod
    def of(cls, plan: Plan, url: str) -> Memory:
        return cls(state_dir() / "uploads" / f"{plan.fingerprint(url)}.json")

    def load(self) -> str | None:
        """The Idempotency-Key of an upload that was begun, or None; an unreadable file was never ours."""
        try:
            body = json.loads(read_regular(self._path, MAX_MEMORY_BYTES))
        except (FileNotFoundError, NotRegular, TooLarge, ValueError, RecursionError):
            return None
        if not isinstance(body, dict) or body.get("schema") != MEMORY_SCHEMA:
            return None
        key = body.get("idempotency_key")
        return key if isinstance(key, str) and _KEY.fullmatch(key) else None

    def begin(self) -> str:
        """A new Idempotency-Key, on disk before it is used."""
        key = secrets.token_hex(16)
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        body = {"schema": MEMORY_SCHEMA, "idempotency_key": key}
        write_private(self._path, json.dumps(body).encode(), replace=True)
        return key

    def forget(self) -> None:
        self._path.unlink(missing_ok=True)


class Uploader:
    """One upload of one plan.

    Args:
        advance: told the bytes that the server has taken, those of an earlier run, too.
        chunk_bytes: the most that one request carries.
    """

    def __init__(
        self,
        client: RegistryClient,
        plan: Plan,
        package: Package,
        memory: Memory,
        advance: Callable[[int], None],
        *,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._chunk_bytes = chunk_bytes
        self._client = client
        self._plan = plan
        self._package = package
        self._memory = memory
        self._advance = advance

    def run(self, *, resume: bool) -> VersionInfo:
        """Send what is missing, have it admitted, and return the version.

        Raises:
            Refused, Untrusted: the server's verdict; the session is over.
            Unavailable: gave up; the same command continues.
            Conflict, NotFound, Unauthenticated, Failed: as the server says.
        """
        try:
            ended = self._carried_through(resume)
        except (Refused, Untrusted):
            self._memory.forget()  # there is no session, or it is over
            raise
        if ended.state not in ("admitted", "refused"):
            raise _undecided(ended)
        self._memory.forget()
        if ended.version is not None:
            return ended.version
        raise error_from(ended.problems) if ended.problems else _undecided(ended)

    def _carried_through(self, resume: bool) -> UploadInfo:
        session = self._session(resume)
        if session.state == "open":
            for entry in self._plan.files:
                self._send(session.id, entry, session.offsets.get(entry.path, 0))
            note("everything is there; the server hashes and checks it")
            session = self._client.finalize(self._plan.tenant, session.id)
        return self._ended(session)

    def _session(self, resume: bool) -> UploadInfo:
        key = self._memory.load()
        if key is not None:
            found = self._open(key)
            if resume and found.state != "refused":
                return found
            if found.state == "open":
                self._client.abandon_upload(self._plan.tenant, found.id)  # else it holds room until it expires
        return self._open(self._memory.begin())

    def _open(self, key: str) -> UploadInfo:
        """Opens it, or finds it again by its key; nothing is remembered of one that the server does not open."""
        try:
            return self._client.create_upload(self._plan.tenant, self._plan.as_json(), key)
        except (NotFound, Failed):
            self._memory.forget()
            raise

    def _send(self, session_id: str, entry: FileEntry, offset: int) -> None:
        reader = self._package.open(entry.path)
        self._advance(offset)
        while offset < entry.size:
            reached = self._send_chunk(session_id, entry, reader, offset)
            self._advance(reached - offset)
            offset = reached

    def _send_chunk(self, session_id: str, entry: FileEntry, reader: FileReader, offset: int) -> int:
        try:
            data = reader.read_at(offset, min(self._chunk_bytes, entry.size - offset))
        except AdapterdError:  # these files are not what was declared: nobody will ever send the rest
            self._give_up(session_id)
            raise
        return _persistently(lambda: self._put(session_id, entry.path, offset, data))

    def _give_up(self, session_id: str) -> None:
        """The session goes now, if the server hears of it; else it would hold the tenant's room until it expires."""
        with suppress(AdapterdError):
            self._client.abandon_upload(self._plan.tenant, session_id)

    def _put(self, session_id: str, path: str, offset: int, data: bytes) -> int:
        try:
            return self._client.send_chunk(self._plan.tenant, session_id, path, offset, data)
        except Conflict as fault:
            if fault.code is not Code.OFFSET_MISMATCH:
                raise
            # The bytes of an earlier try have arrived after all; only its answer was lost.
            there = self._client.upload(self._plan.tenant, session_id).offsets.get(path, offset)
            if there == offset:
                raise
            return there

    def _ended(self, session: UploadInfo) -> UploadInfo:
        """The session once the server has made up its mind."""
        if session.state != "processing":
            return session
        asking = Retrying(
            retry=retry_if_result(lambda s: s.state == "processing"),
            wait=wait_exponential(multiplier=0.1, max=5.0),
            stop=stop_after_delay(FINALIZE_SECONDS),
            retry_error_callback=_still_processing,
        )
        return asking(self._client.upload, self._plan.tenant, session.id)


def _persistently(call: Callable[[], int]) -> int:
    """`call`, again after a fault of network or server; the last one is raised."""
    again = Retrying(
        retry=retry_if_exception_type(Unavailable),
        wait=wait_exponential(multiplier=0.5, max=MAX_WAIT_SECONDS),
        stop=stop_after_attempt(ATTEMPTS),
        before_sleep=_tell,
        reraise=True,
    )
    return again(call)


def _tell(state: RetryCallState) -> None:
    fault = state.outcome.exception() if state.outcome else None
    note(f"{fault}; trying again (Ctrl-C to stop; the same command continues)")


def _still_processing(_: RetryCallState) -> UploadInfo:
    raise error(
        Code.SERVER_ERROR,
        "upload",
        f"the server is not done after {FINALIZE_SECONDS:.0f} s",
        "Run the same command again.",
    )


def _undecided(session: UploadInfo) -> Exception:
    message = f"the upload ended as {session.state!r}, and the server does not say why"
    return error(Code.SERVER_ERROR, session.id, message, "Run the same command again.")
