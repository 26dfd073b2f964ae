"""Whose turn it is: one order of all waiting requests, fair between tenants and never reshuffled.

Each request gets a number when it is first seen, its tag, as in start-time fair queuing (Goyal, Vin and Cheng,
SIGCOMM 1996): the end of its tenant's request before it, or the present of the queue if that is later. A tenant's
ten thousand requests get tags far into the future; the first of another tenant gets a tag of the present, ahead of
nearly all of them. Tags never change, so only finitely many requests can ever be ahead of one.

A request is passed over in a step when one behind it starts and it does not. Who has been passed over `patience`
times is due.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar


class Request(Protocol):
    """What the scheduler has to know of an engine's request. All of it stays as it is while the request waits.

    Attributes:
        id: unique among those that wait or run.
        tenant: whose it is.
        adapters: version digests of its composition, in the normalised order; empty for the base.
        arrived: tick of its arrival.
        kv_blocks: that it needs to run, for all of its life.
        rows: that it wants in its next step; at least 1 to start.
    """

    @property
    def id(self) -> str: ...
    @property
    def tenant(self) -> str: ...
    @property
    def adapters(self) -> tuple[str, ...]: ...
    @property
    def arrived(self) -> int: ...
    @property
    def kv_blocks(self) -> int: ...
    @property
    def rows(self) -> int: ...


R = TypeVar("R", bound=Request)


@dataclass(slots=True)
class _Turn:
    place: tuple[int, int]  # tag, how-manieth that was seen
    passes: int = 0


class Turns:
    """The order of those that wait. A request's cost is its KV blocks: memory, and about the tokens it takes."""

    def __init__(self, patience: int) -> None:
        """Args: patience: steps in which a request may be passed over before it is due; at least 0."""
        if patience < 0:
            raise ValueError(f"patience must not be negative: {patience}")
        self._patience = patience
        self._turns: dict[str, _Turn] = {}
        self._ends: dict[str, int] = {}  # by tenant: the end of its latest request
        self._now = 0
        self._seen = 0

    def order(self, waiting: Sequence[R]) -> list[R]:
        """`waiting` by turn. Forgets those that are no longer there. O(n log n), O(n) where little has changed."""
        for gone in self._turns.keys() - {request.id for request in waiting}:
            del self._turns[gone]
        self._advance()
        fresh = [request for request in waiting if request.id not in self._turns]
        for request in sorted(fresh, key=lambda r: (r.arrived, r.id)):
            self._enter(request)
        return sorted(waiting, key=lambda r: self._turns[r.id].place)

    def due(self, request: Request) -> bool:
        """Whether it has been passed over as often as it may."""
        return self._turns[request.id].passes >= self._patience

    def passes(self, request_id: str) -> int:
        """In how many steps it was passed over; 0 for one that does not wait."""
        turn = self._turns.get(request_id)
        return 0 if turn is None else turn.passes

    def leave(self, ordered: Sequence[Request], leaving: Collection[str], started: Collection[str]) -> None:
        """Notes what a step did with those in `ordered`: `started` began, `leaving` (them, and refused ones) go."""
        if not leaving:
            return
        passing = False
        for request in reversed(ordered):
            if request.id in leaving:
                passing = passing or request.id in started
                del self._turns[request.id]
            elif passing:
                self._turns[request.id].passes += 1

    def _enter(self, request: Request) -> None:
        tag = max(self._now, self._ends.get(request.tenant, 0))
        self._ends[request.tenant] = tag + max(1, request.kv_blocks)
        self._turns[request.id] = _Turn((tag, self._seen))
        self._seen += 1

    def _advance(self) -> None:
        """The present is the first tag that waits. With nobody waiting, nobody owes anybody anything."""
        if self._turns:
            self._now = max(self._now, min(turn.place[0] for turn in self._turns.values()))
            self._ends = {tenant: end for tenant, end in self._ends.items() if end > self._now}
        else:
            self._ends.clear()
