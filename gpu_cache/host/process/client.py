"""The worker's end: a `Host` whose work is done by a loader process.

The engine's thread only appends to a queue; everything else is done by one thread of the client's own
(`conversations`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from adapterd.gpu_cache.host.interface import AtHand, Facts, Failure, HostUsage, Image, Progress, Settle, Slab
from adapterd.gpu_cache.host.loading import Dtypes
from adapterd.gpu_cache.host.process.backoff import Backoff
from adapterd.gpu_cache.host.process.books import Books, Pending
from adapterd.gpu_cache.host.process.conversations import CLOSED, Conversations, Terms, fail
from adapterd.gpu_cache.host.process.hearing import Hearing, settle
from adapterd.gpu_cache.host.process.inbox import Inbox
from adapterd.gpu_cache.host.process.messages import Fetch, Forget, Release, Request, Resolve, Verify
from adapterd.gpu_cache.host.process.reaching import Reach, Waiting
from adapterd.gpu_cache.host.process.silence import Silence
from adapterd.gpu_cache.host.process.spawn import Starter
from adapterd.gpu_cache.host.process.worker_trust import WorkerTrust
from adapterd.loader.base_model import BaseSpec
from adapterd.loader.errors import error_from
from adapterd.loader.identity import Ref, VersionKey
from adapterd.loader.sharding import WHOLE, Sharding
from adapterd.loader.sources.interface import Resolved


class HostClient:
    """Host over a loader process; see `interface.Host`.

    A loader that dies is started again (or waited for, without a `starter`), and what is not answered is asked
    again. One that owes answers and gives no sign of life for 40 seconds is ended first, if it was started here; if
    not, requests fail until it does. What is held stays readable: it is in the old loader's memory, which lives as
    long as somebody refers to it. A loader that keeps dying, or that refuses this worker, makes requests fail;
    trying goes on.
    """

    def __init__(
        self,
        path: Path,
        *,
        base: BaseSpec,
        dtype: Dtypes,
        sharding: Sharding = WHOLE,
        page_bytes: int,
        source: str,
        trust: WorkerTrust,
        starter: Starter | None = None,
        shared: bool = True,
        clock: Callable[[], float] = time.monotonic,
        backoff: Backoff | None = None,
        silence: Silence | None = None,
    ) -> None:
        """Returns once a loader has welcomed this worker.

        Args:
            path: of the socket.
            source: digest of the source's identity.
            starter: starts loaders; without one, somebody else does.
            shared: whether other workers may use a loader that was started here: it is left alone at the end.
            backoff, silence: when to try again, and when a loader is given up; else by the clock, in seconds.

        Raises:
            AdapterdError: LOADER_MISMATCH if the loader goes by something else; what a loader that was started
                here says is wrong; LOADER_UNAVAILABLE.
        """
        backoff = backoff or Backoff(clock)
        self._terms, self._clock = Terms(base, dtype, page_bytes, source, trust, sharding), clock
        self._books, self._waiting = Books(), Waiting(clock)
        self._hearing = Hearing(self._books, backoff.worked)
        self._inbox = Inbox(self._hearing.take, self._waiting.wake, clock)
        self._reach = Reach(path, starter, shared=shared, waiting=self._waiting)
        self._conversations = Conversations(
            self._terms,
            books=self._books,
            hearing=self._hearing,
            inbox=self._inbox,
            reach=self._reach,
            waiting=self._waiting,
            backoff=backoff,
            silence=silence or Silence(clock),
            clock=clock,
        )
        self._thread = threading.Thread(target=self._conversations.run, name="adapterd-host-client", daemon=True)
        self._thread.start()
        self._conversations.opened.wait()
        if self._hearing.slab is None:
            self.close(0)
            raise error_from(self._conversations.down)

    @property
    def loader_process(self) -> int | None:
        """The process id of the loader, if it was started here."""
        return self._reach.process_id

    # The port

    @property
    def slab(self) -> Slab:
        assert self._hearing.slab is not None, "a client exists once it was welcomed"
        return self._hearing.slab

    @property
    def trust_changes(self) -> int:
        return self._hearing.pushes + self._terms.trust.changes

    def resolve(self, asked: Sequence[Ref], tenant: str, settle: Settle[tuple[Resolved, ...]]) -> int:
        return self._ask(Resolve(self._books.next(), tenant, tuple(asked)), settle)

    def verify(self, resolved: Resolved, tenant: str, settle: Settle[Facts]) -> int:
        return self._ask(Verify(self._books.next(), tenant, resolved), settle)

    def fetch(
        self, wanted: Sequence[Resolved], tenant: str, settle: Settle[tuple[Image, ...]], *, priority: int = 0
    ) -> int:
        return self._ask(Fetch(self._books.next(), tenant, tuple(wanted), priority), settle)

    def at_hand(self, wanted: Sequence[Ref] | Sequence[Resolved], tenant: str) -> AtHand | None:
        """Only the loader can hold anything, and it has to be asked."""
        return None

    def deliver(self, most: int | None = None) -> None:
        self._inbox.deliver(most)

    def release(self, request: int) -> None:
        if self._books.released(request, self.slab):
            self._conversations.tell(Release(request))

    def forget(self, key: VersionKey) -> None:
        self._conversations.tell(Forget(key))

    def rebase(self, base: BaseSpec) -> None:
        self._terms.base = base
        self._conversations.tell(base)

    def usage(self) -> HostUsage:
        return self._hearing.usage()

    def loading(self) -> Mapping[VersionKey, Progress]:
        return self._hearing.loading()

    def close(self, timeout: float) -> None:
        deadline = self._clock() + timeout
        self._waiting.end()
        try:
            fail(self._books.strike_all(), CLOSED)
        finally:
            self._thread.join(max(0.0, timeout))
            self._reach.bury(max(0.0, deadline - self._clock()))

    # From the caller's thread

    def _ask(self, message: Request, then: Callable[[Any], None]) -> int:
        pending = Pending(message, then)
        self._books.ask(pending)
        if self._waiting.closing and self._books.answered(message.request, None) is not None:
            # Nobody else finds it any more, and the caller may hold locks that `settle` takes.
            threading.Thread(target=settle, args=(pending, Failure(CLOSED)), daemon=True).start()
        else:
            self._conversations.tell(message)
        return message.request
