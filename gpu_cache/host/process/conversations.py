"""The thread of a worker that speaks to its loaders, one after the other: it greets, writes, reads, and tries again.

It connects anew and starts loaders; it decodes what it must and no more, because Python that runs in the engine's
process stalls decode.
"""

from __future__ import annotations

import logging
import select
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from threading import Event

from adapterd.gpu_cache.host.interface import Failure
from adapterd.gpu_cache.host.loading import Dtypes
from adapterd.gpu_cache.host.process.backoff import Backoff
from adapterd.gpu_cache.host.process.books import Books, Pending
from adapterd.gpu_cache.host.process.frames import Frame, Garbled
from adapterd.gpu_cache.host.process.hearing import Hearing, settle
from adapterd.gpu_cache.host.process.inbox import Inbox
from adapterd.gpu_cache.host.process.link import Link, table_of
from adapterd.gpu_cache.host.process.messages import (
    PROTOCOL,
    Fetch,
    FromWorker,
    Hello,
    Ping,
    Rebase,
    Request,
    Resolve,
    Trusting,
    Verify,
)
from adapterd.gpu_cache.host.process.reaching import Closing, Reach, Waiting
from adapterd.gpu_cache.host.process.silence import Silence
from adapterd.gpu_cache.host.process.worker_trust import WorkerTrust
from adapterd.loader.base_model import BaseSpec
from adapterd.loader.errors import AdapterdError, Code, Problem, reject
from adapterd.loader.sharding import WHOLE, Sharding

_LOG = logging.getLogger(__name__)

CLOSED = (reject(Code.CACHE_CLOSED, "cache", "the cache was closed"),)
_ASK_AGAIN = "Ask again; the loader is started anew."


class Silent(Exception):
    """The loader owes answers, and gives no sign of life."""


@dataclass(slots=True)
class Terms:
    """By what a worker goes. `source` is the digest of the source's identity; `base` may become another one."""

    base: BaseSpec
    dtype: Dtypes
    page_bytes: int
    source: str
    trust: WorkerTrust
    sharding: Sharding = WHOLE

    def hello(self, base: BaseSpec) -> Hello:
        trust = self.trust.digest()
        return Hello(PROTOCOL, trust, self.source, self.page_bytes, self.dtype, base.pin, self.sharding)


