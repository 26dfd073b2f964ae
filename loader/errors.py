"""One error tree for the whole of adapterd, drawn here.

    AdapterdError                root; never raised itself; carries one or more Problems
    ├── Refused                  the input breaks a rule (validation, declared hash, quota)   exit 6  HTTP 422
    ├── Untrusted                a signature, key, statement or digest does not hold          exit 3  HTTP 422
    ├── Unauthenticated          no credential, or one that is not valid                      exit 4  HTTP 401
    ├── NotFound                 absent, or not yours: nobody can tell which                  exit 5  HTTP 404
    ├── Conflict                 the state has moved on, or a precondition does not hold      exit 7  HTTP 409
    ├── Unavailable              network, server, disk, memory: the same call may work later  exit 8  HTTP 503
    └── Failed                   the request itself is wrong, or the work could not be done   exit 1  HTTP 400

A refusal is a value, a `Problem`. Its code (`codes`) decides the class (`CATEGORY`), so the exit status of
the command, the HTTP status of the API and the exception a caller catches never disagree.
`ValueError` and `RuntimeError` are kept for misuse of a Python interface by its caller.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from adapterd.loader.codes import Code

__all__ = [
    "CATEGORY", "AdapterdError", "Code", "Conflict", "Failed", "NotFound", "Problem", "Refused", "Severity",
    "Unauthenticated", "Unavailable", "Untrusted", "error", "error_from", "reject", "warn",
]  # fmt: skip

Severity = Literal["reject", "warn"]


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
