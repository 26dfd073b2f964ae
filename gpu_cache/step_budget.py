"""The step budget: everything that a step, a request or a load can be short of, in one object.

    KV blocks        a request holds them from its start to its end
    rows             a step holds them; they come back when it is over
    adapter bytes    held for each adapter that may not leave VRAM now; once, whoever else holds it, too
    load slots       a load holds one until it has arrived or failed
    load bytes       what loads in flight may weigh together: the bandwidth that decoding can spare

A reservation takes all that is wanted or nothing. What cannot be had is said as a value: `MustWait` with what
is short, or `NeverFits`. So nobody counts by hand, and nothing is ever above its limit or below zero.

The budget plans; it moves no bytes. Belongs to the scheduler's thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from adapterd.loader.errors import Code, Problem, error, reject
from adapterd.loader.layout import PAGE_BYTES

AdapterKey = tuple[str, str]
"""Tenant and version digest: an adapter of one tenant is never another's (I6)."""


class Resource(StrEnum):
    """What can be short."""

    KV_BLOCKS = "kv_blocks"
    ROWS = "rows"
    ADAPTER_BYTES = "adapter_bytes"
    LOAD_SLOTS = "load_slots"
    LOAD_BYTES = "load_bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """How much there is of each.

    Attributes:
        kv_blocks: of the engine's KV cache.
        rows: rows (tokens) that one step may have.
        adapter_bytes: of the arena; adapters take whole pages of `page_bytes`.
        load_slots: loads that may be on the way at once.
        load_bytes: bytes that may be on the way at once; no less than the largest adapter that is served.
    """

    kv_blocks: int
    rows: int
    adapter_bytes: int
    load_slots: int
    load_bytes: int
    page_bytes: int = PAGE_BYTES

    def __post_init__(self) -> None:
        """Raises Failed (SETTINGS_INVALID)."""
        for name in (*Resource, "page_bytes"):
            if getattr(self, name) < 1:
                raise error(Code.SETTINGS_INVALID, name, f"must be at least 1, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """What somebody wants at once. `adapters` are bytes by adapter, for as long as it may not leave VRAM."""

    kv_blocks: int = 0
    rows: int = 0
    adapters: Mapping[AdapterKey, int] = field(default_factory=dict)
    load_slots: int = 0
    load_bytes: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError for a negative amount."""
        amounts = (self.kv_blocks, self.rows, self.load_slots, self.load_bytes, *self.adapters.values())
        if min(amounts) < 0:
            raise ValueError(f"a negative amount is wanted: {self}")

    def plain(self) -> tuple[tuple[Resource, int], ...]:
        """All but the adapters."""
        return (
            (Resource.KV_BLOCKS, self.kv_blocks),
            (Resource.ROWS, self.rows),
            (Resource.LOAD_SLOTS, self.load_slots),
            (Resource.LOAD_BYTES, self.load_bytes),
        )


@dataclass(frozen=True, slots=True)
class Lack:
    """One thing that is short: how much more of it would be taken, what is free, and what there is in all."""

    resource: Resource
    wanted: int
    free: int
    limit: int

    def __str__(self) -> str:
        return f"{self.wanted} {self.resource.replace('_', ' ')} wanted, {self.free} of {self.limit} free"


@dataclass(frozen=True, slots=True)
class Fits:
    """All of it is free."""


@dataclass(frozen=True, slots=True)
class MustWait:
    """Others hold what is short; it comes back. `lacks` has every reason."""

    lacks: tuple[Lack, ...]

    def short_of(self, resource: Resource) -> bool:
        return any(lack.resource is resource for lack in self.lacks)


@dataclass(frozen=True, slots=True)
class NeverFits:
    """More than there is in all: waiting would not help."""

    lacks: tuple[Lack, ...]

    def problem(self, where: str) -> Problem:
        """The refusal (BUDGET_EXCEEDED) of what `where` names."""
        message = "; ".join(
            f"{k.wanted} {k.resource.replace('_', ' ')} wanted, there are {k.limit}" for k in self.lacks
        )
        return reject(Code.BUDGET_EXCEEDED, where, message, "Ask for less, or raise the limit of the step budget.")


Answer = Fits | MustWait | NeverFits
FITS = Fits()


class Reservation:
    """What one holder has. Made by `StepBudget.reserve`; given back once, however often that is asked."""

    def __init__(self, budget: StepBudget) -> None:
        self._budget = budget
        self._open = True
        self.taken: Counter[Resource] = Counter()
        self.adapters: set[AdapterKey] = set()

    @property
    def open(self) -> bool:
        """Whether it holds anything still."""
        return self._open

    def give_back(self) -> None:
        """Idempotent."""
        if self._open:
            self._open = False
            self._budget._take_back(self)


