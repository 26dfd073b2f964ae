"""One request's life, from its submission to its last event."""

from __future__ import annotations

from enum import StrEnum

from adapterd.cli.worker.hold import Hold
from adapterd.cli.worker.kv import KeyValues
from adapterd.cli.worker.requests import Reason, Request, Sink, names_of
from adapterd.cli.worker.sampling import Sampler
from adapterd.gpu_cache import Lease


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
        tokens: the prompt, what was generated, and behind it perhaps one that is under way (`promise`).
        generated: how many were.
        landed: tokens whose keys and values are of forwards that are known to have gone well.
        life: how often it has let go of its keys and values: what is under way then is in vain.
        adapted: whether it asks for an adapter.
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
        self.generated = self.landed = self.life = 0
        self.prefix_key = b""
        self.applied: tuple[tuple[str, float], ...] = ()
        self.adapter_bytes: dict[str, int] = {}
        self.adapted = bool(request.wish)
        self.names = names_of(request.wish, request.tenant)

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def tenant(self) -> str:
        return self.request.tenant

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
    def known(self) -> list[int]:
        """The tokens without what is under way."""
        return self.tokens[: len(self.request.prompt) + self.generated]

    def promise(self, sequence: int) -> None:
        """Its next token will be that of a sequence of the step under way. It may run already, if it is not the last:
        it stands in for itself, as `FlatModel.run` says."""
        if len(self.tokens) + 1 < self.most_tokens:
            self.tokens.append(~sequence)

    def take(self, token: int) -> Reason | None:
        """The next token is there. Why it is the last one, if it is."""
        at = len(self.request.prompt) + self.generated
        self.tokens[at : at + 1] = [token]
        self.generated += 1
        if token in self.request.stop:
            return Reason.STOP
        return Reason.LENGTH if self.generated == self.request.max_tokens else None

    def rows(self, count: int) -> list[int]:
        """The next `count` token ids to run."""
        return self.tokens[self.kv.length : self.kv.length + count]

    @property
    def lease(self) -> Lease:
        """While it has asked for one."""
        lease = self.hold.lease
        assert lease is not None
        return lease

    def note_lease(self) -> None:
        """Of a lease that is ready: what it is on. Raises its failure."""
        lease = self.lease
        key, composition = lease.prefix_key(), lease.composition
        assert self.prefix_key in {b"", key}, "a pause has changed what a lease is on"
        self.prefix_key = key
        self.applied = tuple((r.key.digest, weight) for r, weight in composition)
        self.adapter_bytes = {r.key.digest: r.layout.n_pages * r.layout.page_bytes for r, _ in composition}

    def pause(self) -> None:
        """Gives back what it holds in VRAM, keys and values. Idempotent."""
        try:
            self.hold.pause()
        finally:
            self._let_go()

    def free(self) -> None:
        """Gives back lease, keys and values. Idempotent."""
        try:
            self.hold.release()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        self.tokens = self.known
        self.life += 1
        self.landed = 0
        self.kv.free()