class Conversations:
    """`tell` is for any thread, the rest for the one that runs `run`.

    Attributes:
        opened: set with the first welcome, or when there will be none.
        down: why there is no loader; empty while there is one, or may soon be.
    """

    def __init__(
        self,
        terms: Terms,
        *,
        books: Books,
        hearing: Hearing,
        inbox: Inbox,
        reach: Reach,
        waiting: Waiting,
        backoff: Backoff,
        silence: Silence,
        clock: Callable[[], float],
    ) -> None:
        self._terms, self._books, self._hearing, self._inbox = terms, books, hearing, inbox
        self._reach, self._waiting = reach, waiting
        self._backoff, self._silence, self._clock = backoff, silence, clock
        self._outgoing = deque[FromWorker | BaseSpec]()
        self._told_trust = -1
        self.opened = Event()
        self.down: tuple[Problem, ...] = ()

    def tell(self, message: FromWorker | BaseSpec) -> None:
        """Queues it. What is queued while there is no loader is dropped; requests are in the books."""
        self._outgoing.append(message)
        self._waiting.wake()

    def run(self) -> None:
        """Until the client is closed, or it turns out that there will never be a loader."""
        try:
            while True:
                self._pause(self._backoff.pause)
                self._connect_and_talk()
        except Closing:
            pass
        finally:
            self._waiting.end()
            self.opened.set()
            fail(self._books.strike_all(), CLOSED)
            self._waiting.close()

    def _connect_and_talk(self) -> None:
        base = self._terms.base
        try:
            link = self._reach.connect(partial(self._hello, base), base)
        except AdapterdError as failure:
            self._failed(failure.problems)
        except OSError as cause:  # no descriptor left, say
            self._failed((_unavailable(f"it cannot be reached: {cause.strerror or cause}", _ASK_AGAIN),))
        else:
            self._talk(link, base)

    def _hello(self, base: BaseSpec) -> Hello:
        self._told_trust = self._terms.trust.changes
        return self._terms.hello(base)

    def _talk(self, link: Link, greeted: BaseSpec) -> None:
        """Until the link is lost; the loader was told of the base `greeted`. Raises Closing."""
        self._backoff.connected()
        self._silence.heard()
        self._outgoing.clear()
        self._inbox.clear()
        self._hearing.begin(link.slab)
        self.down = ()
        self.opened.set()
        try:
            base = self._terms.base
            if base is not greeted:  # reloaded while we connected; what said so was queued, and dropped
                link.send(Rebase(table_of(base)))
            self._converse(link, self._books.requests())
        except Silent as cause:
            self._given_up(str(cause))
        except (EOFError, OSError, Garbled) as cause:
            self._lost(f"the connection to the loader ended: {cause or type(cause).__name__}")
        except AdapterdError as refusal:
            self._failed(refusal.problems)
        finally:
            link.close()

    def _converse(self, link: Link, waiting: Sequence[Request]) -> None:
        for request in waiting:
            link.send(request)
        again = {request.request for request in waiting}  # what came while we connected is queued, too
        for frame in link.early():
            self._inbox.put(frame)
        while True:
            self._inbox.read()
            self._say(link, again)
            link.flush()
            try:
                for frame in self._heard(link):
                    self._inbox.put(frame)
            except (EOFError, OSError, Garbled):
                self._inbox.read(last=True)  # what it said before that holds: answers, or why it refuses us
                raise

    def _say(self, link: Link, again: set[int]) -> None:
        """Takes what is queued. A change of trust goes before whatever was asked after it."""
        while self._outgoing and not link.busy:
            message, trust = self._outgoing.popleft(), self._terms.trust
            if trust.changes != self._told_trust:
                self._told_trust = trust.changes
                link.send(Trusting(trust.digest()))
            if isinstance(message, Resolve | Verify | Fetch) and message.request in again:
                again.remove(message.request)
            else:
                link.send(Rebase(table_of(message)) if isinstance(message, BaseSpec) else message)

    def _heard(self, link: Link) -> Iterable[Frame]:
        """What the loader says next, or nothing: there is something else to do. Raises Closing, Silent."""
        wanted = select.POLLIN | (select.POLLOUT if link.wants_to_send else 0)
        left, here = self._silence.left(self._books.owed), self._inbox.left()
        ready = self._waiting.poll(link.fileno(), wanted, left if here is None else here)
        if ready & ~select.POLLOUT:
            self._silence.heard()
            return link.receive()
        if left == 0 and here is None:  # looked at before the poll: this process may have been stopped itself
            if not self._silence.ask():
                raise Silent("it owes answers and gives no sign of life")
            link.send(Ping())
        return ()

    # When there is no loader

    def _given_up(self, why: str) -> None:
        """One that was started here is started anew; another's is its owner's to look at, and nobody waits for that."""
        if self._reach.end_loader():
            self._lost(why)
            return
        hint = "It was stopped, or hangs: let it go on, or end it and start another."
        self.down = (_unavailable(why, hint),)
        _LOG.error("no loader: %s", self.down[0])
        self._backoff.failed()

    def _lost(self, why: str) -> None:
        _LOG.warning("the loader is lost: %s", why)
        gone = _unavailable(why, _ASK_AGAIN)
        fail(self._books.lost(), (gone,))
        self._failed((gone,))

    def _failed(self, problems: tuple[Problem, ...]) -> None:
        """Another try that came to nothing. Raises Closing if there was never a loader, and will not be."""
        self._backoff.failed()
        if problems[0].code is Code.LOADER_UNAVAILABLE and not self._backoff.given_up:
            return
        self.down = problems
        _LOG.error("no loader: %s", problems[0])
        if self._hearing.slab is None:
            raise Closing

    def _pause(self, seconds: float) -> None:
        """Waits. While it is known that there is no loader, nobody else does. Raises Closing."""
        until = self._clock() + seconds
        while True:
            if self.down:
                fail(self._books.strike_all(), self.down)
            left = until - self._clock()
            self._waiting.poll(None, 0, max(0.0, left))
            if left <= 0:
                return


def fail(pending: Sequence[Pending], problems: tuple[Problem, ...]) -> None:
    """Tells who waited that it was in vain: all of them, also where an interrupt comes between."""
    with ExitStack() as telling:  # the last first
        for one in reversed(pending):
            telling.callback(settle, one, Failure(problems))


def _unavailable(why: str, hint: str) -> Problem:
    return reject(Code.LOADER_UNAVAILABLE, "loader process", why, hint)
