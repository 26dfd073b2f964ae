"""What operators, routers and registries do to the cache of a machine, beside leases and steps: pauses, revocations,
pins, prefetches, evictions, draining, routes. A part of `cache_machine`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from adapterd.gpu_cache import AdapterCache, Lease
from adapterd.gpu_cache.events import AliasMoved, KeyRevoked, Quarantined, Yanked
from adapterd.gpu_cache.pins import KeptLease
from adapterd.gpu_cache.records import LeaseRecord
from adapterd.gpu_cache.revocation import Revocation
from adapterd.gpu_cache.routes import Route
from adapterd.loader.errors import AdapterdError, Code
from fakes.adapters import Published, tag
from machines.books import Books
from machines.flaky import FlakyDevice
from machines.rows import WORDS

SIZES = {f"{tenant}/a{i}": 1 + (2 * i) % 5 for tenant in ("acme", "blue", "core") for i in range(4)}
NAMES = st.sampled_from(sorted(SIZES))
PRIORITIES = st.sampled_from([0, 0, 0, 1, -1])
MOST = 3
"""Revocations, pins and routes at a time: more would leave nothing to do for the others."""


@dataclass(eq=False)
class User:
    """A lease, and what it must become: the weight of every adapter, and the versions that it may get."""

    lease: Lease
    weights: dict[str, float]
    versions: set[str]


class Operators(RuleBasedStateMachine):
    """Its world, books and users are those of `CacheMachine`."""

    cache: AdapterCache
    device: FlakyDevice
    books: Books
    early: bool
    users: list[User]
    published: list[Published]
    versions: dict[str, Published]

    def begin_operations(self) -> None:
        self.revoked: list[Revocation] = []
        self.struck: dict[int, int] = {}
        """Pages that revoked versions had in VRAM, and what they held: nobody may find that there again."""
        self.pins: dict[str, KeptLease] = {}
        self.routes: dict[str, Route] = {}
        self.draining = False

    # Pauses

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def pause(self, data: st.DataObject) -> None:
        """It holds nothing from now on, and remembers what it is on."""
        user = self.users[data.draw(index(self.users))]
        self.remember(user)
        live = user.lease.record.live
        user.lease.pause()
        assert user.lease.paused is live
        assert not live or not self.books.holds(user.lease.record)

    @precondition(lambda self: any(user.lease.paused for user in self.users))
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        paused = [user.lease for user in self.users if user.lease.paused]
        lease = paused[data.draw(index(paused))]
        with self.device.serving():
            lease.resume()
        assert not lease.paused

    def remember(self, user: User) -> None:
        """The very same versions, whatever its names come to mean."""
        user.versions |= {found.version_digest for found in user.lease.record.resolved}

    # Revocations

    @precondition(lambda self: not self.early and len(self.revoked) < MOST)
    @rule(data=st.data(), by=st.sampled_from(["digest", "digest", "number", "name", "key", "told", "key told"]))
    def revoke(self, data: st.DataObject, by: str) -> None:
        version = data.draw(st.sampled_from(self.published[-2 * len(SIZES) :]))
        found = version.resolved
        tenant, name, number = found.tenant, found.adapter, found.version_number
        revocation, event = {
            "digest": (Revocation(tenant, version.digest), None),
            "number": (Revocation(tenant, adapter=name, version_number=number), None),
            "name": (Revocation(tenant, adapter=name), None),
            "key": (Revocation(tenant, key_id=version.publisher), None),
            "told": (
                Revocation(tenant, version.digest, name, number),
                Quarantined(tenant, name, number, version.digest),
            ),
            "key told": (
                Revocation(tenant, key_id=version.publisher),
                KeyRevoked(tenant, version.publisher or ""),
            ),
        }[by]
        if revocation in self.revoked:
            return
        self.strike(revocation)
        with self.device.serving():
            if event is None:
                self.cache.revoke(revocation)
            else:
                self.cache.heed(event)
        self.revoked.append(revocation)
        self.nobody_is_on_it(revocation)

    def strike(self, revocation: Revocation) -> None:
        for resident in self.books.residents:
            if self.is_about(revocation, resident.key.tenant, resident.key.digest):
                self.struck |= {page: tag(resident.key.digest, i) for i, page in enumerate(resident.pages)}

    def nobody_is_on_it(self, revocation: Revocation) -> None:
        """A step that begins with such a lease is told the reason."""
        for user in self.users:
            record = user.lease.record
            on_it = [r for r in record.resolved if self.is_about(revocation, record.tenant, r.version_digest)]
            if not on_it or record.base != self.cache.base.pin:
                continue
            used = {component.key.digest for component in record.components or ()}
            # A key is known once the version is verified; what counts for nothing (weight 0) never is.
            verified = not record.queued and any(r.version_digest in used for r in on_it)
            known = revocation.key_id is None or verified
            assert user.lease.failed or not known
            if user.lease.failed:
                self.is_refused(user.lease)

    def is_refused(self, lease: Lease) -> None:
        in_flight = self.cache.statistics().steps_in_flight
        try:
            self.cache.begin_step([lease])
        except AdapterdError as refused:
            assert lease.problem is not None
            assert refused.code is lease.problem.code
            assert self.cache.statistics().steps_in_flight == in_flight
        else:
            raise AssertionError("a step began with a lease that has failed")

    @precondition(lambda self: self.revoked)
    @rule(data=st.data())
    def reinstate(self, data: st.DataObject) -> None:
        revocation = self.revoked.pop(data.draw(index(self.revoked)))
        assert self.cache.reinstate(revocation)
        assert not self.cache.reinstate(revocation)
        self.struck.clear()  # it may come back to where it was

    def is_about(self, revocation: Revocation, tenant: str, digest: str) -> bool:
        """Each version has one name and one key here."""
        version = next(v for v in self.published if v.digest == digest)
        claim = version.resolved.adapter, version.resolved.version_number
        return revocation.tenant == tenant and revocation.fits(digest, claim, version.publisher)

    def is_revoked(self, tenant: str, digest: str) -> bool:
        return any(self.is_about(revocation, tenant, digest) for revocation in self.revoked)

    @invariant()
    def what_was_revoked_is_served_to_nobody(self) -> None:
        for user in getattr(self, "users", ()):
            if user.lease.ready:
                for resident, _ in user.lease.composition:
                    assert not self.is_revoked(resident.key.tenant, resident.key.digest)

    def revoked_bytes_are_gone(self) -> None:
        """Once nothing is in flight. What the device refused to zero is never used again."""
        words, lost = self.cache.arena.view(torch.int64).view(-1, WORDS), self.books.lost
        for page, was in self.struck.items():
            assert page in lost or not bool((words[page] == was).any()), f"page {page} holds what was revoked"

    # What the cache holds by itself

    @rule(name=NAMES, to=st.sampled_from(["vram", "vram", "host"]))
    def prefetch(self, name: str, to: str) -> None:
        served = self.served()
        with self.device.serving():
            self.cache.prefetch(name, tenant=name.partition("/")[0], to=to)  # type: ignore[arg-type]
        assert all(map(self.books.all_current, served)), "somebody had to go for a prefetch"

    @precondition(lambda self: len(self.pins) < MOST)
    @rule(name=NAMES)
    def pin(self, name: str) -> None:
        with self.device.serving():
            pin = self.cache.pin(name, tenant=name.partition("/")[0])
        if not self.draining or name in self.pins:
            self.pins[name] = pin
        else:
            assert code_of(pin) is Code.CACHE_DRAINING
            assert self.cache.unpin(name, tenant=pin.tenant)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.pins)))
        pin = self.pins.pop(name)
        assert self.cache.unpin(name, tenant=pin.tenant)
        assert not self.cache.unpin(name, tenant=pin.tenant)
        assert not self.books.holds(pin.record)

    @invariant()
    def pins_are_kept(self) -> None:
        if not hasattr(self, "pins"):
            return
        assert {pin.ref.partition(":")[0] for pin in self.cache.pins()} == set(self.pins)
        for pin in self.pins.values():
            if pin.ready:
                assert self.books.all_current(pin.record)
                assert not any(self.is_revoked(pin.tenant, r.version_digest) for r in pin.record.resolved)

    @precondition(lambda self: not self.early)
    @rule(name=NAMES, pinned=st.booleans())
    def evict(self, name: str, pinned: bool) -> None:
        """Only what nobody is on; and then it is gone."""
        version, tenant = self.versions[name], name.partition("/")[0]
        served = self.served()
        before = {row.digest for row in self.cache.residency()}
        try:
            with self.device.serving():
                freed = self.cache.evict(version.pinned if pinned else name, tenant=tenant)
        except AdapterdError as refused:
            assert refused.code in {Code.NOT_FOUND, Code.ADAPTER_IN_USE}
        else:
            gone = before - {row.digest for row in self.cache.residency()}
            assert len(gone) <= 1 <= freed
            assert not pinned or gone <= {version.digest}
        assert all(map(self.books.all_current, served)), "somebody was on it"

    def served(self) -> list[LeaseRecord]:
        """What must stay, whatever else goes: leases and pins that are ready, and not dropped."""
        self.cache.pump()
        return [lease.record for lease in (*(u.lease for u in self.users), *self.pins.values()) if lease.ready]

    @rule(on=st.sampled_from([False, False, False, True]))
    def drain_or_not(self, on: bool) -> None:
        """Pins are over, and do not come back."""
        self.draining = on and not self.draining
        self.cache.drain(self.draining)
        if self.draining:
            self.pins.clear()
        assert self.cache.draining is self.draining

    # Routes

    @precondition(lambda self: len(self.routes) < MOST)
    @rule(name=NAMES)
    def follow(self, name: str) -> None:
        if name not in self.routes:
            self.routes[name] = self.cache.route(name, tenant=name.partition("/")[0])

    @precondition(lambda self: self.routes)
    @rule(data=st.data(), priority=PRIORITIES)
    def acquire_by_a_route(self, data: st.DataObject, priority: int) -> None:
        """It is the current version if there is one: ready, unless the worker drains."""
        name = data.draw(st.sampled_from(sorted(self.routes)))
        route = self.routes[name]
        route.state  # noqa: B018 - a step boundary, if no step is in flight: the next one moves nothing
        current = self.books.current(route)
        with self.device.serving():
            lease = route.acquire(priority=priority)
        self.users.append(User(lease, {name: 1.0}, set() if current is None else {current}))
        if self.draining:
            assert code_of(lease) is Code.CACHE_DRAINING

    @rule(name=NAMES, what=st.sampled_from(["moved", "moved", "yanked"]))
    def the_registry_tells(self, name: str, what: str) -> None:
        found = self.versions[name].resolved
        if what == "moved":
            self.cache.heed(AliasMoved(found.tenant, found.adapter, "default"))
        else:
            self.cache.heed(Yanked(found.tenant, found.adapter, found.version_number, found.version_digest))
            route = self.routes.get(name)
            assert route is None or self.books.current(route) != found.version_digest

    @precondition(lambda self: self.routes)
    @rule(data=st.data())
    def follow_no_more(self, data: st.DataObject) -> None:
        route = self.routes.pop(data.draw(st.sampled_from(sorted(self.routes))))
        route.close()
        route.close()
        assert self.books.current(route) is None

    @invariant()
    def what_routes_serve_is_there(self) -> None:
        for name, route in getattr(self, "routes", {}).items():
            current = self.books.current(route)
            if current is not None:
                assert not self.draining
                assert not self.is_revoked(name.partition("/")[0], current)
                assert route.main.current is not None
                assert self.books.all_current(route.main.current)

    def end_operations(self) -> None:
        for name, pin in self.pins.items():
            assert self.cache.unpin(name, tenant=pin.tenant)
        for route in self.routes.values():
            route.close()
        self.pins.clear()
        self.routes.clear()
        self.draining = False
        self.cache.drain(False)


def code_of(lease: Lease) -> Code | None:
    return None if lease.problem is None else lease.problem.code


def index(items: list[object]) -> st.SearchStrategy[int]:
    """Hypothesis keeps what strategies are made of: with leases in them, a dropped one would live on."""
    return st.integers(0, len(items) - 1)
