"""The verdict on a package: structure, effect and signature, with the loader's own checks.

The server and the loader run the same `examine`; this room adds who signed it and what that decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

from adapterd.loader.base_model import BaseSpec
from adapterd.loader.checks import examine
from adapterd.loader.errors import AdapterdError, Code, Problem, Untrusted, error_from, reject, warn
from adapterd.loader.formats.files import Package, file_entries
from adapterd.loader.formats.package import Contents, judge_package
from adapterd.loader.identity import SIGNATURE_FILE, FileEntry
from adapterd.loader.limits import DEFAULT_LIMITS, Limits
from adapterd.loader.manifest import Manifest

if TYPE_CHECKING:
    from adapterd.loader.trust.keys import PublicKey

SignatureStatus = Literal["valid", "invalid", "missing", "not-checked"]


class Policy(StrEnum):
    """What a signature that does not hold means.

    STRICT refuses; WARN says so and goes on; PERMISSIVE only reports it in `signature`.
    """

    STRICT = "strict"
    WARN = "warn"
    PERMISSIVE = "permissive"


@dataclass(frozen=True)
class Signature:
    """What is known about `model.sig`."""

    status: SignatureStatus
    key_id: str | None = None
    root_digest: str | None = None
    problem: Problem | None = None

    def as_json(self) -> dict[str, Any]:
        code = self.problem.code.value if self.problem else None
        message = self.problem.message if self.problem else None
        return {
            "status": self.status, "key_id": self.key_id, "root_digest": self.root_digest,
            "code": code, "message": message,
        }  # fmt: skip


NOT_CHECKED = Signature("not-checked")


@dataclass(frozen=True)
class Wish:
    """How to verify.

    Attributes:
        policy: None for a local folder without keys: the signature is then not looked at.
        keys: publishers' keys, one of which must have signed.
    """

    limits: Limits = DEFAULT_LIMITS
    policy: Policy | None = None
    keys: tuple[PublicKey, ...] = ()
    allow: frozenset[Code] = frozenset()
    refuse: frozenset[Code] = frozenset()
    declared_sha256: Mapping[str, str] = field(default_factory=dict)

    @property
    def effective_policy(self) -> Policy | None:
        """Keys without a policy are meant strictly."""
        return self.policy or (Policy.STRICT if self.keys else None)


@dataclass(frozen=True)
class Verification:
    """The answer of `verify`.

    Attributes:
        contents: how the files were sorted, where some of them are refused by name.
    """

    subject: str
    problems: tuple[Problem, ...]
    signature: Signature
    manifest: Manifest | None
    contents: Contents | None = None

    @property
    def ok(self) -> bool:
        return not any(p.severity == "reject" for p in self.problems)

    @property
    def status(self) -> int:
        """The exit status: a refusal of the input (6) wins over a lack of trust (3)."""
        return 0 if self.ok else error_from(self.problems).exit_status

    def as_json(self) -> dict[str, Any]:
        """docs/surfaces.md, without `schema` and `ok`."""
        return {
            "subject": self.subject,
            "problems": [p.as_json() for p in self.problems],
            "signature": self.signature.as_json(),
            "manifest": self.manifest.as_json() if self.manifest else None,
        }


def failed(subject: str, fault: AdapterdError) -> Verification:
    """The answer when the package could not even be opened."""
    return Verification(subject, fault.problems, NOT_CHECKED, None)


def verify_package(
    package: Package,
    base: BaseSpec,
    wish: Wish,
    *,
    subject: str,
    progress: Callable[[int], None] | None = None,
) -> Verification:
    """Verify an open package through its open files. Never raises AdapterdError."""
    verdict = examine(
        package,
        base,
        limits=wish.limits,
        allow=wish.allow,
        refuse=wish.refuse,
        declared_sha256=wish.declared_sha256,
        progress=progress,
    )
    files = verdict.manifest.files if verdict.manifest else None
    signature = check_signature(package, files, wish)
    problems = (*verdict.problems, *_decided(signature, wish.effective_policy))
    contents = judge_package(package.sizes(), wish.limits) if verdict.manifest is None else None
    return Verification(subject, problems, signature, verdict.manifest, contents)


def check_signature(package: Package, files: Iterable[FileEntry] | None, wish: Wish) -> Signature:
    """Who signed; `files` are hashed here when the verdict has none."""
    if wish.effective_policy is None:
        return NOT_CHECKED
    if SIGNATURE_FILE not in package.names():
        hint = "Sign it: `adapterctl sign DIR --key KEY`."
        return Signature(
            "missing",
            problem=reject(Code.SIGNATURE_MISSING, SIGNATURE_FILE, "the package is not signed", hint),
        )
    if not wish.keys:
        hint = "Give the publisher's public key with --key."
        return Signature(
            "not-checked",
            problem=reject(Code.TRUST_NOT_CONFIGURED, "--key", "no key to check the signature with", hint),
        )
    return _checked(package, files, wish)


def _checked(package: Package, files: Iterable[FileEntry] | None, wish: Wish) -> Signature:
    from adapterd.loader.trust import oms  # cryptography takes a while to start, and most look at no signature

    try:
        bundle = read_signature(package, wish.limits)
        entries = files if files is not None else _hashed(package, wish.limits)
        held = oms.verify(bundle, entries, wish.keys)
    except Untrusted as fault:
        return Signature("invalid", problem=fault.problem)
    except _TooMuchToHashError:
        return NOT_CHECKED
    return Signature("valid", held.key_id, held.root_digest)


class _TooMuchToHashError(Exception):
    """The package is refused for its size; hashing it all the same would be the attacker's wish."""


def _hashed(package: Package, limits: Limits) -> tuple[FileEntry, ...]:
    names = [name for name in package.names() if name != SIGNATURE_FILE and not name.endswith("/")]
    if sum(package.open(name).size for name in names) > limits.max_total_bytes:
        raise _TooMuchToHashError
    return file_entries(package, names)


def read_signature(package: Package, limits: Limits) -> bytes:
    """`model.sig`. Raises Untrusted (SIGNATURE_MALFORMED) if it is larger than any signature."""
    reader = package.open(SIGNATURE_FILE)
    if reader.size > limits.max_signature_bytes:
        message = f"{reader.size} bytes are more than the {limits.max_signature_bytes} of a signature"
        raise Untrusted(reject(Code.SIGNATURE_MALFORMED, SIGNATURE_FILE, message))
    return reader.read_at(0, reader.size)


def _decided(signature: Signature, policy: Policy | None) -> tuple[Problem, ...]:
    """The signature's problem, as heavy as the policy makes it."""
    p = signature.problem
    if p is None or policy is None or policy is Policy.PERMISSIVE:
        return ()
    if policy is Policy.STRICT:
        return (p,)
    return (warn(p.code, p.where, p.message, p.hint),)
