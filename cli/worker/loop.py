"""The loop: requests come and go, and each step runs whatever can run, every row with its own adapter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from adapterd.cli.worker.forward import FlatModel
from adapterd.cli.worker.generation import Generation, State
from adapterd.cli.worker.hold import Hold
from adapterd.cli.worker.prefix import PrefixCache
from adapterd.cli.worker.refusals import misfit, problems_of
from adapterd.cli.worker.requests import Ended, Event, Reason, Request, Sink, Token
from adapterd.cli.worker.scheduling import FirstComeFirstServed, Scheduler
from adapterd.cli.worker.tally import LoopStatistics, Progress
from adapterd.gpu_cache import AdapterCache, Lease
from adapterd.gpu_cache.engine import LoRAEngine
from adapterd.gpu_cache.engine.device_plan import LaunchShape
from adapterd.loader.errors import AdapterdError, Code, Problem, error, reject
from adapterd.loader.identity import check_name

MAX_ROWS = 512
MAX_OPEN = 10_000

_BASE_ALONE = "base"

Chosen = Sequence[tuple[Generation, int]]


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
        self._max_rows, self._max_open = max_rows, max_open
        self._open: dict[str, Generation] = {}
        self._arrivals = self._steps = self._rows = 0
        self._ended: Counter[Reason] = Counter()
        self._faults: list[Exception] = []
        self._draining = False
        self._bound = engine.served

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
        self._open[request.id] = Generation(request, self._arrivals, sink, hold, self._model.key_values())

    def cancel(self, name: str) -> None:
        """Ends it now. Raises NotFound if no such request is open."""
        self._end(self._find(name), Reason.CANCELLED)
        self._raise_fault()

    def pause(self, name: str) -> None:
        """It holds no adapter, keys and values until `resume`. Idempotent. Raises NotFound."""
        found = self._find(name)
        if self._draining:
            self._end(found, Reason.CANCELLED)
        else:
            self._remember(found)
            found.pause()
            found.state = State.PAUSED
        self._raise_fault()

    def resume(self, name: str) -> None:
        """It goes on with the same versions, and computes again what is not in the prefix cache. Raises NotFound."""
        found = self._find(name)
        if found.state is State.PAUSED:
            found.state = State.WAITING

    def drain(self) -> None:
        """No request is taken any more; open ones finish, and paused ones end. Idempotent."""
        self._draining = True
        for each in self._in(State.PAUSED):
            self._end(each, Reason.CANCELLED)
        self._raise_fault()

    @property
    def drained(self) -> bool:
        """Whether it is draining and nothing is open."""
        return self._draining and not self._open

    def close(self) -> None:
        """Ends everything that is open. Idempotent."""
        self._draining = True
        for each in list(self._open.values()):
            self._end(each, Reason.CANCELLED)
        self._prefix.clear()
        self._raise_fault()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: type[BaseException] | None, _e: BaseException | None, _tb: TracebackType | None) -> None:
        self.close()

    def statistics(self) -> LoopStatistics:
        """Counts now."""
        held = self._open.values()
        return LoopStatistics(
            open=Counter(each.state for each in held), ended=self._ended.copy(), steps=self._steps, rows=self._rows,
            kv_bytes=sum(each.kv.nbytes for each in held),
            prefix_blocks=self._prefix.blocks, prefix_tokens=self._prefix.hits,
            graphs=replace(self._model.runner.counts),
        )  # fmt: skip

    # Steps

    def step(self) -> Progress:
        """Looks after loading adapters, and runs one step if anything can run. Never waits for an adapter (I14)."""
        self._admit()
        self._settle()
        chosen = self._chosen()
        if chosen:
            self._run(chosen)
        self._raise_fault()
        if chosen or self._in(State.READY):
            return Progress.RAN
        return Progress.WAITING if self._in(State.LOADING, State.WAITING) else Progress.IDLE

    def _admit(self) -> None:
        waiting = self._in(State.WAITING)
        adapted = [each for each in waiting if each.adapted]
        idle = [e for e in self._in(State.LOADING, State.READY) if e.adapted and not e.started] if adapted else ()
        admitted = self._scheduler.admit(adapted, idle) if adapted else ()
        for each in (*(w for w in waiting if not w.adapted), *admitted):
            try:
                each.hold.acquire()
                each.state = State.LOADING
            except AdapterdError as fault:
                self._fail(each, fault.problems)

    def _settle(self) -> None:
        self._cache.pump()
        for each in list(self._open.values()):
            lease = each.hold.lease
            if lease is not None and lease.failed:  # whatever state it is in: a version may be revoked at any time
                self._fail(each, lease.problems)
        for each in self._in(State.LOADING):
            if not _lease(each).ready:
                continue
            try:
                self._engine.check(_lease(each))
                each.ready()
            except AdapterdError as fault:
                self._fail(each, fault.problems)

    def _chosen(self) -> Chosen:
        """What the scheduler picks, less what turns out to be in the prefix cache already."""
        ready = self._in(State.READY)
        if not ready:
            return ()
        choice = self._scheduler.choose(ready, self._max_rows)
        for each, problem in choice.refused:
            self._fail(each, (problem,))
        chosen = []
        for each, rows in choice.run:
            try:
                if not each.started:
                    self._prefix.fill(each.prefix_key, each.tokens, each.kv)
                count = min(rows, each.pending)
                each.kv.reserve(count)
                chosen.append((each, count))
            except (RuntimeError, AdapterdError) as fault:  # no memory for its keys and values
                self._fail(each, problems_of(fault))
        return chosen

    def _run(self, chosen: Chosen) -> None:
        """One forward. If it fails, whose lease is at fault fails alone; the others lose nothing and go on."""
        plan = self._model.plan([(each.rows(rows), each.kv) for each, rows in chosen])
        leases: list[tuple[Lease | None, int]] = [(_lease(each), rows) for each, rows in chosen]
        if plan.padding:
            leases.append((None, plan.padding))
        try:
            with self._engine.step(leases) as step:
                logits_NV = self._model.run(plan, self._launches(chosen, step.shape))
        except Exception as fault:  # noqa: BLE001 - whatever the model does, the worker goes on
            self._blame(chosen, fault)
            return
        self._steps += 1
        self._rows += sum(rows for _, rows in chosen)
        self._take([each for each, _ in chosen], logits_NV)

    def _launches(self, chosen: Chosen, shape: LaunchShape | None) -> Hashable | None:
        """What the engine launches in this step: nothing for base rows, else by its shape. None: anything."""
        if self._bound is not self._engine.served:  # it was bound anew, with other tables at other addresses
            self._bound = self._engine.served
            self._model.runner.forget()
        return shape if any(each.adapted for each, _ in chosen) else _BASE_ALONE

    def _blame(self, chosen: Chosen, fault: Exception) -> None:
        guilty = [(each, problems) for each, _ in chosen if (problems := self._unusable(each))]
        for each, problems in guilty or [(each, problems_of(fault)) for each, _ in chosen]:
            self._fail(each, problems)

    def _unusable(self, each: Generation) -> tuple[Problem, ...]:
        try:
            self._engine.check(_lease(each))
        except AdapterdError as fault:
            return fault.problems
        return ()

    def _take(self, ran: Sequence[Generation], logits_NV: Tensor) -> None:
        """The next token of everybody whose rows are all in. First all are noted, then all are told."""
        finite, greedy = torch.stack([logits_NV.isfinite().all(-1).long(), logits_NV.argmax(-1)]).tolist()
        spoken: list[Generation] = []
        for row, (each, sound, largest) in enumerate(zip(ran, finite, greedy, strict=True)):
            if each.pending:
                continue
            if not sound:
                self._fail(each, (reject(Code.NONFINITE, each.id, "its logits are not finite"),))
                continue
            if not each.generated:
                self._remember(each)
            try:
                each.tokens.append(each.sample(logits_NV, row, largest))
            except RuntimeError as fault:
                self._fail(each, problems_of(fault))
            else:
                spoken.append(each)
        for each in spoken:
            self._tell(each, Token(each.id, each.generated - 1, each.tokens[-1]))
            if each.finished:
                self._end(each, each.finished)

    # One request

    def _end(self, each: Generation, reason: Reason, problems: tuple[Problem, ...] = ()) -> None:
        """The only way out. Does nothing the second time."""
        if each.state is State.ENDED:
            return
        if reason is not Reason.FAILED:
            self._remember(each)
        each.state = State.ENDED
        del self._open[each.id]
        self._ended[reason] += 1
        try:
            each.free()
        finally:
            self._tell(each, Ended(each.id, reason, each.generated, problems, each.applied))

    def _fail(self, each: Generation, problems: tuple[Problem, ...]) -> None:
        self._end(each, Reason.FAILED, problems)

    def _tell(self, each: Generation, event: Event) -> None:
        try:
            each.sink(event)
        except Exception as fault:  # noqa: BLE001 - the caller's; raised once the books are in order
            self._faults.append(fault)
            self._end(each, Reason.CANCELLED)

    def _remember(self, each: Generation) -> None:
        """Into the prefix cache. It is only a cache: where there is no memory for it, it is emptied."""
        if not each.started:
            return
        try:
            self._prefix.keep(each.prefix_key, each.tokens, each.kv)
        except RuntimeError:
            self._prefix.clear()

    def _raise_fault(self) -> None:
        faults, self._faults = self._faults, []
        if faults:
            raise faults[0]

    def _in(self, *states: State) -> list[Generation]:
        """Open requests in these states, in order of arrival."""
        return [each for each in self._open.values() if each.state in states]

    def _find(self, name: str) -> Generation:
        found = self._open.get(name)
        if found is None:
            raise error(Code.NOT_FOUND, name[:160], "no such request is open")
        return found

    def _check(self, request: Request) -> None:
        if self._draining:
            raise error(Code.CACHE_CLOSED, request.id, "the worker is ending", "Ask another one.")
        check_name("tenant", request.tenant)
        if request.id in self._open:
            raise error(Code.ALREADY_EXISTS, request.id, "a request with this id is open", "Choose another id.")
        if len(self._open) >= self._max_open:
            raise error(Code.QUEUE_FULL, request.id, f"{self._max_open} requests are open", "Wait for some to end.")
        fault = misfit(request, self._model.vocabulary, self._model.positions)
        if fault:
            raise error(Code.REQUEST_INVALID, request.id, fault)


def _lease(each: Generation) -> Lease:
    assert each.hold.lease is not None
    return each.hold.lease
