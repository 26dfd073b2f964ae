"""A cache whose state a test writes down, for the daemon."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from adapterd.gpu_cache import CacheConfig, CacheStatistics, LeaseState, Place, TenantBudget
from adapterd.gpu_cache.host.interface import Origin, Progress
from adapterd.gpu_cache.records import Cause
from adapterd.loader.errors import Code, Problem, error
from adapterd.loader.identity import Ref, VersionKey, sha256_hex

from .adapters import make_base

PAGE = 1 << 20


@dataclass(frozen=True, slots=True)
class Row:
    """As of `served.ResidenceRow`."""

    tenant: str
    digest: str
    adapters: tuple[str, ...] = ("a",)
    tier: Place = Place.RESIDENT
    bytes: int = PAGE
    rank: int = 8
    generation: int | None = 1
    pinned: bool = False
    leases: int = 0
    priority: int = 0


def row(tenant: str, name: str, **fields: object) -> Row:
    return replace(Row(tenant, sha256_hex(name.encode()), (name,)), **fields)  # type: ignore[arg-type]


@dataclass(slots=True)
class FakeKept:
    """As of `served.Kept`."""

    ready: bool = False
    problems: tuple[Problem, ...] = ()


class FakeServed:
    """A `Served`. What is called `known` is there at once, `slow` when the test sets `kept`, nothing else ever.

    `calls` lists what it was asked for; with `broken` set, every look at it fails with that.
    """

    def __init__(self, **settings: object) -> None:
        tenants = {"acme": TenantBudget(guaranteed_vram_bytes=2 * PAGE, max_vram_bytes=6 * PAGE)}
        self.config = CacheConfig(vram_bytes=8 * PAGE, host_bytes=8 * PAGE, tenants=tenants)
        self.base = make_base()
        self.rows: tuple[Row, ...] = ()
        self.calls: list[str] = []
        self.threads: set[str] = set()
        self.broken: Exception | None = None
        self.draining = False
        self.kept = FakeKept()
        self._tiers: dict[tuple[str, str], Place] = {}
        self._changes = 0
        self.loads = {Origin.HOST: 2, Origin.SOURCE: 1}
        self.under_way: dict[VersionKey, Progress] = {}

    @property
    def drained(self) -> bool:
        return self.draining and not any(r.leases for r in self.rows)

    @property
    def residency_version(self) -> int:
        """Grows when a row's tier changes."""
        if self.broken is not None:
            raise self.broken
        tiers = {(r.tenant, r.digest): r.tier for r in self.rows}
        if tiers != self._tiers:
            self._tiers = tiers
            self._changes += 1
        return self._changes

    def pump(self) -> None:
        self._note("pump")

    def loading(self) -> dict[VersionKey, Progress]:
        return self.under_way

    def statistics(self) -> CacheStatistics:
        self._note("statistics")
        if self.broken is not None:
            raise self.broken
        vram = self._bytes(Place.RESIDENT, Place.STAGING)
        host = self._bytes(Place.HOST)
        return CacheStatistics(
            vram_bytes=vram,
            host_bytes=host,
            vram_free_bytes=self.config.vram_bytes - sum(vram.values()),
            host_free_bytes=self.config.host_bytes - sum(host.values()),
            adapters={place: sum(r.tier is place for r in self.rows) for place in Place},
            leases=dict.fromkeys(LeaseState, 0) | {LeaseState.WAITING: 3, LeaseState.RELEASED: 9},
            leaked_leases=1,
            hits=7,
            host_hits=2,
            misses=1,
            origins={origin: self.loads.get(origin, 0) for origin in Origin},
            loads={origin: self.loads.get(origin, 0) for origin in Origin},
            load_seconds={"cold": {"verify": 0.5, "copy": 0.25}, "steady": {"copy": 0.125}},
            copied_bytes=3 * PAGE,
            evictions={cause: 4 if cause is Cause.ROOM else 0 for cause in Cause},
            steps_in_flight=1,
            policy_faults=5,
            pinned_adapters=sum(r.pinned for r in self.rows),
        )

    def residency(self) -> Sequence[Row]:
        self._note("residency")
        if self.broken is not None:
            raise self.broken
        return self.rows

    def prefetch(self, ref: str, *, tenant: str, to: Literal["vram", "host"] = "vram") -> FakeKept:
        return self._keep(f"prefetch {ref} {to}", ref, tenant)

    def pin(self, ref: str, *, tenant: str) -> FakeKept:
        return self._keep(f"pin {ref}", ref, tenant)

    def unpin(self, ref: str, *, tenant: str) -> bool:
        self._ask(f"unpin {ref}", ref, tenant)
        return True

    def evict(self, ref: str, *, tenant: str) -> int:
        self._ask(f"evict {ref}", ref, tenant)
        return PAGE

    def drain(self, on: bool) -> None:
        self._note(f"drain {on}")
        self.draining = on

    def _ask(self, call: str, ref: str, tenant: str) -> None:
        self._note(call)
        asked = Ref.parse(ref)
        assert asked.tenant == tenant
        if asked.name != "known":
            raise error(Code.NOT_FOUND, ref, "there is no such adapter")

    def _keep(self, call: str, ref: str, tenant: str) -> FakeKept:
        if Ref.parse(ref).name == "slow":
            self._note(call)
        else:
            self._ask(call, ref, tenant)
        self.kept = FakeKept(Ref.parse(ref).name == "known")
        return self.kept

    def _note(self, call: str) -> None:
        self.calls.append(call)
        self.threads.add(threading.current_thread().name)

    def _bytes(self, *tiers: Place) -> dict[str, int]:
        found: dict[str, int] = {}
        for each in self.rows:
            if each.tier in tiers:
                found[each.tenant] = found.get(each.tenant, 0) + each.bytes
        return found
