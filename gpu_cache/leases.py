"""What a user of the cache holds: a lease, and for the length of a step a ticket."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Generator
from types import TracebackType
from typing import Protocol, Self

from adapterd.gpu_cache.composition import prefix_key
from adapterd.gpu_cache.host.interface import Progress
from adapterd.gpu_cache.records import LeaseRecord, LeaseState
from adapterd.gpu_cache.slots import Resident
from adapterd.loader.errors import Code, Problem, error, error_from

AWAIT_SECONDS = 0.001
"""How often a coroutine that awaits a lease looks at it. The event loop runs on meanwhile."""


class LeaseBooks(Protocol):
    """What a lease asks of its cache."""

    def pump(self) -> None: ...

    def wait_for(self, record: LeaseRecord, timeout: float | None) -> None: ...

    def release(self, record: LeaseRecord) -> None: ...

    def pause(self, record: LeaseRecord) -> None: ...

    def resume(self, record: LeaseRecord) -> None: ...

    def progress(self, record: LeaseRecord) -> Progress | None: ...


class Lease:
    """A hold on a composition, released exactly once. Made by `AdapterCache.acquire`.

    A lease that is dropped unreleased is found by the cache, released and counted as a leak (I12). Its
    finalizer may run inside any lock, so it only appends to a queue that the cache drains.
    """

    def __init__(self, books: LeaseBooks, record: LeaseRecord, dropped: deque[LeaseRecord]) -> None:
        self._books, self._record, self._dropped = books, record, dropped
        self._over = False

    def __del__(self) -> None:
        if not self._over:
            self._dropped.append(self._record)

    @property
    def tenant(self) -> str:
        return self._record.tenant

    def belongs_to(self, books: LeaseBooks) -> bool:
        """Whether it is a lease of this cache: another's slots and pages are other adapters'."""
        return self._books is books

    @property
    def record(self) -> LeaseRecord:
        """The cache's own record of it; for the cache."""
        return self._record

    @property
    def ready(self) -> bool:
        """Whether all of it is in VRAM, its copies completed, as of the last `pump`, acquire, step or wait."""
        return self._record.state is LeaseState.READY

    @property
    def progress(self) -> Progress | None:
        """How far the load is that it waits for, as of the host's last word; None if none of its bytes are on their way
        into host memory. Of several versions, all that are: the earliest stage, and the sums of bytes."""
        return self._books.progress(self._record)

    @property
    def failed(self) -> bool:
        return self._record.state is LeaseState.FAILED

    @property
    def released(self) -> bool:
        return self._record.state is LeaseState.RELEASED

    @property
    def problem(self) -> Problem | None:
        """Why it failed, or None."""
        return self._record.problems[0] if self._record.problems else None

    @property
    def problems(self) -> tuple[Problem, ...]:
        """All reasons."""
        return self._record.problems

    @property
    def composition(self) -> tuple[tuple[Resident, float], ...]:
        """(resident, weight) in the normalised order; empty for the base.

        Raises:
            AdapterdError: the lease's failure, LEASE_NOT_READY or LEASE_RELEASED.
        """
        check_ready(self._record)
        return self._record.residents

    def prefix_key(self) -> bytes:
        """The bytes that name this lease's outputs in a prefix or KV cache (I11); see `composition.prefix_key`.

        Available once the REFs are resolved, before the lease is ready and while it is paused.

        Raises:
            AdapterdError: the lease's failure, or LEASE_NOT_READY while it is being resolved.
        """
        record = self._record
        if record.components is None or record.state is LeaseState.FAILED:
            raise _unusable(record)
        return prefix_key(record.tenant, record.base, record.components)

    def wait(self, timeout: float | None = None) -> Self:
        """Blocks until it is ready. For threads that may block; a serving loop looks at `ready` instead.

        Args:
            timeout: seconds, or None for as long as it takes.

        Raises:
            AdapterdError: the lease's failure, LEASE_TIMEOUT (the lease stays alive), LEASE_RELEASED, or
                LEASE_NOT_READY if it is paused.
        """
        self._books.wait_for(self._record, timeout)
        self._check()
        return self

    def __await__(self) -> Generator[object, None, Self]:
        """Like `wait` without a timeout, for coroutines; `asyncio.timeout` around it gives one."""
        return self._until_ready().__await__()

    async def _until_ready(self) -> Self:
        self._books.pump()
        while not self._record.settled:
            await asyncio.sleep(AWAIT_SECONDS)
            self._books.pump()
        self._check()
        return self

    def _check(self) -> None:
        """Raises what keeps `wait` from saying that all is well."""
        check_ready(self._record)

    @property
    def paused(self) -> bool:
        return self._record.state is LeaseState.PAUSED

    def pause(self) -> None:
        """Gives the hold back for a while, as for a request that is swapped out. Idempotent.

        What it held may be evicted; a step in flight finishes. What it waited for is cancelled. The versions that
        its REFs mean are remembered, and so is its age.
        """
        self._books.pause(self._record)

    def resume(self) -> None:
        """Takes the very same versions again, whatever an alias means by now. Returns at once. Idempotent.

        The lease becomes ready again, or fails with a reason: the version was revoked, the base reloaded, too many
        wait. One that was paused before its REFs were resolved resolves them now.

        Raises:
            Failed: LEASE_RELEASED.
        """
        self._books.resume(self._record)
        if self.released:
            raise _unusable(self._record)

    def release(self) -> None:
        """Gives the hold back. Idempotent; cancels what only this lease was waiting for."""
        self._over = True
        self._books.release(self._record)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: type[BaseException] | None, _e: BaseException | None, _tb: TracebackType | None) -> None:
        self.release()

    def __repr__(self) -> str:
        wish = " + ".join(f"{a.weight:g}·{a.ref}" for a in self._record.asked) or "base"
        return f"<Lease {wish} for {self.tenant}: {self._record.state}>"


def check_ready(record: LeaseRecord) -> None:
    """Raises what keeps the lease from being used in a step, if anything does."""
    if record.state is not LeaseState.READY:
        raise _unusable(record)


def _unusable(record: LeaseRecord) -> Exception:
    where = " + ".join(str(asked.ref) for asked in record.asked) or "base"
    if record.state is LeaseState.FAILED:
        return error_from(record.problems)
    if record.state is LeaseState.RELEASED:
        return error(Code.LEASE_RELEASED, where, "the lease was released", "Acquire it again.")
    paused = record.state is LeaseState.PAUSED
    hint = "Resume it first." if paused else "Look at lease.ready, or wait for the lease."
    return error(Code.LEASE_NOT_READY, where, f"the lease is {record.state}", hint)
