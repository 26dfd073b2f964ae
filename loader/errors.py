"""One error tree for the whole of adapterd, drawn here.

    AdapterdError                root; never raised itself; carries one or more Problems
    ├── Refused                  the input breaks a rule (validation, declared hash, quota)   exit 6  HTTP 422
    ├── Untrusted                a signature, key, statement or digest does not hold          exit 3  HTTP 422
    ├── Unauthenticated          no credential, or one that is not valid                      exit 4  HTTP 401
    ├── NotFound                 absent, or not yours: nobody can tell which                  exit 5  HTTP 404
    ├── Conflict                 the state has moved on, or a precondition does not hold      exit 7  HTTP 409
    ├── Unavailable              network, server, disk, memory: the same call may work later  exit 8  HTTP 503
    └── Failed                   the request itself is wrong, or the work could not be done   exit 1  HTTP 400

A refusal is a value, a `Problem`. Its code decides the class (`CATEGORY`), so the exit status of
the command, the HTTP status of the API and the exception a caller catches never disagree.
`ValueError` and `RuntimeError` are kept for misuse of a Python interface by its caller.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum, unique
from typing import Literal

Severity = Literal["reject", "warn"]


@unique
class Code(StrEnum):
    """Every problem code. Stable: a code is never renamed and never reused."""

    # Archives
    ARCHIVE_PATH = "ARCHIVE_PATH"
    ARCHIVE_BAD_NAME = "ARCHIVE_BAD_NAME"
    ARCHIVE_DUPLICATE = "ARCHIVE_DUPLICATE"
    ARCHIVE_SPECIAL_FILE = "ARCHIVE_SPECIAL_FILE"
    ARCHIVE_BOMB = "ARCHIVE_BOMB"
    ARCHIVE_TOO_MANY_ENTRIES = "ARCHIVE_TOO_MANY_ENTRIES"
    ARCHIVE_CORRUPT = "ARCHIVE_CORRUPT"
    ARCHIVE_UNSUPPORTED = "ARCHIVE_UNSUPPORTED"
    UNSAFE_LINK = "UNSAFE_LINK"
    # What a package holds
    MISSING_CONFIG = "MISSING_CONFIG"
    MISSING_WEIGHTS = "MISSING_WEIGHTS"
    AMBIGUOUS_WEIGHTS = "AMBIGUOUS_WEIGHTS"
    SHARDED_UNSUPPORTED = "SHARDED_UNSUPPORTED"
    FORBIDDEN_FILE = "FORBIDDEN_FILE"
    UNEXPECTED_FILE = "UNEXPECTED_FILE"
    UNKNOWN_FORMAT = "UNKNOWN_FORMAT"
    # adapter_config.json on its own
    CONFIG_NOT_JSON = "CONFIG_NOT_JSON"
    CONFIG_DUPLICATE_KEY = "CONFIG_DUPLICATE_KEY"
    CONFIG_TOO_DEEP = "CONFIG_TOO_DEEP"
    CONFIG_TOO_LARGE = "CONFIG_TOO_LARGE"
    CONFIG_MISSING_FIELD = "CONFIG_MISSING_FIELD"
    CONFIG_BAD_TYPE = "CONFIG_BAD_TYPE"
    CONFIG_BAD_VALUE = "CONFIG_BAD_VALUE"
    CONFIG_UNSAFE_REGEX = "CONFIG_UNSAFE_REGEX"
    CONFIG_IGNORED_FIELD = "CONFIG_IGNORED_FIELD"
    UNSUPPORTED_PEFT_TYPE = "UNSUPPORTED_PEFT_TYPE"
    UNSUPPORTED_FEATURE = "UNSUPPORTED_FEATURE"
    # The tensor file on its own
    ST_TRUNCATED = "ST_TRUNCATED"
    ST_HEADER_INVALID = "ST_HEADER_INVALID"
    ST_HEADER_TOO_LARGE = "ST_HEADER_TOO_LARGE"
    ST_DUPLICATE_KEY = "ST_DUPLICATE_KEY"
    ST_METADATA = "ST_METADATA"
    ST_BAD_DTYPE = "ST_BAD_DTYPE"
    ST_BAD_SHAPE = "ST_BAD_SHAPE"
    ST_BAD_NAME = "ST_BAD_NAME"
    ST_OVERFLOW = "ST_OVERFLOW"
    ST_OFFSET_RANGE = "ST_OFFSET_RANGE"
    ST_OFFSET_OVERLAP = "ST_OFFSET_OVERLAP"
    ST_OFFSET_HOLE = "ST_OFFSET_HOLE"
    ST_SIZE_MISMATCH = "ST_SIZE_MISMATCH"
    ST_TRAILING_BYTES = "ST_TRAILING_BYTES"
    ST_PARSERS_DISAGREE = "ST_PARSERS_DISAGREE"
    # Limits
    QUOTA_EXCEEDED = "QUOTA_EXCEEDED"
    RANK_TOO_LARGE = "RANK_TOO_LARGE"
    TARGET_NOT_ALLOWED = "TARGET_NOT_ALLOWED"
    # Config, tensors and base together
    BASE_MISMATCH = "BASE_MISMATCH"
    BASE_REVISION_MISMATCH = "BASE_REVISION_MISMATCH"
    UNKNOWN_MODULE = "UNKNOWN_MODULE"
    UNKNOWN_KEY = "UNKNOWN_KEY"
    KEY_PREFIX = "KEY_PREFIX"
    DUPLICATE_LOGICAL_KEY = "DUPLICATE_LOGICAL_KEY"
    MISSING_TENSOR = "MISSING_TENSOR"
    SHAPE_MISMATCH = "SHAPE_MISMATCH"
    RANK_MISMATCH = "RANK_MISMATCH"
    EMPTY_TENSOR = "EMPTY_TENSOR"
    EMPTY_ADAPTER = "EMPTY_ADAPTER"
    CONFIG_TENSOR_DISAGREE = "CONFIG_TENSOR_DISAGREE"
    # Content
    DTYPE_UNSUPPORTED = "DTYPE_UNSUPPORTED"
    DTYPE_MIXED = "DTYPE_MIXED"
    NONFINITE = "NONFINITE"
    ZERO_DELTA = "ZERO_DELTA"
    SCALE_SUSPECT = "SCALE_SUSPECT"
    HASH_MISMATCH = "HASH_MISMATCH"
    # A base model's own description
    BASE_TABLE_INVALID = "BASE_TABLE_INVALID"
    # Trust
    SIGNATURE_MISSING = "SIGNATURE_MISSING"
    SIGNATURE_INVALID = "SIGNATURE_INVALID"
    SIGNATURE_MALFORMED = "SIGNATURE_MALFORMED"
    KEY_UNKNOWN = "KEY_UNKNOWN"
    KEY_REVOKED = "KEY_REVOKED"
    KEY_UNSUPPORTED = "KEY_UNSUPPORTED"
    MANIFEST_NOT_EXACT = "MANIFEST_NOT_EXACT"
    STATEMENT_MISSING = "STATEMENT_MISSING"
    STATEMENT_INVALID = "STATEMENT_INVALID"
    STATEMENT_MISMATCH = "STATEMENT_MISMATCH"
    CHUNK_MISMATCH = "CHUNK_MISMATCH"
    TRUST_NOT_CONFIGURED = "TRUST_NOT_CONFIGURED"
    TRUST_FILE_INVALID = "TRUST_FILE_INVALID"
    # Tenancy and service
    UNAUTHENTICATED = "UNAUTHENTICATED"
    TOKEN_EXPIRED = "TOKEN_EXPIRED"  # noqa: S105 - a code, not a secret
    NOT_FOUND = "NOT_FOUND"
    PATH_NOT_FOUND = "PATH_NOT_FOUND"
    REF_INVALID = "REF_INVALID"
    REQUEST_INVALID = "REQUEST_INVALID"
    CONFLICT = "CONFLICT"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    PRECONDITION_FAILED = "PRECONDITION_FAILED"
    PRECONDITION_REQUIRED = "PRECONDITION_REQUIRED"
    OFFSET_MISMATCH = "OFFSET_MISMATCH"
    UPLOAD_INCOMPLETE = "UPLOAD_INCOMPLETE"
    REF_CONFLICT = "REF_CONFLICT"
    VERSION_WITHDRAWN = "VERSION_WITHDRAWN"
    RANGE_INVALID = "RANGE_INVALID"
    SERVER_UNREACHABLE = "SERVER_UNREACHABLE"
    SERVER_ERROR = "SERVER_ERROR"
    STORAGE_FULL = "STORAGE_FULL"
    STORAGE_UNAVAILABLE = "STORAGE_UNAVAILABLE"
    DATABASE_UNAVAILABLE = "DATABASE_UNAVAILABLE"
    SCHEMA_OUTDATED = "SCHEMA_OUTDATED"
    PORT_IN_USE = "PORT_IN_USE"
    SETTINGS_INVALID = "SETTINGS_INVALID"
    INTERNAL = "INTERNAL"
    # The cache and the engine
    ROWS_MISMATCH = "ROWS_MISMATCH"
    MODULE_NOT_SERVED = "MODULE_NOT_SERVED"
    LEASE_NOT_READY = "LEASE_NOT_READY"
    LEASE_RELEASED = "LEASE_RELEASED"
    LEASE_TIMEOUT = "LEASE_TIMEOUT"
    LEASE_CANCELLED = "LEASE_CANCELLED"
    SLOT_STALE = "SLOT_STALE"
    BUDGET_EXCEEDED = "BUDGET_EXCEEDED"
    COMPOSITION_INVALID = "COMPOSITION_INVALID"
    DEVICE_ERROR = "DEVICE_ERROR"
    CACHE_CLOSED = "CACHE_CLOSED"
    # Appended later; the order of the enum means nothing
    METHOD_NOT_ALLOWED = "METHOD_NOT_ALLOWED"
    BASE_NOT_REGISTERED = "BASE_NOT_REGISTERED"
    FILE_CHANGED = "FILE_CHANGED"
    LOADER_UNAVAILABLE = "LOADER_UNAVAILABLE"
    LOADER_MISMATCH = "LOADER_MISMATCH"
    QUEUE_FULL = "QUEUE_FULL"
    ADAPTER_IN_USE = "ADAPTER_IN_USE"
    CACHE_DRAINING = "CACHE_DRAINING"
    VERSION_REVOKED = "VERSION_REVOKED"
    PLAN_RING_FULL = "PLAN_RING_FULL"
    KERNEL_UNAVAILABLE = "KERNEL_UNAVAILABLE"


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding.

    Attributes:
        code: what rule is broken.
        severity: `reject` decides, `warn` is told and recorded.
        where: the field, tensor, file, entry or argument it is about.
        message: one sentence with the found and the wanted value.
        hint: what to do about it; may be empty.
    """

    code: Code
    severity: Severity
    where: str
    message: str
    hint: str = ""

    def as_json(self) -> dict[str, str]:
        """The five fields as plain strings, in the order of docs/surfaces.md."""
        return {
            "code": self.code.value,
            "severity": self.severity,
            "where": self.where,
            "message": self.message,
            "hint": self.hint,
        }

    @classmethod
    def from_json(cls, fields: dict[str, str]) -> Problem:
        """The inverse of `as_json`. Raises ValueError on an unknown code or severity."""
        severity: Severity = "warn" if fields.get("severity") == "warn" else "reject"
        return cls(
            Code(fields["code"]),
            severity,
            fields.get("where", ""),
            fields.get("message", ""),
            fields.get("hint", ""),
        )

    def __str__(self) -> str:
        where = f" at {self.where}" if self.where else ""
        end = "" if self.message.endswith((".", "!", "?")) else "."
        hint = f"{end} {self.hint}" if self.hint else ""
        return f"{self.code}{where}: {self.message}{hint}"


