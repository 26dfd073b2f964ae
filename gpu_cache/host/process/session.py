"""One worker, as its loader sees it: what it may say when, what it asked for, and what it has been told."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

from adapterd.gpu_cache.host.host_cache import HostCache
from adapterd.gpu_cache.host.interface import Facts, Failure, Image
from adapterd.gpu_cache.host.loading import Serving
from adapterd.gpu_cache.host.process.facts import facts_to_bytes
from adapterd.gpu_cache.host.process.frames import Frame, Garbled
from adapterd.gpu_cache.host.process.house import House
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
    Ping,
    Pong,
    Rebase,
    Refusal,
    Release,
    Resolve,
    ResolvedAll,
    Table,
    Trusting,
    Verified,
    Verify,
    WantTable,
    Welcome,
    encode,
    from_worker,
)
from adapterd.gpu_cache.host.process.page_runs import RUN_BYTES, runs_of
from adapterd.loader.base_model import BaseSpec
from adapterd.loader.errors import Code, Problem, reject
from adapterd.loader.identity import VersionKey
from adapterd.loader.layout import Layout
from adapterd.loader.sources.interface import Resolved

MAX_REQUESTS = 16_384
"""Of one worker at once, answered ones that it has not released included."""
MAX_KNOWN = 4096
"""Versions whose manifest a worker remembers; some 100 KB each there."""


class Refused(Exception):
    """The worker is told why and hung up on."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__("; ".join(str(p) for p in problems))
        self.problems = problems


@dataclass(eq=False, slots=True)
class _Asked:
    """A request that is not released.

    Attributes:
        host: its number there; 0 until the host has said it.
        over: it was answered and holds nothing.
    """

    host: int = 0
    over: bool = False


