"""The worker's end: a `Host` whose work is done by a loader process.

The engine's thread only appends to a queue. One thread of the client's own writes, reads, connects anew and starts
loaders; it decodes what it must and no more, because Python that runs in the engine's process stalls decode.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from adapterd.gpu_cache.host.interface import Facts, Failure, HostUsage, Image, Settle, Slab
from adapterd.gpu_cache.host.loading import Dtypes
from adapterd.gpu_cache.host.process.backoff import Backoff
from adapterd.gpu_cache.host.process.books import Books, Pending
from adapterd.gpu_cache.host.process.facts import facts_from_bytes, usage_from_bytes
from adapterd.gpu_cache.host.process.frames import Garbled
from adapterd.gpu_cache.host.process.link import Link, table_of
from adapterd.gpu_cache.host.process.messages import (
    PROTOCOL,
    Failed,
    Fetch,
    Fetched,
    Forget,
    FromLoader,
    FromWorker,
    Hello,
    Known,
    Packed,
    Rebase,
    Refusal,
    Release,
    Request,
    Resolve,
    ResolvedAll,
    TrustChanged,
    Trusting,
    Usage,
    Verified,
    Verify,
    WantTable,
    Welcome,
    pages_of,
)
from adapterd.gpu_cache.host.process.reaching import Closing, Reach, Waiting
from adapterd.gpu_cache.host.process.slab import SharedSlab
from adapterd.gpu_cache.host.process.spawn import Starter
from adapterd.gpu_cache.host.process.worker_trust import WorkerTrust
from adapterd.loader.base_model import BaseSpec
from adapterd.loader.errors import AdapterdError, Code, Problem, error_from, reject
from adapterd.loader.identity import Ref, VersionKey
from adapterd.loader.sources.interface import Resolved

_LOG = logging.getLogger(__name__)


class HostClient:
    """Host over a loader process; see `interface.Host`.

    A loader that dies is started again (or waited for, without a `starter`), and what is not answered is asked
    again. What is held stays readable: it is in the old loader's memory, which lives as long as somebody refers
    to it. A loader that keeps dying, or that refuses this worker, makes requests fail; trying goes on.
    """

    def __init__(
        self,
        path: Path,
        *,
        base: BaseSpec,
        dtype: Dtypes,
        page_bytes: int,
        source: str,
        trust: WorkerTrust,
        starter: Starter | None = None,
        shared: bool = True,
        clock: Callable[[], float] = time.monotonic,
        backoff: Backoff | None = None,
    ) -> None:
        """Returns once a loader has welcomed this worker.

        Args:
            path: of the socket.
            source: digest of the source's identity.
            starter: starts loaders; without one, somebody else does.
            shared: whether other workers may use a loader that was started here: it is left alone at the end.

        Raises:
            AdapterdError: LOADER_MISMATCH if the loader goes by something else; what a loader that was started
                here says is wrong; LOADER_UNAVAILABLE.
        """
        self._base, self._dtype, self._page_bytes, self._source = base, dtype, page_bytes, source
        self._trust, self._clock = trust, clock
        self._backoff = backoff or Backoff(clock)
        self._books, self._outgoing = Books(), deque[FromWorker | BaseSpec]()
        self._waiting = Waiting(clock)
        self._reach = Reach(path, starter, shared=shared, waiting=self._waiting)
        self._down: tuple[Problem, ...] = ()
        self._slab: SharedSlab | None = None
        self._told_trust, self._pushes = -1, 0
        self._facts: dict[int, Facts | bytes] = {}
        self._usage: bytes | HostUsage = HostUsage({}, 0, {})
        self._opened = threading.Event()
        self._thread = threading.Thread(target=self._run, name="adapterd-host-client", daemon=True)
        self._thread.start()
        self._opened.wait()
        if self._slab is None:
            self.close(0)
            raise error_from(self._down)

    @property
    def loader_process(self) -> int | None:
        """The process id of the loader, if it was started here."""
        return self._reach.process_id

    # The port

    @property
    def slab(self) -> Slab:
        assert self._slab is not None, "a client exists once it was welcomed"
        return self._slab

    @property
    def trust_changes(self) -> int:
        return self._pushes + self._trust.changes

    def resolve(self, asked: Sequence[Ref], tenant: str, settle: Settle[tuple[Resolved, ...]]) -> int:
        return self._ask(Resolve(self._books.next(), tenant, tuple(asked)), settle)

    def verify(self, resolved: Resolved, tenant: str, settle: Settle[Facts]) -> int:
        return self._ask(Verify(self._books.next(), tenant, resolved), settle)

    def fetch(
        self, wanted: Sequence[Resolved], tenant: str, settle: Settle[tuple[Image, ...]], *, priority: int = 0
    ) -> int:
        return self._ask(Fetch(self._books.next(), tenant, tuple(wanted), priority), settle)

    def deliver(self) -> None:
        """All answers come in the thread that reads them."""

    def release(self, request: int) -> None:
        if self._books.released(request, self.slab):
            self._tell(Release(request))

    def forget(self, key: VersionKey) -> None:
        self._tell(Forget(key))

    def rebase(self, base: BaseSpec) -> None:
        self._base = base
        self._tell(base)

    def usage(self) -> HostUsage:
        usage = self._usage
        if isinstance(usage, bytes):
            try:
                usage = usage_from_bytes(usage)
            except Garbled as e:
                _LOG.error("the loader's usage cannot be read: %s", e)
                usage = HostUsage({}, 0, {})
            self._usage = usage
        return usage

    def close(self, timeout: float) -> None:
        deadline = self._clock() + timeout
        self._waiting.end()
        self._fail(self._books.strike_all(), _CLOSED)
        self._thread.join(max(0.0, timeout))
        self._reach.bury(max(0.0, deadline - self._clock()))

    # From the caller's thread

    def _ask(self, message: Request, settle: Callable[[Any], None]) -> int:
        pending = Pending(message, settle)
        self._books.ask(pending)
        if self._waiting.closing and self._books.answered(message.request, None) is not None:
            # Nobody else finds it any more, and the caller may hold locks that `settle` takes.
            threading.Thread(target=_settle, args=(pending, Failure(_CLOSED)), daemon=True).start()
        else:
            self._tell(message)
        return message.request

    def _tell(self, message: FromWorker | BaseSpec) -> None:
        self._outgoing.append(message)
        self._waiting.wake()

    # The client's own thread

    def _run(self) -> None:
        try:
            while True:
                self._pause(self._backoff.pause)
                base = self._base
                try:
                    link = self._reach.connect(partial(self._hello, base), base)
                except AdapterdError as failure:
                    self._failed(failure.problems)
                    continue
                except OSError as cause:  # no descriptor left, say
                    why = f"it cannot be reached: {cause.strerror or cause}"
                    self._failed((reject(Code.LOADER_UNAVAILABLE, "loader process", why, _ASK_AGAIN),))
                    continue
                self._talk(link, base)
        except Closing:
            pass
        finally:
            self._waiting.end()
            self._opened.set()
            self._fail(self._books.strike_all(), _CLOSED)
            self._waiting.close()

    def _hello(self, base: BaseSpec) -> Hello:
        self._told_trust = self._trust.changes
        return Hello(PROTOCOL, self._trust.digest(), self._source, self._page_bytes, self._dtype, base.pin)

    def _talk(self, link: Link, greeted: BaseSpec) -> None:
        """Until the link is lost; the loader was told of the base `greeted`. Raises Closing."""
        self._backoff.connected()
        self._facts.clear()
        self._outgoing.clear()
        self._pushes += self._slab is not None  # what an earlier loader verified, this one has not
        self._slab, self._down = link.slab, ()
        self._usage = HostUsage({}, len(link.slab.memory), {})
        self._opened.set()
        try:
            if self._base is not greeted:  # reloaded while we connected; what said so was queued, and dropped
                link.send(Rebase(table_of(self._base)))
            self._converse(link, self._books.requests())
        except (EOFError, OSError, Garbled) as cause:
            self._lost(str(cause) or type(cause).__name__)
        except AdapterdError as refusal:
            self._failed(refusal.problems)
        finally:
            link.close()

    def _converse(self, link: Link, waiting: Sequence[Request]) -> None:
        for request in waiting:
            link.send(request)
        again = {request.request for request in waiting}  # what came while we connected is queued, too
        for message in link.early():
            self._hear(link.slab, message)
        while True:
            self._say(link, again)
            link.flush()
            for message in self._heard(link):
                self._hear(link.slab, message)

    def _say(self, link: Link, again: set[int]) -> None:
        """Takes what is queued. A change of trust goes before whatever was asked after it."""
        while self._outgoing and not link.busy:
            message = self._outgoing.popleft()
            if self._trust.changes != self._told_trust:
                self._told_trust = self._trust.changes
                link.send(Trusting(self._trust.digest()))
            if isinstance(message, Resolve | Verify | Fetch) and message.request in again:
                again.remove(message.request)
            else:
                link.send(Rebase(table_of(message)) if isinstance(message, BaseSpec) else message)

    def _heard(self, link: Link) -> Iterable[FromLoader]:
        """What the loader says next, or nothing: there is something to say. Raises Closing."""
        wanted = select.POLLIN | (select.POLLOUT if link.wants_to_send else 0)
        ready = self._waiting.poll(link.fileno(), wanted, None)
        return link.receive() if ready & ~select.POLLOUT else ()

    def _hear(self, slab: SharedSlab, message: FromLoader) -> None:
        match message:
            case Known(number, drop, body):
                for dropped in drop:
                    self._facts.pop(dropped, None)
                self._facts[number] = body
            case ResolvedAll(number, resolved):
                self._answer(number, resolved, None)
            case Verified(number, facts, publisher):
                self._answer(number, replace(self._facts_of(facts), publisher=publisher or None), slab)
            case Fetched(number, images):
                self._answer(number, tuple(self._image(slab, packed) for packed in images), slab)
            case Failed(number, problems):
                self._answer(number, _failure(problems), None)
            case TrustChanged():
                self._pushes += 1
            case Usage(body):
                self._usage = body
            case Refusal(problems):
                raise error_from(_failure(problems).problems)
            case Welcome() | WantTable():
                raise Garbled(f"{type(message).__name__} in the middle of a conversation")

    def _facts_of(self, number: int) -> Facts:
        """Decoded when they are first needed, once a version and loader."""
        found = self._facts.get(number)
        if found is None:
            raise Garbled(f"facts {number} were never told")
        if isinstance(found, bytes):
            found = self._facts[number] = facts_from_bytes(found)
        return found

    def _image(self, slab: SharedSlab, packed: Packed) -> Image:
        facts = self._facts_of(packed.facts)
        layout, most = facts.layout, len(slab.memory) // slab.page_bytes
        if any(first < 0 or pages < 1 or first + pages > most for first, pages in packed.runs):
            raise Garbled("an image lies outside of the slab")
        pages = pages_of(packed.runs)
        if len(pages) != layout.n_pages or layout.page_bytes != slab.page_bytes:
            raise Garbled("an image is not as large as its layout")
        return Image(packed.key, slab, facts.manifest, layout, pages, packed.origin, dict(packed.seconds))

    def _answer(self, number: int, outcome: object, holds: SharedSlab | None) -> None:
        pending = self._books.answered(number, holds)
        self._backoff.worked()
        if pending is not None:
            _settle(pending, outcome)

    # When there is no loader

    def _lost(self, why: str) -> None:
        _LOG.warning("the connection to the loader ended: %s", why)
        gone = reject(Code.LOADER_UNAVAILABLE, "loader process", f"the connection ended: {why}", _ASK_AGAIN)
        self._fail(self._books.lost(), (gone,))
        self._failed((gone,))

    def _failed(self, problems: tuple[Problem, ...]) -> None:
        """Another try that came to nothing. Raises Closing if there was never a loader, and will not be."""
        self._backoff.failed()
        if problems[0].code is Code.LOADER_UNAVAILABLE and not self._backoff.given_up:
            return
        self._down = problems
        _LOG.error("no loader: %s", problems[0])
        if self._slab is None:
            raise Closing

    def _pause(self, seconds: float) -> None:
        """Waits. While it is known that there is no loader, nobody else does. Raises Closing."""
        until = self._clock() + seconds
        while True:
            if self._down:
                self._fail(self._books.strike_all(), self._down)
            left = until - self._clock()
            self._waiting.poll(None, 0, max(0.0, left))
            if left <= 0:
                return

    def _fail(self, pending: Sequence[Pending], problems: tuple[Problem, ...]) -> None:
        for one in pending:
            _settle(one, Failure(problems))


_CLOSED = (reject(Code.CACHE_CLOSED, "cache", "the cache was closed"),)
_ASK_AGAIN = "Ask again; the loader is started anew."


def _failure(problems: tuple[Problem, ...]) -> Failure:
    if not problems or problems[0].severity != "reject":
        raise Garbled("a failure without a reason")
    return Failure(problems)


def _settle(pending: Pending, outcome: object) -> None:
    try:
        pending.settle(outcome)
    except BaseException:  # noqa: BLE001 - a caller's bug; the others are told all the same
        _LOG.exception("an answer of the host was not taken")