def reject(code: Code, where: str, message: str, hint: str = "") -> Problem:
    """A problem that decides."""
    return Problem(code, "reject", where, message, hint)


def warn(code: Code, where: str, message: str, hint: str = "") -> Problem:
    """A problem that is told and recorded, but does not decide."""
    return Problem(code, "warn", where, message, hint)


class AdapterdError(Exception):
    """Root of the tree; never raised itself.

    Attributes:
        problems: at least one; the first is the one a one-line answer shows.
    """

    exit_status: int = 1
    http_status: int = 400

    def __init__(self, *problems: Problem) -> None:
        if not problems:
            raise ValueError("an AdapterdError carries at least one Problem")
        super().__init__("; ".join(str(p) for p in problems))
        self.problems: tuple[Problem, ...] = problems

    @property
    def problem(self) -> Problem:
        """The first problem."""
        return self.problems[0]

    @property
    def code(self) -> Code:
        """The first problem's code."""
        return self.problems[0].code


class Refused(AdapterdError):
    """The input breaks a rule: validation, a declared hash, a quota."""

    exit_status = 6
    http_status = 422


class Untrusted(AdapterdError):
    """A signature, key, statement or digest does not hold."""

    exit_status = 3
    http_status = 422


class Unauthenticated(AdapterdError):
    """No credential, or one that is not valid."""

    exit_status = 4
    http_status = 401


