"""Who runs in the next step, and which adapters begin to load.

Those whose adapters are in VRAM start, in turn (`turns`); the others load meanwhile, as far as load slots and bytes
go. So a request that waits for its adapter holds up nobody, and base rows never wait for one. A request that has been
passed over `patience` times is due. From then on nobody behind it gets what it is short of:

    a load slot, load bytes    no load begins behind it
    room in VRAM               no load begins and no adapter's row starts behind it; base rows do
    KV blocks, rows            (its adapters are here by then) nobody starts behind it

Room in VRAM goes first to what runs and what is on the way, then in turn to what the waiting want and is here, or is
due; look-ahead loads take what is left. The selector holds all reservations itself and looks at states only, never at
events: what is no longer in `running`, no longer on the way or no longer wanted gives its share back by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic

from adapterd.gpu_cache.records import Place
from adapterd.gpu_cache.step_budget import (
    AdapterKey,
    Fits,
    MustWait,
    NeverFits,
    Reservation,
    Resource,
    StepBudget,
    Want,
)
from adapterd.gpu_cache.turns import R, Request, Turns
from adapterd.gpu_cache.whereabouts import Residency
from adapterd.loader.errors import Problem

PATIENCE = 1
"""Steps in which a request may be passed over before it is due. `docs/scheduling.md` has what other values do."""
LOOK_AHEAD = 64
"""Compositions that one step tries to load for requests that are not due: a bound on its work."""


@dataclass(frozen=True, slots=True)
class Selection(Generic[R]):
    """What to do in one step.

    Attributes:
        run: those that get their rows in this step; requests with equal adapters stand together, so that the step has
            as few segments as can be.
        started: those of `run` that were waiting until now.
        loads: adapters to begin loading, most urgent first. Report them as STAGING from now until they have arrived.
        held: all adapters that have to stay until the next selection: those of running requests, those on the way
            (`loads` too), and resident ones that waiting requests count on. All others may be evicted.
        refused: those that can never fit, with the reason. Take them out of the queue.
    """

    run: tuple[R, ...]
    started: tuple[R, ...]
    loads: tuple[AdapterKey, ...]
    held: frozenset[AdapterKey]
    refused: tuple[tuple[R, Problem], ...]


@dataclass(slots=True)
class _Composition:
    """What all requests with the same adapters have in common in one step. Bytes by adapter."""

    wanted: Mapping[AdapterKey, int]
    here: Mapping[AdapterKey, int]
    complete: bool
    kept: bool = False


@dataclass(slots=True)
class _Step(Generic[R]):
    """What one selection has come to so far. The three flags close something to everybody behind.

    `no_room` stops starts with adapters that are in use already, too: else a popular adapter would never leave.
    """

    residency: Residency
    compositions: dict[tuple[str, tuple[str, ...]], _Composition] = field(default_factory=dict)
    started: list[R] = field(default_factory=list)
    loads: list[AdapterKey] = field(default_factory=list)
    refused: list[tuple[R, Problem]] = field(default_factory=list)
    no_starts: bool = False
    no_loads: bool = False
    no_room: bool = False

    def composition(self, request: R) -> _Composition:
        """Looked up once for all that share it. An adapter that nobody knows of counts as nothing."""
        name = (request.tenant, request.adapters)
        found = self.compositions.get(name)
        if found is None:
            keys = [(request.tenant, digest) for digest in request.adapters]
            known = {key: self.residency.get(key) for key in keys}
            wanted = {key: 0 if each is None else each.nbytes for key, each in known.items()}
            here = {key: wanted[key] for key, each in known.items() if each and each.place is Place.RESIDENT}
            found = self.compositions[name] = _Composition(wanted, here, len(here) == len(wanted))
        return found


class Selector(Generic[R]):
    """Chooses step by step. Deterministic: the same calls get the same answers. Belongs to the scheduler's thread."""

    def __init__(self, budget: StepBudget, *, patience: int = PATIENCE) -> None:
        self._budget = budget
        self._turns = Turns(patience)
        self._requests: dict[str, Reservation] = {}  # of those that run: KV blocks and adapters
        self._loads: dict[AdapterKey, Reservation] = {}
        self._ran: dict[str, int] = {}  # tick of the last step with rows, of those that run
        self._rows = self._empty()
        self._kept = self._empty()
        self._tick = -1

    def select(self, waiting: Sequence[R], running: Sequence[R], residency: Residency, *, tick: int) -> Selection[R]:
        """The next step. O(n log n) for n waiting and running requests.

        Args:
            waiting: those that have not started; in any order.
            running: those that started and are not finished, with the rows they want now. One that is missing here
                has ended: its reservation is given back. Listed in `waiting` again, it is a new one.
            residency: where adapters are. One that is not listed is absent, and its size counts as nothing until it is.
            tick: the step's number; grows from call to call.

        Raises ValueError if the tick does not grow, if a running request did not start here, or if it wants more rows
        than a step can have.
        """
        if tick <= self._tick:
            raise ValueError(f"tick {tick} after {self._tick}: time goes forwards")
        self._tick = tick
        self._settle(running, residency)
        run = self._give_rows(running)
        step = _Step[R](residency)
        ordered = self._turns.order(waiting)
        later = [request for request in ordered if self._take_turn(request, step)]
        self._look_ahead(later, step)
        started = {request.id for request in step.started}
        self._turns.leave(ordered, started | {request.id for request, _ in step.refused}, started)
        return Selection(
            run=tuple(sorted([*run, *step.started], key=lambda r: (_segment(r), r.id))),
            started=tuple(step.started),
            loads=tuple(step.loads),
            held=self._budget.held,
            refused=tuple(step.refused),
        )

    def reservation(self, request_id: str) -> Reservation | None:
        """What a running request holds, to grow it or to give it back early."""
        return self._requests.get(request_id)

    def passes(self, request_id: str) -> int:
        """In how many steps a waiting request was passed over."""
        return self._turns.passes(request_id)

    def close(self) -> None:
        """Gives everything back."""
        for reservation in (*self._requests.values(), *self._loads.values(), self._rows, self._kept):
            reservation.give_back()
        self._requests.clear()
        self._loads.clear()

    # What is over

    def _settle(self, running: Sequence[R], residency: Residency) -> None:
        alive = {request.id for request in running}
        for ended in self._requests.keys() - alive:
            self._requests.pop(ended).give_back()
            self._ran.pop(ended, None)
        for key in [key for key in self._loads if _place(residency, key) is not Place.STAGING]:
            self._loads.pop(key).give_back()
        self._rows.give_back()
        self._kept.give_back()
        self._rows, self._kept = self._empty(), self._empty()

    def _give_rows(self, running: Sequence[R]) -> list[R]:
        """Those that run on: longest without rows first, so that everybody's rows come."""
        for request in running:
            if request.id not in self._requests or request.rows > self._budget.limits.rows:
                raise ValueError(f"{request.id} did not start here, or wants more than a step's rows: {request.rows}")
        wanting = [request for request in running if request.rows]
        run = wanting
        if not isinstance(self._budget.grow(self._rows, Want(rows=sum(r.rows for r in wanting))), Fits):
            fair = sorted(wanting, key=lambda r: (self._ran[r.id], r.id))
            run = [r for r in fair if isinstance(self._budget.grow(self._rows, Want(rows=r.rows)), Fits)]
        self._ran.update((request.id, self._tick) for request in run)
        return run

    # One request's turn

    def _take_turn(self, request: R, step: _Step[R]) -> bool:
        """Starts it, or sets aside what it waits for. Returns whether it is left for the look-ahead."""
        composition = step.composition(request)
        if composition.complete:
            if not self._start(request, composition.wanted, step):
                self._keep(composition, step)
            return False
        if self._turns.due(request):
            self._keep(composition, step)
            self._load(request, composition.wanted, step)
            return False
        return True

    def _start(self, request: R, wanted: Mapping[AdapterKey, int], step: _Step[R]) -> bool:
        """Whether it started or was refused; if neither, it needs its adapters kept."""
        if step.no_starts or (step.no_room and wanted):
            return False
        wants = max(1, request.rows)
        if not self._turns.due(request) and self._budget.short(kv_blocks=request.kv_blocks, rows=wants):
            return False  # the usual answer, without building one
        rows = Want(rows=wants)
        match self._budget.ask(Want(kv_blocks=request.kv_blocks, adapters=wanted, rows=rows.rows)):
            case Fits():
                held = self._budget.reserve(Want(kv_blocks=request.kv_blocks, adapters=wanted))
                given = self._budget.grow(self._rows, rows)
                assert isinstance(held, Reservation) and isinstance(given, Fits), (held, given)
                self._requests[request.id] = held
                self._ran[request.id] = self._tick
                step.started.append(request)
                return True
            case NeverFits() as answer:
                step.refused.append((request, answer.problem(request.id)))
                return True
            case MustWait() as answer:
                if self._turns.due(request):
                    room = answer.short_of(Resource.ADAPTER_BYTES)
                    step.no_room, step.no_starts = step.no_room or room, not room
                return False

    def _load(self, request: R, wanted: Mapping[AdapterKey, int], step: _Step[R]) -> None:
        """Begins what is missing. Loads go in turn; room is closed to others only if the request is due."""
        for key, nbytes in wanted.items():
            if key in self._loads or _place(step.residency, key) in {Place.STAGING, Place.RESIDENT}:
                continue
            if step.no_loads or step.no_room:
                return
            answer = self._ask_whole(request, wanted) or self._budget.reserve(
                Want(adapters={key: nbytes}, load_slots=1, load_bytes=nbytes)
            )
            match answer:
                case Reservation():
                    self._loads[key] = answer
                    step.loads.append(key)
                case NeverFits():
                    step.refused.append((request, answer.problem(request.id)))
                    return
                case MustWait():
                    room = answer.short_of(Resource.ADAPTER_BYTES)
                    step.no_loads = answer.short_of(Resource.LOAD_SLOTS) or answer.short_of(Resource.LOAD_BYTES)
                    step.no_room = room and self._turns.due(request)
                    return

    def _ask_whole(self, request: R, wanted: Mapping[AdapterKey, int]) -> NeverFits | None:
        """Whether the request can never run, so that nothing is loaded for it."""
        answer = self._budget.ask(Want(kv_blocks=request.kv_blocks, rows=max(1, request.rows), adapters=wanted))
        return answer if isinstance(answer, NeverFits) else None

    def _look_ahead(self, later: Sequence[R], step: _Step[R]) -> None:
        """Loads for those that are not due, with what is left.

        The first keeps what is here of its composition: else two could take each other's parts for ever.
        """
        for request in later[:1]:
            self._keep(step.composition(request), step)
        tried: set[int] = set()
        for request in later:
            if step.no_loads or step.no_room or len(tried) == LOOK_AHEAD:
                return
            composition = step.composition(request)
            if id(composition) not in tried:
                tried.add(id(composition))
                self._load(request, composition.wanted, step)

    def _keep(self, composition: _Composition, step: _Step[R]) -> None:
        """Holds what is here for one that waits, if there is room for it."""
        if composition.here and not composition.kept and not step.no_room:
            composition.kept = self._budget.hold(self._kept, composition.here)

    def _empty(self) -> Reservation:
        made = self._budget.reserve(Want())
        assert isinstance(made, Reservation), made
        return made


def _place(residency: Residency, key: AdapterKey) -> Place:
    found = residency.get(key)
    return Place.ABSENT if found is None else found.place


def _segment(request: Request) -> tuple[tuple[str, ...], str]:
    """Equal for rows that share one segment; the base's rows come first, whoever's they are."""
    return request.adapters, request.tenant if request.adapters else ""
