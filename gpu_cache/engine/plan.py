"""From leases and row counts to segments: what one step has to do, decided before the model runs.

A step's rows are the flattened leading dimensions of every wrapped layer's input, in order. A segment
is a run of rows that share one composition; neighbours with equal compositions are merged, because the
reference works segment by segment: a scheduler that sorts its rows by lease gets fewer, larger products.
Nothing of a plan lives on the device, so making one never waits for it (I13).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from adapterd.loader.errors import Code, error

if TYPE_CHECKING:
    from torch import Tensor

    from adapterd.gpu_cache.device import Device
    from adapterd.loader.base_model import BaseSpec
    from adapterd.loader.identity import VersionKey
    from adapterd.loader.layout import Layout
    from adapterd.loader.manifest import Manifest


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


class LeaseLike(Protocol):
    """One user's hold. `composition` is normalised (ARCHITECTURE, Vocabulary), empty for the base, known once ready."""

    @property
    def composition(self) -> Sequence[tuple[ResidentLike, float]]: ...


class Ticket(Protocol):
    """What a step holds of the cache: its residents stay where they are until `end`."""

    def end(self) -> None:
        """Record the fence of this step; called once."""


L_contra = TypeVar("L_contra", contravariant=True)


class CacheSizes(Protocol):
    """What the kernels' tables are sized by: slots, bytes of a page, and the packed dtype or `auto`."""

    @property
    def max_residents(self) -> int: ...
    @property
    def page_bytes(self) -> int: ...
    @property
    def dtype(self) -> str: ...


class ServingCache(Protocol[L_contra]):
    """The little that the engine needs of a cache. `L_contra` is a lease, or None for the base.

    `config` and `device` are asked for only where kernels run.
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
        if len(mine) != len(components) or (mine and mine[0].resident.slot != components[0].resident.slot):
            return False
        return all(a.identity == b.identity for a, b in zip(mine, components, strict=True))


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One step: `rows` rows, cut into segments without gaps, in order."""

    rows: int
    segments: tuple[Segment, ...]

    def residents(self) -> Iterator[ResidentLike]:
        """Every version of the step, each slot once, in the order of first use."""
        seen: set[int] = set()
        for segment in self.segments:
            for component in segment.components:
                if component.resident.slot not in seen:
                    seen.add(component.resident.slot)
                    yield component.resident


Rows = Sequence[tuple[LeaseLike | None, int]]


def check_rows(rows_of: Sequence[tuple[object, int]]) -> None:
    """Raises Failed (REQUEST_INVALID) for a step without entries, or an entry without a row."""
    if not rows_of:
        raise error(Code.REQUEST_INVALID, "step", "a step needs at least one (lease, rows) entry")
    for index, (_, rows) in enumerate(rows_of):
        if not isinstance(rows, int) or isinstance(rows, bool) or rows < 1:
            raise error(
                Code.REQUEST_INVALID, f"step[{index}].rows", f"{rows!r} is not a number of rows",
                "Give a whole number of 1 or more; leave out what has no rows.",
            )  # fmt: skip


def build_plan(rows_of: Rows) -> BatchPlan:
    """Segments of checked entries whose leases are ready; adjacent equal compositions become one."""
    segments: list[Segment] = []
    known: dict[int, tuple[Component, ...]] = {}
    start = 0
    last: Segment | None = None
    for lease, rows in rows_of:
        components = known.get(id(lease))
        if components is None:
            components = known[id(lease)] = _components(lease)
        if last is not None and (components is last.components or last.same_composition(components)):
            last = segments[-1] = Segment(last.start, last.rows + rows, components)
        else:
            last = Segment(start, rows, components)
            segments.append(last)
        start += rows
    return BatchPlan(start, tuple(segments))


def _components(lease: LeaseLike | None) -> tuple[Component, ...]:
    if lease is None:
        return ()
    return tuple([Component(resident, float(weight)) for resident, weight in lease.composition])