class NotFound(AdapterdError):
    """Absent, or not yours: nobody can tell which (I9)."""

    exit_status = 5
    http_status = 404


class Conflict(AdapterdError):
    """The state has moved on, or a precondition does not hold."""

    exit_status = 7
    http_status = 409


class Unavailable(AdapterdError):
    """Network, server, disk or memory: the same call may work later."""

    exit_status = 8
    http_status = 503


class Failed(AdapterdError):
    """The request itself is wrong, or the work could not be done."""

    exit_status = 1
    http_status = 400


_UNTRUSTED = {
    Code.SIGNATURE_MISSING, Code.SIGNATURE_INVALID, Code.SIGNATURE_MALFORMED, Code.KEY_UNKNOWN, Code.KEY_REVOKED,
    Code.KEY_UNSUPPORTED, Code.MANIFEST_NOT_EXACT, Code.STATEMENT_MISSING, Code.STATEMENT_INVALID,
    Code.STATEMENT_MISMATCH, Code.CHUNK_MISMATCH, Code.TRUST_NOT_CONFIGURED, Code.TRUST_FILE_INVALID,
}  # fmt: skip
_NOT_FOUND = {Code.NOT_FOUND, Code.PATH_NOT_FOUND, Code.BASE_NOT_REGISTERED}
_UNAUTHENTICATED = {Code.UNAUTHENTICATED, Code.TOKEN_EXPIRED}
_CONFLICT = {
    Code.CONFLICT, Code.ALREADY_EXISTS, Code.PRECONDITION_FAILED, Code.PRECONDITION_REQUIRED, Code.OFFSET_MISMATCH,
    Code.UPLOAD_INCOMPLETE, Code.REF_CONFLICT, Code.VERSION_WITHDRAWN, Code.LOADER_MISMATCH,
    Code.ADAPTER_IN_USE, Code.VERSION_REVOKED,
}  # fmt: skip
_UNAVAILABLE = {
    Code.SERVER_UNREACHABLE, Code.SERVER_ERROR, Code.STORAGE_FULL, Code.STORAGE_UNAVAILABLE,
    Code.DATABASE_UNAVAILABLE, Code.BUDGET_EXCEEDED, Code.LEASE_TIMEOUT, Code.DEVICE_ERROR, Code.LOADER_UNAVAILABLE,
    Code.QUEUE_FULL, Code.CACHE_DRAINING, Code.PLAN_RING_FULL,
}  # fmt: skip
_FAILED = {
    Code.REF_INVALID, Code.REQUEST_INVALID, Code.RANGE_INVALID, Code.SCHEMA_OUTDATED, Code.PORT_IN_USE,
    Code.SETTINGS_INVALID, Code.INTERNAL, Code.BASE_TABLE_INVALID, Code.ROWS_MISMATCH, Code.MODULE_NOT_SERVED,
    Code.LEASE_NOT_READY, Code.LEASE_RELEASED, Code.LEASE_CANCELLED, Code.SLOT_STALE, Code.COMPOSITION_INVALID,
    Code.CACHE_CLOSED, Code.METHOD_NOT_ALLOWED, Code.KERNEL_UNAVAILABLE,
}  # fmt: skip


