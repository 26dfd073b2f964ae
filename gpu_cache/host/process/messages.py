"""What worker and loader say to each other: one frozen dataclass a message, two closed unions.

A connection begins with `Hello`; the loader answers with `Welcome` (and the slab's descriptor beside it), with
`WantTable` if it does not know the base yet, or with `Refusal`, after which it hangs up. Requests are numbered
by the worker, and a number is used once a connection. Everything that is not one of these messages, to the
letter, ends the connection.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, get_args, get_type_hints

from adapterd.gpu_cache.host.interface import Origin
from adapterd.gpu_cache.host.loading import Dtypes
from adapterd.gpu_cache.host.process.frames import Frame, Garbled
from adapterd.gpu_cache.host.process.values import Reader, plain, reader
from adapterd.loader.errors import Problem
from adapterd.loader.identity import BasePin, Ref, VersionKey
from adapterd.loader.sharding import WHOLE, Sharding
from adapterd.loader.sources.interface import Resolved

PROTOCOL = 2


# --- a worker says


@dataclass(frozen=True, slots=True)
class Hello:
    """Who calls, and by what it goes. `trust` and `source` are digests; they must be the loader's own."""

    protocol: int
    trust: str
    source: str
    page_bytes: int
    dtype: Dtypes
    base: BasePin
    sharding: Sharding = WHOLE


@dataclass(frozen=True, slots=True)
class Table:
    """The base that `WantTable` asked for: `BaseSpec.as_json()` as JSON."""

    body: bytes


@dataclass(frozen=True, slots=True)
class Resolve:
    request: int
    tenant: str
    asked: tuple[Ref, ...]


@dataclass(frozen=True, slots=True)
class Verify:
    request: int
    tenant: str
    resolved: Resolved


@dataclass(frozen=True, slots=True)
class Fetch:
    request: int
    tenant: str
    wanted: tuple[Resolved, ...]
    priority: int


@dataclass(frozen=True, slots=True)
class Release:
    request: int


@dataclass(frozen=True, slots=True)
class Forget:
    key: VersionKey


@dataclass(frozen=True, slots=True)
class Rebase:
    """Requests from here on are for this base: `BaseSpec.as_json()` as JSON."""

    body: bytes


@dataclass(frozen=True, slots=True)
class Trusting:
    """The worker goes by this trust from here on. The loader reads its trust file again, and hangs up if it says
    something else."""

    trust: str


@dataclass(frozen=True, slots=True)
class Ping:
    """Is anybody there? The loader has owed an answer for a while."""


# --- a loader says


@dataclass(frozen=True, slots=True)
class Welcome:
    """The slab's descriptor comes with it."""

    slab_bytes: int
    page_bytes: int
    trust: str


@dataclass(frozen=True, slots=True)
class WantTable:
    base: BasePin


@dataclass(frozen=True, slots=True)
class Refusal:
    """The last message of a connection."""

    problems: tuple[Problem, ...]


@dataclass(frozen=True, slots=True)
class Known:
    """Manifest and layout of one version, said once a connection: later messages name the number.

    Attributes:
        facts: its number.
        drop: numbers that will not be named again.
        body: see `facts`.
    """

    facts: int
    drop: tuple[int, ...]
    body: bytes


@dataclass(frozen=True, slots=True)
class ResolvedAll:
    request: int
    resolved: tuple[Resolved, ...]


@dataclass(frozen=True, slots=True)
class Verified:
    """`publisher` is a key id; empty if nobody signed it."""

    request: int
    facts: int
    publisher: str = ""


@dataclass(frozen=True, slots=True)
class Packed:
    """One image. So many of the `runs` of `Fetched` are its pages, in the order of the packed form."""

    key: VersionKey
    facts: int
    runs: int
    origin: Origin
    seconds: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Fetched:
    """`runs` are those of all images, one behind the other; see `page_runs`."""

    request: int
    images: tuple[Packed, ...]
    runs: bytes


@dataclass(frozen=True, slots=True)
class Failed:
    request: int
    problems: tuple[Problem, ...]


@dataclass(frozen=True, slots=True)
class TrustChanged:
    """What the loader trusts is something else now: verify again."""

    trust: str


@dataclass(frozen=True, slots=True)
class Usage:
    """What is in the slab; said from time to time. See `facts`."""

    body: bytes


@dataclass(frozen=True, slots=True)
class Loading:
    """How far the loads are that run; said from time to time, as long as there are any. See `facts`."""

    body: bytes


@dataclass(frozen=True, slots=True)
class Pong:
    """To each `Ping`, at once, whatever the loads are at."""


Request = Resolve | Verify | Fetch
FromWorker = Hello | Table | Resolve | Verify | Fetch | Release | Forget | Rebase | Trusting | Ping
FromLoader = (
    Welcome | WantTable | Refusal | Known | ResolvedAll | Verified | Fetched | Failed | TrustChanged
    | Usage | Loading | Pong
)  # fmt: skip
Message = FromWorker | FromLoader


def encode(message: Message) -> bytes:
    """A whole frame. Raises Garbled if it is too large to be sent."""
    head: list[Any] = [type(message).__name__]
    body = b""
    for field in fields(message):
        value = getattr(message, field.name)
        if isinstance(value, bytes):
            body = value
        else:
            head.append(plain(value))
    return Frame(json.dumps(head, separators=(",", ":")).encode(), body).encoded()


def from_worker(frame: Frame) -> FromWorker:
    """Raises Garbled."""
    message: FromWorker = _decoded(frame, _FROM_WORKER)
    return message


def from_loader(frame: Frame) -> FromLoader:
    """Raises Garbled."""
    message: FromLoader = _decoded(frame, _FROM_LOADER)
    return message


def _decoded(frame: Frame, known: dict[str, type]) -> Any:
    head = _json(frame.head)
    if type(head) is not list or not head or type(head[0]) is not str or head[0] not in known:
        raise Garbled("not a message of this protocol")
    kind = known[head[0]]
    read, carries = _shape(kind)
    if frame.body and not carries:
        raise Garbled(f"{head[0]} carries no bytes")
    values = read(head[1:])
    return kind(*values, frame.body) if carries else kind(*values)


@cache
def _shape(kind: type) -> tuple[Reader, bool]:
    """What reads a message's head, and whether it has a body (its last field)."""
    hints = list(get_type_hints(kind).values())
    carries = bytes in hints
    return reader(tuple[tuple(hints[:-1] if carries else hints)]), carries  # type: ignore[misc]


def _json(head: bytes) -> Any:
    try:
        return json.loads(head)
    except (ValueError, RecursionError) as e:
        raise Garbled("the head is no JSON") from e


_FROM_WORKER: dict[str, type] = {kind.__name__: kind for kind in get_args(FromWorker)}
_FROM_LOADER: dict[str, type] = {kind.__name__: kind for kind in get_args(FromLoader)}