class StepBudget:
    """What there is, what is taken, and who gets what."""

    def __init__(self, limits: StepLimits) -> None:
        self.limits = limits
        self._limits: dict[Resource, int] = {resource: getattr(limits, resource) for resource in Resource}
        self._taken: Counter[Resource] = Counter()
        self._holders: Counter[AdapterKey] = Counter()
        self._sizes: dict[AdapterKey, int] = {}  # bytes of whole pages, of those with holders
        self._open: set[Reservation] = set()

    @property
    def outstanding(self) -> int:
        """Reservations that are not given back."""
        return len(self._open)

    def limit(self, resource: Resource) -> int:
        return self._limits[resource]

    def taken(self, resource: Resource) -> int:
        return self._taken[resource]

    def free(self, resource: Resource) -> int:
        return self._limits[resource] - self._taken[resource]

    @property
    def held(self) -> frozenset[AdapterKey]:
        """Adapters with a holder; one more holder costs nothing."""
        return frozenset(self._sizes)

    def ask(self, want: Want) -> Answer:
        """Whether `want` could be reserved now. Takes nothing."""
        return self._answer(want, None)

    def reserve(self, want: Want) -> Reservation | MustWait | NeverFits:
        """All of `want`, or nothing.

        An adapter's size is the one it was first held with, until nobody holds it.
        """
        reservation = Reservation(self)
        answer = self._answer(want, None)
        if not isinstance(answer, Fits):
            return answer
        self._open.add(reservation)
        self._take(want, reservation)
        return reservation

    def grow(self, reservation: Reservation, want: Want) -> Answer:
        """Adds all of `want` to what `reservation` has, or nothing.

        Raises RuntimeError if the reservation was given back.
        """
        if not reservation.open:
            raise RuntimeError("a reservation that was given back cannot grow")
        answer = self._answer(want, reservation)
        if isinstance(answer, Fits):
            self._take(want, reservation)
        return answer

    def hold(self, reservation: Reservation, adapters: Mapping[AdapterKey, int]) -> bool:
        """Adds these adapters to what an open reservation has, if there is room for all of them: `grow`, by a word."""
        if self._fresh(adapters) > self.free(Resource.ADAPTER_BYTES):
            return False
        self._take_adapters(adapters, reservation)
        return True

    def short(self, *, kv_blocks: int, rows: int) -> bool:
        """Whether that cannot be had now and could be later: why most of those that wait do, by a word."""
        if kv_blocks > self.limits.kv_blocks or rows > self.limits.rows:
            return False
        return kv_blocks > self.free(Resource.KV_BLOCKS) or rows > self.free(Resource.ROWS)

    def _answer(self, want: Want, holder: Reservation | None) -> Answer:
        """`NeverFits` counts what the holder has already: it would wait for itself."""
        more = self._more(want)
        short = tuple([self._lack(r, n) for r, n in more.items() if n > self.free(r)])
        if not short:
            return FITS
        own = self._whole(want, holder)
        never = tuple(Lack(r, n, self.free(r), self.limit(r)) for r, n in own.items() if n > self.limit(r))
        return NeverFits(never) if never else MustWait(short)

    def _more(self, want: Want) -> dict[Resource, int]:
        """What would be taken. Adapters that are held cost nothing."""
        more = {r: n for r, n in want.plain() if n}
        if want.adapters:
            more[Resource.ADAPTER_BYTES] = self._fresh(want.adapters)
        return more

    def _fresh(self, adapters: Mapping[AdapterKey, int]) -> int:
        """Bytes of those that nobody holds."""
        return sum([self._pages(nbytes) for key, nbytes in adapters.items() if key not in self._sizes])

    def _whole(self, want: Want, holder: Reservation | None) -> dict[Resource, int]:
        """All that the holder would have, as if it were alone."""
        had = Counter[Resource]() if holder is None else holder.taken
        whole: dict[Resource, int] = {r: n + had[r] for r, n in want.plain()}
        sizes = {key: self._sizes[key] for key in holder.adapters} if holder is not None else {}
        sizes |= {key: self._sizes.get(key, self._pages(nbytes)) for key, nbytes in want.adapters.items()}
        return {**whole, Resource.ADAPTER_BYTES: sum(sizes.values())}

    def _take(self, want: Want, reservation: Reservation) -> None:
        for resource, amount in want.plain():
            if amount:
                self._add(resource, amount)
                reservation.taken[resource] += amount
        self._take_adapters(want.adapters, reservation)

    def _take_adapters(self, adapters: Mapping[AdapterKey, int], reservation: Reservation) -> None:
        for key in adapters.keys() - reservation.adapters:
            reservation.adapters.add(key)
            if key not in self._sizes:
                self._sizes[key] = self._pages(adapters[key])
                self._add(Resource.ADAPTER_BYTES, self._sizes[key])
            self._holders[key] += 1

    def _add(self, resource: Resource, amount: int) -> None:
        self._taken[resource] += amount
        assert self._taken[resource] <= self._limits[resource], f"more {resource} taken than there is"

    def _take_back(self, reservation: Reservation) -> None:
        """For `Reservation.give_back`, once each."""
        self._open.remove(reservation)
        for resource, amount in reservation.taken.items():
            self._taken[resource] -= amount
            assert self._taken[resource] >= 0, f"more {resource} given back than was taken"
        for key in reservation.adapters:
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key]
                self._taken[Resource.ADAPTER_BYTES] -= self._sizes.pop(key)
        assert self._taken[Resource.ADAPTER_BYTES] == sum(self._sizes.values()), "adapter bytes do not add up"

    def _lack(self, resource: Resource, wanted: int) -> Lack:
        return Lack(resource, wanted, self.free(resource), self.limit(resource))

    def _pages(self, nbytes: int) -> int:
        return -(-nbytes // self.limits.page_bytes) * self.limits.page_bytes