def _categories() -> dict[Code, type[AdapterdError]]:
    """Every code's class; what stands in no set above is a refusal of the input."""
    groups: list[tuple[set[Code], type[AdapterdError]]] = [
        (_UNTRUSTED, Untrusted), (_NOT_FOUND, NotFound), (_UNAUTHENTICATED, Unauthenticated),
        (_CONFLICT, Conflict), (_UNAVAILABLE, Unavailable), (_FAILED, Failed),
    ]  # fmt: skip
    table: dict[Code, type[AdapterdError]] = dict.fromkeys(Code, Refused)
    for codes, kind in groups:
        table.update(dict.fromkeys(codes, kind))
    return table


CATEGORY: dict[Code, type[AdapterdError]] = _categories()


def error(code: Code, where: str, message: str, hint: str = "") -> AdapterdError:
    """The exception that goes with `code`, for `raise error(…)`."""
    return CATEGORY[code](reject(code, where, message, hint))


def error_from(problems: Iterable[Problem]) -> AdapterdError:
    """One exception for several problems; a refusal of the input wins over a lack of trust (docs/surfaces.md)."""
    rejects: Sequence[Problem] = [p for p in problems if p.severity == "reject"]
    if not rejects:
        raise ValueError("no problem rejects")
    first = min(rejects, key=lambda p: CATEGORY[p.code] is not Refused)
    ordered = [first, *(p for p in rejects if p is not first)]
    return CATEGORY[first.code](*ordered)
