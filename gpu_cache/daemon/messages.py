"""What a client and the daemon say to each other: one line of JSON a request, one line an answer, in order.

Requests are a closed set. What is not one of them, to the letter, gets a problem as its answer. Requests and
answers are checked by the same types on both sides.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator, TypeAdapter, ValidationError

from adapterd.gpu_cache.records import LeaseState, Place
from adapterd.loader.errors import Code, Failed, Problem, error, error_from, reject
from adapterd.loader.identity import Ref

PROTOCOL: Literal[1] = 1
MAX_LINE_BYTES = 8 << 10
"""Of a request. The longest has a REF of 267 characters."""
MAX_WAIT_SECONDS = 60.0
"""Of a `watch`; longer ones are asked for again."""


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def _ref(value: object) -> Ref:
    """Raises Failed (REF_INVALID)."""
    return value if isinstance(value, Ref) else Ref.parse(value if isinstance(value, str) else repr(value))


RefField = Annotated[Ref, PlainValidator(_ref), PlainSerializer(str, return_type=str)]
Counted = Annotated[int, Field(ge=0, le=(1 << 63) - 1)]


# --- a client says


class _Request(_Strict):
    protocol: Literal[1] = PROTOCOL


class AskStatus(_Request):
    request: Literal["status"] = "status"


class AskPrefetch(_Request):
    request: Literal["prefetch"] = "prefetch"
    ref: RefField
    to: Literal["vram", "host"] = "vram"


class AskPin(_Request):
    request: Literal["pin"] = "pin"
    ref: RefField


class AskUnpin(_Request):
    request: Literal["unpin"] = "unpin"
    ref: RefField


class AskEvict(_Request):
    request: Literal["evict"] = "evict"
    ref: RefField


class AskDrain(_Request):
    request: Literal["drain"] = "drain"
    on: bool


class AskMetrics(_Request):
    request: Literal["metrics"] = "metrics"


class AskResidency(_Request):
    """With a cursor (`feed` and `since` of the last answer): what has changed after it."""

    request: Literal["residency"] = "residency"
    feed: str | None = Field(default=None, max_length=64)
    since: Counted | None = None


class AskWatch(_Request):
    """As residency, but the answer comes when something has changed after the cursor, or when the time is up."""

    request: Literal["watch"] = "watch"
    feed: str | None = Field(default=None, max_length=64)
    since: Counted | None = None
    wait_seconds: float = Field(default=30.0, ge=0, le=MAX_WAIT_SECONDS)


Request = (
    AskStatus | AskPrefetch | AskPin | AskUnpin | AskEvict | AskDrain | AskMetrics | AskResidency | AskWatch
)  # fmt: skip

_REQUESTS: TypeAdapter[Request] = TypeAdapter(Annotated[Request, Field(discriminator="request")])


# --- the daemon says


class _Answer(_Strict):
    protocol: Literal[1] = PROTOCOL
    ok: Literal[True] = True


class Located(_Strict):
    """Where one version is. `digest` is bare lower hex, `bytes` are whole pages of its packed form."""

    tenant: str
    digest: str
    adapters: tuple[str, ...]
    tier: Place
    bytes: Counted
    rank: Counted
    generation: Counted | None
    pinned: bool

    def __str__(self) -> str:
        return f"{self.tenant}@sha256:{self.digest}"


class Held(Located):
    """And who holds it."""

    leases: Counted
    priority: int


class Gone(_Strict):
    """A version whose bytes are in no memory of this worker any more."""

    tenant: str
    digest: str


class TenantUse(_Strict):
    """One tenant's bytes in VRAM by state, and in host memory.

    Attributes:
        in_use: with a live lease.
        pinned: without one, but pinned.
        idle: neither; may go for others.
        staging: room whose bytes are on their way.
        guaranteed, maximum: of VRAM.
    """

    tenant: str
    in_use: Counted
    pinned: Counted
    idle: Counted
    staging: Counted
    guaranteed: Counted
    maximum: Counted
    host: Counted


class Memory(_Strict):
    """Bytes."""

    total: Counted
    free: Counted


class StatusAnswer(_Answer):
    base_id: str
    base_revision: str
    draining: bool
    vram: Memory
    host: Memory
    tenants: tuple[TenantUse, ...]
    adapters: tuple[Held, ...]
    leases: dict[LeaseState, Counted]
    hits: Counted
    host_hits: Counted
    misses: Counted
    leaked_leases: Counted
    steps_in_flight: Counted


class BegunAnswer(_Answer):
    """The work has begun; `residency` says how far it is."""

    ref: RefField


class UnpinAnswer(_Answer):
    ref: RefField
    was_pinned: bool


class EvictAnswer(_Answer):
    ref: RefField
    freed_bytes: Counted


class DrainAnswer(_Answer):
    draining: bool


class MetricsAnswer(_Answer):
    """The text format of Prometheus."""

    text: str


class ResidencyAnswer(_Answer):
    """All of it, or what has changed.

    Attributes:
        feed, sequence: the cursor for the next request. `feed` names this run of the daemon.
        complete: `adapters` is everything there is, and what is not in it is gone: throw away what you knew.
        adapters: with `complete` every version in VRAM or host memory, else those that have changed.
        gone: those that have left since the cursor, the reader never having seen some of them; empty with `complete`.
    """

    feed: str
    sequence: Counted
    complete: bool
    adapters: tuple[Located, ...]
    gone: tuple[Gone, ...]


Answer = (
    StatusAnswer | BegunAnswer | UnpinAnswer | EvictAnswer | DrainAnswer | MetricsAnswer | ResidencyAnswer
)  # fmt: skip


class _ProblemFields(_Strict):
    code: str
    severity: Literal["reject", "warn"]
    where: str
    message: str
    hint: str

    def as_problem(self) -> Problem:
        """Raises ValueError on a code that is not known here."""
        return Problem(Code(self.code), self.severity, self.where, self.message, self.hint)


class _Refusal(_Strict):
    protocol: Literal[1] = PROTOCOL
    ok: Literal[False] = False
    problems: tuple[_ProblemFields, ...] = Field(min_length=1)


class _Reply(BaseModel):
    """Only what tells the two kinds of answer apart."""

    protocol: Literal[1]
    ok: bool


A = TypeVar("A", bound=_Answer)

# --- lines


def request_line(request: Request) -> bytes:
    return request.model_dump_json().encode() + b"\n"


def parse_request(line: bytes) -> Request:
    """Raises Failed (REQUEST_INVALID, REF_INVALID), every mistake a problem. No value is repeated."""
    try:
        return _REQUESTS.validate_json(line)
    except ValidationError as e:
        problems = [
            reject(Code.REQUEST_INVALID, ".".join(map(str, mistake["loc"])) or "request", mistake["msg"])
            for mistake in e.errors(include_input=False, include_context=False, include_url=False)
        ]
        raise Failed(*problems) from None


def answer_line(answer: Answer) -> bytes:
    return answer.model_dump_json().encode() + b"\n"


def refusal_line(problems: tuple[Problem, ...]) -> bytes:
    told = tuple(_ProblemFields(**problem.as_json()) for problem in problems)  # type: ignore[arg-type]
    return _Refusal(problems=told).model_dump_json().encode() + b"\n"


def parse_answer(line: bytes, kind: type[A]) -> A:
    """What the daemon said, if it is a `kind`.

    Raises:
        AdapterdError: what the daemon refused.
        Unavailable: SERVER_ERROR if these are not words of this protocol.
    """
    try:
        if _Reply.model_validate_json(line).ok:
            return kind.model_validate_json(line)
        problems = [told.as_problem() for told in _Refusal.model_validate_json(line).problems]
    except ValueError:
        raise error(
            Code.SERVER_ERROR, "daemon", "its answer is not understood", "Use an adapterctl of the worker's version."
        ) from None
    raise error_from(problems)
