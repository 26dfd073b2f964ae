"""What people type and point at, turned into frozen types: base models, keys, limits, digests, sizes, subjects."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import typer

from adapterd.cli.environment import has_server, server_url

if TYPE_CHECKING:
    from adapterd.loader.base_model import BaseSpec
    from adapterd.loader.errors import AdapterdError, Code
    from adapterd.loader.identity import Ref
    from adapterd.loader.limits import Limits
    from adapterd.loader.trust.keys import PrivateKey, PublicKey

REF_HELP = r"tenant/name[:alias]\[@sha256:…]; no alias means `default`."
"""Escaped for the help, which reads brackets as markup."""

K = TypeVar("K")

_SIZE = re.compile(r"([0-9]{1,15})\s*([KMGT]iB|B)?")
_UNITS = {"B": 0, "KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}

MAX_KEY_BYTES = 64 << 10
MAX_LIMITS_BYTES = 1 << 20

BASE_HELP = "Table file, model directory, or ID@REV from the registry."
NO_BASE = (
    "a base model's module table is needed to check modules and shapes. Give --base ID@REV (from the "
    "registry), --base MODEL_DIR with --base-id and --base-revision, or a table file made once with "
    "`adapterctl base table MODEL_DIR --id ID --revision REV --out FILE`"
)


@dataclass(frozen=True)
class BaseChoice:
    """The three options that name a base model."""

    text: str | None
    id: str | None = None
    revision: str | None = None

    def load(self) -> BaseSpec:
        """The module table, fetched once.

        Raises:
            typer.BadParameter: nothing is named, or the options do not go together.
            NotFound, Failed: there is no such file or base model; the table is no table.
        """
        return self._loaded

    @cached_property
    def _loaded(self) -> BaseSpec:
        if self.text is None:
            raise typer.BadParameter(NO_BASE, param_hint="--base")
        path = Path(self.text)
        if path.is_dir():
            return self._from_directory(path)
        if path.exists():
            return self._from_file(path)
        if not _is_pinned(self.text):
            raise _no_such_base(self.text)
        return _from_registry(*split_pinned(self.text))

    def _from_directory(self, path: Path) -> BaseSpec:
        from adapterd.loader.base_model import BaseSpec

        if self.id is None or self.revision is None:
            message = (
                "a model directory says neither its id nor its revision: give --base-id and --base-revision"
                " (of `base add` and `base table`: --id and --revision)"
            )
            raise typer.BadParameter(message, param_hint="--base")
        return BaseSpec.from_directory(path, id=self.id, revision=self.revision)

    def _from_file(self, path: Path) -> BaseSpec:
        from adapterd.loader.base_model import BaseSpec

        spec = BaseSpec.load(path)
        if self.id not in (None, spec.id) or self.revision not in (None, spec.revision):
            message = f"the table is of {spec.id}@{spec.revision}, which --base-id and --base-revision deny"
            raise typer.BadParameter(message, param_hint="--base")
        return spec


def _no_such_base(text: str) -> AdapterdError:
    from adapterd.loader.errors import Code, error

    return error(
        Code.PATH_NOT_FOUND, text, "there is no such file or folder",
        "A registered base is named ID@REVISION; `adapterctl base list` shows them.",
    )  # fmt: skip


def _is_pinned(text: str) -> bool:
    base_id, _, revision = text.rpartition("@")
    return bool(base_id and revision)


def split_pinned(text: str) -> tuple[str, str]:
    """`ID@REV` as (id, revision). Raises Failed (REF_INVALID) for a revision that pins nothing."""
    from adapterd.loader.identity import check_revision

    base_id, _, revision = text.rpartition("@")
    if not base_id:
        raise typer.BadParameter(f"{text!r} is not ID@REV", param_hint="ID@REV")
    return base_id, check_revision(revision)


def _from_registry(base_id: str, revision: str) -> BaseSpec:
    from adapterd.cli.connection import connect

    with connect() as client:
        return client.base(base_id, revision)


def load_limits(path: Path | None) -> Limits:
    """The caps in a JSON file, or the defaults. Raises Failed (SETTINGS_INVALID), NotFound."""
    from adapterd.loader.errors import Code, error
    from adapterd.loader.limits import DEFAULT_LIMITS, Limits

    if path is None:
        return DEFAULT_LIMITS
    try:
        values = json.loads(read_small(path, MAX_LIMITS_BYTES))
    except (ValueError, RecursionError) as fault:
        raise error(Code.SETTINGS_INVALID, str(path), f"is not JSON: {fault}") from fault
    if not isinstance(values, dict):
        raise error(Code.SETTINGS_INVALID, str(path), "is not a JSON object of limits")
    return Limits.from_json(values)


def read_small(path: Path, cap: int) -> bytes:
    """A regular file that fits in `cap` bytes. Raises NotFound (PATH_NOT_FOUND), Failed (SETTINGS_INVALID)."""
    from adapterd.loader.errors import Code, error
    from adapterd.loader.regular_file import NotRegular, TooLarge, read_regular

    try:
        return read_regular(path, cap)
    except TooLarge as fault:
        raise error(Code.SETTINGS_INVALID, str(path), f"is larger than {cap} bytes") from fault
    except NotRegular as fault:
        hint = "What a pipe says can be written into a file first."
        raise error(Code.SETTINGS_INVALID, str(path), "is no regular file", hint) from fault
    except OSError as fault:
        raise error(
            Code.PATH_NOT_FOUND, str(path), f"cannot be read: {(fault.strerror or str(fault)).lower()}"
        ) from fault


def load_public_key(path: Path) -> PublicKey:
    """A PEM public key. Raises Untrusted (KEY_UNSUPPORTED) at the file's name, NotFound."""
    from adapterd.loader.trust.keys import PublicKey

    return _key_at(path, PublicKey.from_pem)


