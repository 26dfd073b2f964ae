"""From leases and row counts to a plan: what one step has to do, decided before the model runs.

A step's rows are the flattened leading dimensions of every wrapped layer's input, in order. Nothing of a plan
lives on the device, so making one never waits for it (I13).

Kernels read compositions entry by entry (`shares`, `device_plan`). The reference and receipts read segments, which
are made when the first of them asks: a segment is a run of rows that share one composition; neighbours with equal
compositions are merged, so a scheduler that sorts its rows by lease gets fewer, larger products.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from operator import is_not
from typing import TYPE_CHECKING, Protocol, TypeVar

from adapterd.loader.errors import Code, error

if TYPE_CHECKING:
    from torch import Tensor

    from adapterd.gpu_cache.device import Device
    from adapterd.loader.base_model import BaseSpec
    from adapterd.loader.identity import VersionKey
    from adapterd.loader.layout import Layout
    from adapterd.loader.manifest import Manifest
    from adapterd.loader.sharding import Sharding


class ResidentLike(Protocol):
    """One version in VRAM, as the engine reads it: `pages[i]` is the arena page that holds layout page i."""

    @property
    def key(self) -> VersionKey: ...
    @property
    def slot(self) -> int: ...
    @property
    def generation(self) -> int: ...
    @property
    def manifest(self) -> Manifest: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def pages(self) -> tuple[int, ...]: ...


Composition = tuple[tuple[ResidentLike, float], ...]
"""(resident, weight) in order; empty for the base."""


class LeaseLike(Protocol):
    """One user's hold. `composition` is normalised (ARCHITECTURE, Vocabulary), empty for the base, known once ready.

    The same tuple as in the step before says that nothing has changed, and costs least.
    """

    @property
    def composition(self) -> Sequence[tuple[ResidentLike, float]]: ...


class Ticket(Protocol):
    """What a step holds of the cache: its residents stay where they are until `end`."""

    def end(self) -> None:
        """Record the fence of this step; called once."""


L_contra = TypeVar("L_contra", contravariant=True)


class CacheSizes(Protocol):
    """What the kernels' tables are sized by: slots, bytes of a page, and the packed dtype or `auto`. And which part
    of each adapter is there."""

    @property
    def max_residents(self) -> int: ...
    @property
    def page_bytes(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def sharding(self) -> Sharding: ...


class ServingCache(Protocol[L_contra]):
    """The little that the engine needs of a cache. `L_contra` is a lease, or None for the base.

    `device` is asked for only where kernels run.
    """

    @property
    def config(self) -> CacheSizes: ...

    @property
    def device(self) -> Device:
        """Where the arena is."""

    @property
    def base(self) -> BaseSpec: ...

    @property
    def arena(self) -> Tensor:
        """All pages, uint8, one allocation for the life of the cache."""

    def begin_step(self, leases: Sequence[L_contra], /) -> Ticket:
        """Pin the leases' residents and make the compute stream wait for their copies.

        Raises AdapterdError: a failed lease's failure, LEASE_NOT_READY, LEASE_RELEASED, SLOT_STALE.
        """

    def rebind(self, base: BaseSpec, /) -> None:
        """Forget every resident of the old base; from now on serve adapters of `base` (I16)."""


@dataclass(frozen=True, slots=True)
class Component:
    """One version of a composition and its weight."""

    resident: ResidentLike
    weight: float

    @property
    def identity(self) -> tuple[int, int, float]:
        """Equal only if the effect is: a slot's generation never comes back."""
        return self.resident.slot, self.resident.generation, self.weight


@dataclass(frozen=True, slots=True)
class Segment:
    """`rows` consecutive rows from `start` that share one composition; no components: base rows."""

    start: int
    rows: int
    components: tuple[Component, ...]

    @property
    def stop(self) -> int:
        return self.start + self.rows

    def same_composition(self, components: tuple[Component, ...]) -> bool:
        mine = self.components
        return len(mine) == len(components) and all(
            a.identity == b.identity for a, b in zip(mine, components, strict=True)
        )