class Session:
    """`receive` and `close` run on the serving thread; answers come from the host's threads.

    Args:
        house: of the loader.
        send: takes whole frames, from any thread, in order; never blocks. True: the slab's descriptor goes with it.
    """

    def __init__(self, house: House, send: Callable[[bytes, bool], None]) -> None:
        self._house, self._send = house, send
        self._hello: Hello | None = None
        self._host: HostCache | None = None
        self._serving: Serving | None = None
        self._lock = threading.Lock()  # a leaf: held while an answer is written, for what has been told to be true
        self._asked: dict[int, _Asked] = {}
        self._known: OrderedDict[tuple[VersionKey, Layout], int] = OrderedDict()
        self._numbers = count(1)

    @property
    def welcomed(self) -> bool:
        return self._host is not None

    def receive(self, frame: Frame) -> None:
        """Raises Garbled, or Refused: the worker has to go. It has been told why, if it can be."""
        try:
            self._take(from_worker(frame))
        except Refused as refused:
            self.tell(Refusal(refused.problems))
            raise

    def tell(self, message: FromLoader, *, slab: bool = False) -> None:
        self._send(encode(message), slab)

    def close(self) -> None:
        """Gives back all that the worker asked for. Idempotent."""
        with self._lock:
            asked, self._asked = list(self._asked.values()), {}
        for one in asked:
            if self._host is not None:
                self._host.release(one.host)
        serving, self._serving = self._serving, None
        if serving is not None:
            self._house.bases.leave(serving.base.pin)

    # --- what a worker may say

    def _take(self, message: FromWorker) -> None:
        if self._host is None or self._serving is None:
            self._begin(message)
            return
        host, serving = self._host, self._serving
        match message:
            case Resolve(number, tenant, asked):
                self._ask(number, self._resolved, partial(host.resolve, asked, tenant, serving=serving))
            case Verify(number, tenant, resolved):
                write = partial(self._verified, resolved.key)
                self._ask(number, write, partial(host.verify, resolved, tenant, serving=serving))
            case Fetch(number, tenant, wanted, priority):
                ask = partial(host.fetch, wanted, tenant, priority=priority, serving=serving)
                self._ask(number, self._fetched, ask)
            case Release(number):
                with self._lock:
                    one = self._asked.pop(number, None)
                if one is not None:
                    host.release(one.host)
            case Forget(key):
                host.forget(key)
            case Rebase(table):
                self._rebase(host, serving, self._house.bases.add(table))
            case Trusting(digest):
                self._house.watch.read()
                self._check_trust(digest)
            case Ping():
                self.tell(Pong())
            case Hello() | Table():
                raise Garbled(f"{type(message).__name__} in the middle of a conversation")

    def _rebase(self, host: HostCache, serving: Serving, base: BaseSpec) -> None:
        """What was packed for the old base goes with the last worker that serves it: the others still find it."""
        if self._house.bases.leave(serving.base.pin):
            host.forget_base(serving.base.pin)
        self._serving = replace(serving, base=base)
        self._house.bases.enter(base.pin)

    def _begin(self, message: FromWorker) -> None:
        bases, house = self._house.bases, self._house
        if isinstance(message, Hello) and self._hello is None:
            self._check(message)
            self._hello, base = message, bases.get(message.base)
        elif isinstance(message, Table) and self._hello is not None:
            base = bases.add(message.body)
            if base.pin != self._hello.base:
                raise Garbled("the table is of another base than the one that was named")
        else:
            raise Garbled(f"a conversation does not begin with {type(message).__name__}")
        if base is None:
            self.tell(WantTable(self._hello.base))
            return
        hello = self._hello
        self._host, self._serving = house.host_for(base), Serving(base, hello.dtype, hello.sharding)
        bases.enter(base.pin)
        self.tell(Welcome(house.slab_bytes, house.page_bytes, house.trust), slab=True)

    def _check(self, hello: Hello) -> None:
        house = self._house
        if hello.protocol != PROTOCOL:
            raise _mismatch("protocol", f"the worker speaks protocol {hello.protocol}, the loader {PROTOCOL}",
                "Run one version of adapterd.")  # fmt: skip
        if hello.source != house.source:
            raise _mismatch("source", "worker and loader have different sources",
                "Configure both with one registry or folder, or give this worker a loader of its own.")  # fmt: skip
        if hello.page_bytes != house.page_bytes:
            raise _mismatch("page_bytes", f"{hello.page_bytes} in the worker, {house.page_bytes} in the loader",
                "Configure both alike.")  # fmt: skip
        if hello.trust != house.trust:
            house.watch.read()
        self._check_trust(hello.trust)

    def _check_trust(self, digest: str) -> None:
        if digest != self._house.trust:
            raise _mismatch(
                "trust", "worker and loader trust different keys",
                "Give both one trust file; a worker whose file has changed reads it with TrustStore.reload.",
            )  # fmt: skip

    # --- requests

    def _ask(self, number: int, write: Callable[[int, Any], None], ask: Callable[..., int]) -> None:
        one = _Asked()
        with self._lock:
            if number in self._asked:
                raise Garbled(f"request {number} is asked twice")
            if len(self._asked) >= MAX_REQUESTS:
                self.tell(Failed(number, (_too_many(),)))
                return
            self._asked[number] = one
        given = ask(settle=partial(self._settle, number, one, write))
        with self._lock:
            one.host = given
        self._let_go(one)

    def _settle(self, number: int, one: _Asked, write: Callable[[int, Any], None], outcome: Any) -> None:
        """On a thread of the host's."""
        with self._lock:
            if self._asked.get(number) is not one:
                return  # released
            if isinstance(outcome, Failure):
                self._end(number, Failed(number, outcome.problems))
            else:
                try:
                    write(number, outcome)
                except Garbled as e:
                    self._end(number, Failed(number, (reject(Code.QUOTA_EXCEEDED, "answer", str(e)),)))
        self._let_go(one)

    def _end(self, number: int, answer: Failed | ResolvedAll) -> None:
        """Of a request that holds nothing, so the worker need not release it."""
        self._asked.pop(number).over = True
        self.tell(answer)

    def _let_go(self, one: _Asked) -> None:
        if one.over and one.host and self._host is not None:
            self._host.release(one.host)

    def _resolved(self, number: int, found: Sequence[Resolved]) -> None:
        self._end(number, ResolvedAll(number, tuple(found)))

    def _verified(self, key: VersionKey, number: int, facts: Facts) -> None:
        self.tell(Verified(number, self._facts(key, facts), facts.publisher or ""))

    def _fetched(self, number: int, images: Sequence[Image]) -> None:
        runs = [runs_of(image.pages) for image in images]
        rows = tuple(self._packed(image, len(each) // RUN_BYTES) for image, each in zip(images, runs, strict=True))
        self.tell(Fetched(number, rows, b"".join(runs)))

    def _packed(self, image: Image, runs: int) -> Packed:
        facts = self._facts(image.key, Facts(image.manifest, image.layout))
        return Packed(image.key, facts, runs, image.origin, tuple(image.seconds.items()))

    def _facts(self, key: VersionKey, facts: Facts) -> int:
        """The number by which the worker knows them; it is told, if it does not yet."""
        known = self._known.get((key, facts.layout))
        if known is None:
            known = next(self._numbers)
            drop = (self._known.popitem(last=False)[1],) if len(self._known) >= MAX_KNOWN else ()
            self.tell(Known(known, drop, facts_to_bytes(facts)))
            self._known[key, facts.layout] = known
        self._known.move_to_end((key, facts.layout))
        return known


def _mismatch(where: str, message: str, hint: str) -> Refused:
    return Refused(reject(Code.LOADER_MISMATCH, where, message, hint))


def _too_many() -> Problem:
    return reject(
        Code.QUEUE_FULL, "loader", f"this worker has {MAX_REQUESTS} requests at the loader", "Release some, ask again."
    )
