"""Whose turn it is: requests of all tenants side by side, and no tenant in front of another.

    calls       all that a database answers                       threads of the server's pool
    transfers   bytes in and out, as slow as their clients are    threads of their own, a piece at a time
    checks      hashing and checking an upload: minutes, perhaps  a thread each

Each has places of its own (`registry.turns`), so that neither slow clients nor long checks are in anybody's way, and
no request holds a thread of the pool for longer than a database takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from anyio import CapacityLimiter, to_thread
from starlette.types import ASGIApp, Receive, Scope, Send

from adapterd.loader.errors import AdapterdError
from adapterd.registry.api.problems import problem_response, remember
from adapterd.registry.audit.interfaces import OPERATOR
from adapterd.registry.tokens.interfaces import Caller
from adapterd.registry.turns import Places, Turns

T = TypeVar("T")

FINALIZE = ":finalize"

CALLS = Places(at_once=32, each=8, waiting=256)  # of the pool's 40 threads; the others authenticate
TRANSFERS = Places(at_once=1024, each=64, waiting=256)
WAITING_CHECKS = 64
DISKS = Places(at_once=16, each=8, waiting=TRANSFERS.each)  # threads; a transfer wants one at a time


class Lanes:
    """The turns of one server.

    Args:
        checks: uploads that are checked at once. A tenant has one fewer, so that another finds a place.
    """

    def __init__(self, checks: int) -> None:
        self.calls = Turns(CALLS)
        self.transfers = Turns(TRANSFERS)
        self._checks = Turns(Places(checks, max(1, checks - 1), WAITING_CHECKS))
        self._disks = Turns(DISKS)

    def of(self, method: str, path: str) -> Turns | None:
        """The lane of a request; None for one that looks first whether it has to wait."""
        if method == "POST" and path.endswith(FINALIZE):
            return None
        if method == "PATCH" or "/files/" in path or path.endswith("/signature"):
            return self.transfers
        return self.calls

    async def on_disk(self, caller: Caller, work: Callable[[], T]) -> T:
        """A piece of a transfer: `work` in a thread that only moves bytes."""
        async with self._disks.turn(owner_of(caller)):
            return await in_own_thread(work)

    async def as_check(self, caller: Caller, work: Callable[[], T]) -> T:
        """A check: `work` in a thread of its own, in its turn. Raises Unavailable (QUEUE_FULL)."""
        async with self._checks.turn(owner_of(caller)):
            return await in_own_thread(work)


class InTurn:
    """ASGI middleware behind `Authenticate`: a request of a tenant's waits until it is its turn, its body unread."""

    def __init__(self, app: ASGIApp, lanes: Lanes) -> None:
        self._app = app
        self._lanes = lanes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = scope.get("state", {}).get("caller")
        turns = self._lanes.of(scope["method"], scope["path"]) if isinstance(caller, Caller) else None
        if turns is None:
            await self._app(scope, receive, send)
            return
        owner = owner_of(caller)
        try:
            await turns.enter(owner)
        except AdapterdError as caught:
            remember(scope, caught)
            await problem_response(caught, scope["path"])(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            turns.leave(owner)


def owner_of(caller: Caller) -> str:
    """Whose turns a request takes: those of the token's tenant, wherever it reaches."""
    return caller.tenant or OPERATOR


async def in_own_thread(work: Callable[[], T]) -> T:
    """`work` in a thread beside all pools; turns say how many of these there are."""
    return await to_thread.run_sync(work, limiter=CapacityLimiter(1))