class BatchPlan:
    """One step: what each of its entries gets, and how many rows it has, in order. Nobody changes one.

    Attributes:
        compositions: by entry.
        lengths: rows, by entry.
        rows: of the step.
        mark: stands for the plan, and holds nothing.
        follows: the mark of another plan with as many entries, if it is known in which they differ.
        changed: those, if so.
    """

    def __init__(
        self,
        compositions: tuple[Composition, ...],
        lengths: tuple[int, ...],
        rows: int,
        follows: object = None,
        changed: Sequence[int] = (),
    ) -> None:
        self.compositions, self.lengths, self.rows = compositions, lengths, rows
        self.mark, self.follows, self.changed = object(), follows, changed

    @property
    def adapted(self) -> bool:
        """Whether any row is not the base's."""
        return any(self.compositions)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The rows without gaps, in order; adjacent equal compositions are one."""
        found: list[Segment] = []
        start = 0
        for composition, rows in zip(self.compositions, self.lengths, strict=True):
            components = tuple(Component(resident, float(weight)) for resident, weight in composition)
            if found and found[-1].same_composition(components):
                found[-1] = Segment(found[-1].start, found[-1].rows + rows, found[-1].components)
            else:
                found.append(Segment(start, rows, components))
            start += rows
        return tuple(found)

    def residents(self) -> Iterator[ResidentLike]:
        """Every version of the step, each slot once, in the order of first use."""
        return iter({r.slot: r for composition in self.compositions for r, _ in composition}.values())


LeaseT = TypeVar("LeaseT")


def split_rows(rows_of: Sequence[tuple[LeaseT, int]]) -> tuple[tuple[LeaseT, ...], tuple[int, ...]]:
    """(leases, rows) of a step's entries.

    Raises:
        Failed: REQUEST_INVALID for a step without entries, or an entry without a row.
    """
    if not rows_of:
        raise error(Code.REQUEST_INVALID, "step", "a step needs at least one (lease, rows) entry")
    leases, lengths = zip(*rows_of, strict=True)
    if set(map(type, lengths)) != {int} or min(lengths) < 1:
        _check_each(lengths)
    return leases, lengths


def _check_each(lengths: Sequence[object]) -> None:
    for index, rows in enumerate(lengths):
        if not isinstance(rows, int) or isinstance(rows, bool) or rows < 1:
            raise error(
                Code.REQUEST_INVALID, f"step[{index}].rows", f"{rows!r} is not a number of rows",
                "Give a whole number of 1 or more; leave out what has no rows.",
            )  # fmt: skip


class Planner:
    """Makes plans, and gives the last one again while the batch stands: a decoding batch does, for many steps.

    It holds the last plan's compositions, so that an equal one cannot be another that came to the same address;
    no lease, so that one that is dropped is found (I12). Not thread-safe: the engine's step lock guards it.
    """

    def __init__(self) -> None:
        self._standing = BatchPlan((), (), 0)

    def plan(self, leases: Sequence[LeaseLike | None], lengths: tuple[int, ...]) -> BatchPlan:
        """Of entries with which a step has begun: leases are ready, and their residents current (I13)."""
        found = [() if lease is None else lease.composition for lease in leases]
        standing = self._standing
        if len(found) != len(standing.compositions):
            self._standing = BatchPlan(_tuples(found, range(len(found))), lengths, sum(lengths))
            return self._standing
        changed = [*compress(range(len(found)), map(is_not, found, standing.compositions))]
        if not changed and lengths == standing.lengths:
            return standing
        compositions = _tuples(found, changed)
        if lengths == standing.lengths and compositions == standing.compositions:
            return standing  # other leases on the same
        self._standing = BatchPlan(compositions, lengths, sum(lengths), standing.mark, changed)
        return self._standing


def _tuples(found: list[Sequence[tuple[ResidentLike, float]]], which: Iterable[int]) -> tuple[Composition, ...]:
    """All of `found`, of which only `which` may be other sequences."""
    for index in which:
        if type(found[index]) is not tuple:
            found[index] = tuple(found[index])
    return tuple(found)  # type: ignore[arg-type]


def each_once(leases: tuple[LeaseT, ...]) -> Sequence[LeaseT]:
    """Each lease once, in the order of first use."""
    if len(set(map(id, leases))) == len(leases):
        return leases
    return list({id(lease): lease for lease in leases}.values())