def load_private_key(path: Path) -> PrivateKey:
    """A PEM private key. Raises Untrusted (KEY_UNSUPPORTED) at the file's name, NotFound."""
    from adapterd.loader.trust.keys import PrivateKey

    return _key_at(path, PrivateKey.from_pem)


def _key_at(path: Path, parse: Callable[[bytes], K]) -> K:
    from adapterd.loader.errors import Untrusted, error

    try:
        return parse(read_small(path, MAX_KEY_BYTES))
    except Untrusted as fault:
        raise error(fault.code, str(path), fault.problem.message, fault.problem.hint) from fault


def parse_codes(names: Iterable[str]) -> frozenset[Code]:
    """`--allow` values. Raises typer.BadParameter for a word that is no code."""
    from adapterd.loader.errors import Code

    codes = set()
    for name in names:
        try:
            codes.add(Code(name.strip().upper()))
        except ValueError:
            raise typer.BadParameter(f"{name!r} is not a problem code", param_hint="--allow") from None
    return frozenset(codes)


def parse_digests(values: Iterable[str]) -> Mapping[str, str]:
    """`--sha256 NAME=HEX` values. Raises typer.BadParameter."""
    declared: dict[str, str] = {}
    for value in values:
        name, _, digest = value.rpartition("=")
        digest = digest.lower().removeprefix("sha256:")
        if not name or len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
            raise typer.BadParameter(f"{value!r} is not NAME=<64 hex>", param_hint="--sha256")
        declared[name] = digest
    return declared


def parse_size(text: str, option: str) -> int:
    """`8GiB`, `64 MiB` or plain bytes, in bytes. Raises typer.BadParameter."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"{text[:40]!r} is no size; write 512MiB, 8GiB or bytes", param_hint=option)
    return int(match[1]) << _UNITS[match[2] or "B"]


def subject_of(text: str) -> Path | Ref:
    """A folder here, or a REF of the registry.

    What exists is a path. What does not exist is a REF only if it reads as one and a server is
    named; otherwise it is a missing folder, which the caller's opening of it will say.

    Raises:
        Failed: SETTINGS_INVALID for what can only be a REF (it has an alias or a digest) without a server.
    """
    from adapterd.loader.errors import AdapterdError
    from adapterd.loader.identity import Ref

    path = Path(text)
    if path.exists():
        return path
    if not has_server():
        return _only_a_ref(text) or path
    try:
        return Ref.parse(text)
    except AdapterdError:
        return path


def _only_a_ref(text: str) -> Ref | None:
    """A REF with an alias or a digest, for which a server must be named; None for what may be a folder."""
    from adapterd.loader.errors import AdapterdError
    from adapterd.loader.identity import Ref

    try:
        ref = Ref.parse(text)
    except AdapterdError:
        return None
    if ref.alias or ref.digest:
        server_url()
        return ref
    return None


def parse_name(text: str) -> tuple[str, str]:
    """`tenant/name` and nothing more. Raises Failed (REF_INVALID)."""
    from adapterd.loader.errors import Code, error
    from adapterd.loader.identity import Ref

    ref = Ref.parse(text)
    if ref.alias or ref.digest:
        raise error(Code.REF_INVALID, text, "an adapter is meant here, without alias or digest", "Write tenant/name.")
    return ref.tenant, ref.name


def parse_alias(text: str) -> tuple[str, str, str]:
    """`tenant/name:alias`. Raises Failed (REF_INVALID)."""
    from adapterd.loader.errors import Code, error
    from adapterd.loader.identity import Ref

    ref = Ref.parse(text)
    if ref.alias is None or ref.digest:
        raise error(Code.REF_INVALID, text, "an alias is meant here", "Write tenant/name:alias.")
    return ref.tenant, ref.name, ref.alias
