"""The loop: requests come and go, and each step runs whatever can run, every row with its own adapter."""

from __future__ import annotations

from collections import Counter, deque
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Self

from adapterd.cli.worker.checked import Checked
from adapterd.cli.worker.flight import Pilot
from adapterd.cli.worker.forward import FlatModel
from adapterd.cli.worker.generation import Generation, State
from adapterd.cli.worker.hold import Hold
from adapterd.cli.worker.prefix import PrefixCache
from adapterd.cli.worker.refusals import misfit
from adapterd.cli.worker.requests import Reason, Request, Sink
from adapterd.cli.worker.roll import Roll
from adapterd.cli.worker.scheduling import FirstComeFirstServed, Scheduler
from adapterd.cli.worker.tally import LoopStatistics, Progress
from adapterd.gpu_cache import AdapterCache, Lease
from adapterd.gpu_cache.engine import LoRAEngine
from adapterd.loader.errors import AdapterdError, Code, error
from adapterd.loader.identity import check_name

MAX_ROWS = 512
MAX_OPEN = 10_000


class ServingLoop:
    """Continuous batching over one model, one engine and one cache. For one thread.

    A request's failure is its own: it ends with its problem and harms no other (I17). Whatever way a request
    ends, its lease is released and its keys and values are freed; leaving the context ends all that are open.

    Args:
        model: what runs the rows; closed by whoever made it, as are the next two.
        engine, cache: over that model.
        scheduler: who runs next; else first come, first served.
        prefix: what may be shared; else nothing is.
        max_rows: of one step.
        max_open: requests at once.
    """

    def __init__(
        self,
        model: FlatModel,
        engine: LoRAEngine[Lease | None],
        cache: AdapterCache,
        *,
        scheduler: Scheduler | None = None,
        prefix: PrefixCache | None = None,
        max_rows: int = MAX_ROWS,
        max_open: int = MAX_OPEN,
    ) -> None:
        self._model, self._engine, self._cache = model, engine, cache
        self._scheduler = scheduler or FirstComeFirstServed()
        self._prefix = prefix or PrefixCache(0)
        self._max_open, self._arrivals, self._draining = max_open, 0, False
        self._roll, self._checked = Roll(self._prefix), Checked(engine)
        self._admitted: deque[Generation] = deque()  # by the scheduler; they ask for their adapters one after the other
        self._pilot = Pilot(
            model, engine, self._roll, scheduler=self._scheduler, prefix=self._prefix, max_rows=max_rows
        )

    # Requests

    def submit(self, request: Request, sink: Sink) -> None:
        """Opens a request; its events go to `sink`, the last one is an `Ended`.

        Raises:
            AdapterdError: REQUEST_INVALID, REF_INVALID (the tenant), ALREADY_EXISTS (the id is open),
                QUEUE_FULL, or CACHE_CLOSED while draining. There are no events then.
        """
        self._check(request)
        self._arrivals += 1
        hold = Hold(self._cache, request.wish, request.tenant)
        self._roll.add(Generation(request, self._arrivals, sink, hold, self._model.key_values()))

    def cancel(self, name: str) -> None:
        """Ends it now. Raises NotFound if no such request is open."""
        self._roll.end(self._roll.find(name), Reason.CANCELLED)
        self._roll.tell()

    def pause(self, name: str) -> None:
        """It holds no adapter, keys and values until `resume`. Idempotent. Raises NotFound."""
        found = self._roll.find(name)
        if self._draining:
            self._roll.end(found, Reason.CANCELLED)
        else:
            self._roll.remember(found)
            found.pause()
            self._roll.move(found, State.PAUSED)
        self._roll.tell()

    def resume(self, name: str) -> None:
        """It goes on with the same versions, and computes again what is not in the prefix cache. Raises NotFound."""
        found = self._roll.find(name)
        if found.state is State.PAUSED:
            self._roll.move(found, State.WAITING)

    def drain(self) -> None:
        """No request is taken any more; open ones finish, and paused ones end. Idempotent."""
        self._draining = True
        for each in self._roll.of(State.PAUSED):
            self._roll.end(each, Reason.CANCELLED)
        self._roll.tell()

    @property
    def drained(self) -> bool:
        """Whether it is draining and nothing is open."""
        return self._draining and not len(self._roll)

    def close(self) -> None:
        """Ends everything that is open, all of it also where one raises. Idempotent."""
        self._draining = True
        with ExitStack() as ends:  # the last first
            ends.callback(self._roll.tell)
            ends.callback(self._prefix.clear)
            ends.callback(self._end_all)
            ends.callback(self._pilot.land)

    def _end_all(self) -> None:
        with ExitStack() as ends:
            for each in reversed(self._roll.all):
                ends.callback(self._roll.end, each, Reason.CANCELLED)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: type[BaseException] | None, _e: BaseException | None, _tb: TracebackType | None) -> None:
        self.close()

    def statistics(self) -> LoopStatistics:
        """Counts now."""
        held = self._roll.all
        return LoopStatistics(
            open=Counter(each.state for each in held), ended=self._roll.ended.copy(),
            steps=self._pilot.steps, rows=self._pilot.rows, kv_bytes=sum(each.kv.nbytes for each in held),
            prefix_blocks=self._prefix.blocks, prefix_tokens=self._prefix.hits,
            graphs=replace(self._model.runner.counts),
        )  # fmt: skip

    # Steps

    def step(self) -> Progress:
        """Launches a step if anything can run, and takes the tokens of the one before.

        It never waits for an adapter (I14). What it launches is under way when it returns: callers hear of their
        tokens, send new requests, and adapters are looked after, while the device computes.

        Raises what a sink has raised. RuntimeError from inside a sink.
        """
        if self._roll.telling:
            raise RuntimeError("a step was asked for by a sink, in the middle of one")
        self._admit()
        self._settle()
        self._pilot.advance()
        self._roll.tell()
        if self._pilot.flying or self._roll.of(State.READY):
            return Progress.RAN
        return Progress.WAITING if self._roll.of(State.LOADING) or self._roll.of(State.WAITING) else Progress.IDLE

    def _admit(self) -> None:
        """Requests ask for their adapters, as many as the scheduler lets.

        To make room for an adapter that is not in VRAM and to enqueue its copies takes longer than all else of a
        request, and who decodes waits meanwhile. So it is done for one of them a step, while others stand ready to
        take a seat.
        """
        waiting = self._roll.of(State.WAITING)
        if not waiting:
            return
        for each in waiting:
            if not each.adapted:
                self._acquire(each)
        idle = [
            each
            for each in (*self._roll.of(State.LOADING), *self._roll.of(State.READY))
            if each.adapted and not each.started
        ]
        adapted = [each for each in waiting if each.adapted]
        if adapted and not self._admitted:
            self._admitted.extend(self._scheduler.admit(adapted, idle))
        no_hurry = self._pilot.flying and any(each.state is State.READY for each in idle)
        while self._admitted:
            each = self._admitted.popleft()
            if each.state is State.WAITING and not self._acquire(each) and no_hurry:
                break

    def _acquire(self, each: Generation) -> bool:
        """Whether it waits for nothing: its lease is ready at once, or it has failed."""
        try:
            each.hold.acquire()
        except AdapterdError as fault:
            self._roll.fail(each, fault.problems)
            return True
        self._roll.move(each, State.LOADING)
        return each.lease.ready

    def _settle(self) -> None:
        """What has become of the leases."""
        self._cache.pump()
        for each in self._roll.all:
            lease = each.hold.lease
            if lease is not None and lease.failed:  # whatever state it is in: a version may be revoked at any time
                self._roll.fail(each, lease.problems)
        for each in self._roll.of(State.LOADING):
            if not each.lease.ready:
                continue
            try:
                self._checked.check(each.lease)
                each.note_lease()
                self._roll.move(each, State.READY)
            except AdapterdError as fault:
                self._roll.fail(each, fault.problems)

    def _check(self, request: Request) -> None:
        if self._draining:
            raise error(Code.CACHE_CLOSED, request.id, "the worker is ending", "Ask another one.")
        check_name("tenant", request.tenant)
        if request.id in self._roll:
            raise error(Code.ALREADY_EXISTS, request.id, "a request with this id is open", "Choose another id.")
        if len(self._roll) >= self._max_open:
            raise error(Code.QUEUE_FULL, request.id, f"{self._max_open} requests are open", "Wait for some to end.")
        fault = misfit(request, self._model.vocabulary, self._model.positions)
        if fault:
            raise error(Code.REQUEST_INVALID, request.id, fault)
