"""What a client and the daemon say to each other: one line of JSON a request, one line an answer, in order.

Requests are a closed set. What is not one of them, to the letter, gets a problem as its answer. Requests and
answers are checked by the same types on both sides.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator

from adapterd.gpu_cache.host.interface import Stage
from adapterd.gpu_cache.records import LeaseState, Place
from adapterd.loader.identity import Ref

PROTOCOL: Literal[1] = 1
MAX_LINE_BYTES = 8 << 10
"""Of a request. The longest has a REF of 267 characters."""
MAX_WAIT_SECONDS = 60.0
"""For one answer; whoever wants to wait longer asks again."""


class Strict(BaseModel):
    """Nothing beside its fields, and each of its very type."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def _ref(value: object) -> Ref:
    """Raises Failed (REF_INVALID)."""
    return value if isinstance(value, Ref) else Ref.parse(value if isinstance(value, str) else repr(value))


RefField = Annotated[Ref, PlainValidator(_ref), PlainSerializer(str, return_type=str)]
Wait = Annotated[float, Field(ge=0, le=MAX_WAIT_SECONDS)]
Counted = Annotated[int, Field(ge=0, le=(1 << 63) - 1)]


# --- a client says


class _Request(Strict):
    protocol: Literal[1] = PROTOCOL


class AskStatus(_Request):
    request: Literal["status"] = "status"


class AskPrefetch(_Request):
    """The answer comes when it is there or will not come, or when the time is up."""

    request: Literal["prefetch"] = "prefetch"
    ref: RefField
    to: Literal["vram", "host"] = "vram"
    wait_seconds: Wait = 0.0


class AskPin(_Request):
    """As prefetch."""

    request: Literal["pin"] = "pin"
    ref: RefField
    wait_seconds: Wait = 0.0


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
    wait_seconds: Wait = 30.0


Request = (
    AskStatus | AskPrefetch | AskPin | AskUnpin | AskEvict | AskDrain | AskMetrics | AskResidency | AskWatch
)  # fmt: skip


# --- the daemon says


class _Answer(Strict):
    protocol: Literal[1] = PROTOCOL
    ok: Literal[True] = True


class Named(Strict):
    """Which version. `digest` is bare lower hex."""

    tenant: str
    digest: str

    @property
    def id(self) -> str:
        return f"{self.tenant}@sha256:{self.digest}"


class Located(Named):
    """Where one version is. `bytes` are whole pages of its packed form."""

    adapters: tuple[str, ...]
    tier: Place
    bytes: Counted
    rank: Counted
    generation: Counted | None
    pinned: bool


class Held(Located):
    """And who holds it."""

    leases: Counted
    priority: int


class Load(Named):
    """A cold load that runs: `done` of `total` bytes are verified, or all of them are being packed. `total` is 0 as
    long as it is not known."""

    stage: Stage
    done: Counted
    total: Counted


class Gone(Named):
    """A version whose bytes are in no memory of this worker any more."""


class TenantUse(Strict):
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


class Memory(Strict):
    """Bytes."""

    total: Counted
    free: Counted


class StatusAnswer(_Answer):
    base_id: str
    base_revision: str
    draining: bool
    drained: bool
    vram: Memory
    host: Memory
    tenants: tuple[TenantUse, ...]
    adapters: tuple[Held, ...]
    loading: tuple[Load, ...] = ()
    leases: dict[LeaseState, Counted]
    hits: Counted
    host_hits: Counted
    misses: Counted
    leaked_leases: Counted
    steps_in_flight: Counted
    table_bytes: Counted = 0


class KeptAnswer(_Answer):
    """Whether it is there. If not it is on its way still; the end of a wait stops nothing."""

    ref: RefField
    ready: bool


class UnpinAnswer(_Answer):
    ref: RefField
    was_pinned: bool


class EvictAnswer(_Answer):
    ref: RefField
    freed_bytes: Counted


class DrainAnswer(_Answer):
    """Whether new leases are refused, and whether nothing is left of the old ones."""

    draining: bool
    drained: bool


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
    StatusAnswer | KeptAnswer | UnpinAnswer | EvictAnswer | DrainAnswer | MetricsAnswer | ResidencyAnswer
)  # fmt: skip


A = TypeVar("A", bound=_Answer)
