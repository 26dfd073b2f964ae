"""One request's life, from its submission to its last event."""

from __future__ import annotations

from enum import StrEnum

from adapterd.cli.worker.hold import Hold
from adapterd.cli.worker.kv import KeyValues
from adapterd.cli.worker.requests import Reason, Request, Sink, names_of
from adapterd.cli.worker.sampling import Sampler


class State(StrEnum):
    """Where a request is.

    waiting → loading → ready → ended; paused from any of the first three, and back to waiting.
    """

    WAITING = "waiting"  # has asked for nothing
    LOADING = "loading"  # has a lease that is not ready
    READY = "ready"  # can run
    PAUSED = "paused"  # holds nothing, but remembers its versions
    ENDED = "ended"  # holds nothing, and has had its last event


class Generation:
    """A request while it is open; a `scheduling.Candidate`.

    Attributes:
        arrival: see `Candidate`.
        tokens: the prompt, and what was generated.
        prefix_key: of the lease, once it was ready.
        applied: what its rows got, see `requests.Ended`.
        adapter_bytes, names: see `Candidate`.
    """

    def __init__(self, request: Request, arrival: int, sink: Sink, hold: Hold, kv: KeyValues) -> None:
        self.request, self.arrival, self.sink, self.hold = request, arrival, sink, hold
        self.state = State.WAITING
        self.kv = kv
        self.sample = Sampler(request)
        self.tokens = list(request.prompt)
        self.prefix_key = b""
        self.applied: tuple[tuple[str, float], ...] = ()
        self.adapter_bytes: dict[str, int] = {}
        self.names = names_of(request.wish, request.tenant)

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def tenant(self) -> str:
        return self.request.tenant

    @property
    def adapted(self) -> bool:
        """Whether it asks for an adapter."""
        return bool(self.request.wish)

    @property
    def most_tokens(self) -> int:
        return len(self.request.prompt) + self.request.max_tokens

    @property
    def started(self) -> bool:
        return self.kv.length > 0

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.kv.length

    @property
    def generated(self) -> int:
        """Tokens so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def finished(self) -> Reason | None:
        """Why it is over, if it is."""
        if self.generated and self.tokens[-1] in self.request.stop:
            return Reason.STOP
        return Reason.LENGTH if self.generated == self.request.max_tokens else None

    def rows(self, count: int) -> list[int]:
        """The next `count` token ids to run."""
        return self.tokens[self.kv.length : self.kv.length + count]

    def ready(self) -> None:
        """The lease is ready. Raises its failure."""
        lease = self.hold.lease
        assert lease is not None
        key, composition = lease.prefix_key(), lease.composition
        assert self.prefix_key in {b"", key}, "a pause has changed what a lease is on"
        self.prefix_key = key
        self.applied = tuple((r.key.digest, weight) for r, weight in composition)
        self.adapter_bytes = {r.key.digest: r.layout.n_pages * r.layout.page_bytes for r, _ in composition}
        self.state = State.READY

    def pause(self) -> None:
        """Gives back what it holds in VRAM, keys and values. Idempotent."""
        try:
            self.hold.pause()
        finally:
            self.kv.free()

    def free(self) -> None:
        """Gives back lease, keys and values. Idempotent."""
        try:
            self.hold.release()
        finally:
            self.kv.free()
