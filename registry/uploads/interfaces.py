"""What an upload session is, in frozen types."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from adapterd.loader.errors import Code, Conflict, Problem, reject
from adapterd.loader.identity import FileEntry


class UploadState(StrEnum):
    """OPEN takes bytes; PROCESSING is an open one that somebody is finalizing; the others are final."""

    OPEN = "open"
    PROCESSING = "processing"
    ADMITTED = "admitted"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class NewUpload:
    """What a publisher declares before a byte is sent. `files` include `model.sig` where there is one."""

    adapter: str
    base_id: str
    base_revision: str
    files: tuple[FileEntry, ...]
    allow: frozenset[Code]
    alias: str | None


@dataclass(frozen=True, slots=True)
class StagingQuota:
    """What one tenant may hold in uploads.

    Attributes:
        uploads: how many may be open at once.
        nbytes: what they may have declared together; bytes count before they are sent, so that what was
            once opened can be finished.
        closed: how many that are over are told until they expire; the oldest are forgotten earlier. A refusal
            costs its sender nothing, and must not fill the database.
    """

    uploads: int = 64
    nbytes: int = 64 << 30
    closed: int = 10_000


@dataclass(frozen=True, slots=True)
class UploadFile:
    """A declared file and how much of it is here.

    Attributes:
        position: the file's number in the declaration, and its name in the staging area.
        declared: path, SHA-256 and size (bytes) as declared.
        offset: bytes received so far.
    """

    position: int
    declared: FileEntry
    offset: int

    @property
    def complete(self) -> bool:
        return self.offset == self.declared.size


@dataclass(frozen=True, slots=True)
class Upload:
    """One session. `number` is the version's once it is admitted; `problems` are why it was refused."""

    tenant: str
    id: str
    adapter: str
    base_id: str
    base_revision: str
    files: tuple[UploadFile, ...]
    allow: frozenset[Code]
    alias: str | None
    state: UploadState
    problems: tuple[Problem, ...]
    number: int | None
    created_by: str
    expires_at: datetime

    @property
    def closed(self) -> bool:
        """Whether it is decided what came of it."""
        return self.state in (UploadState.ADMITTED, UploadState.REFUSED)

    def file(self, path: str) -> UploadFile | None:
        """The declared file of that name, or None."""
        return next((f for f in self.files if f.declared.path == path), None)


class OffsetMismatch(Conflict):
    """The bytes sent do not start where the received ones end; `offset` is where they end."""

    def __init__(self, path: str, offset: int, given: int) -> None:
        super().__init__(
            reject(
                Code.OFFSET_MISMATCH,
                path,
                f"{offset} bytes are here, the request starts at {given}",
                "Continue at Upload-Offset.",
            )
        )
        self.offset = offset
