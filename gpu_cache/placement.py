"""How a lease that knows its versions comes to its room in VRAM: verified, in host memory, placed, ready.

Bytes come first, then room: what a lease wants is brought into host memory, and then takes its place in VRAM,
all of it at once or nothing. Where there is no room the lease lets go of the host's memory again and waits for
room alone (it is parked); once it has the room, the bytes are asked for anew, and are mostly still there. So who
waits for VRAM holds no host memory, who waits for host memory may hold VRAM, and no two can wait for each other.

Room is handed out by priority, then by age. A waiting lease may take what only leases behind it want, never what
a lease has a claim on (I12). So the first always gets on as leases are released.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from threading import Condition
from typing import TYPE_CHECKING, Protocol

from adapterd.gpu_cache.admission import inadmissible
from adapterd.gpu_cache.arrivals import Arrivals
from adapterd.gpu_cache.asking import Desk, Images
from adapterd.gpu_cache.claims import Claims
from adapterd.gpu_cache.host.interface import AtHand, Facts, Failure, Image, Origin
from adapterd.gpu_cache.host.records import claim_of
from adapterd.gpu_cache.lines import Lines
from adapterd.gpu_cache.pins import no_room_to_prefetch, too_much_kept
from adapterd.gpu_cache.records import Ask, Entry, LeaseRecord, LeaseState, Place, Purpose
from adapterd.gpu_cache.vram_tier import VramTier
from adapterd.loader.errors import Problem

if TYPE_CHECKING:
    from adapterd.loader.sources import Resolved


class PlacementOwner(Protocol):
    """Whom placement tells, with the cache's lock held."""

    def fail(self, record: LeaseRecord, problems: tuple[Problem, ...]) -> None: ...

    def tidy(self, entry: Entry) -> None: ...

    def move(self, record: LeaseRecord, state: LeaseState) -> None:
        """It is in that state now."""
        ...

    def ended(self, record: LeaseRecord) -> None:
        """One that ends by itself has what it was for."""
        ...


class Placement:
    """Methods need the cache's lock.

    Args:
        max_rank: of a composition.
        entries: those there are.
    """

    def __init__(
        self,
        max_rank: int,
        *,
        lock: Condition,
        desk: Desk,
        vram: VramTier,
        claims: Claims,
        arrivals: Arrivals,
        entries: Callable[[], Collection[Entry]],
        owner: PlacementOwner,
    ) -> None:
        self._max_rank, self._lock = max_rank, lock
        self._desk, self._vram, self._claims, self._arrivals = desk, vram, claims, arrivals
        self._entries, self._owner = entries, owner
        self.lines: Lines[LeaseRecord] = Lines()  # who waits for room in VRAM
        self.fresh: list[LeaseRecord] = []  # whose bytes came in since the last `advance`
        self.later = False  # set while `advance` would come at the wrong time
        self.due = False  # it was left out meanwhile: for the next look
        self.found: Counter[Origin | None] = Counter()  # where leases found what they wanted; None is VRAM

    def enter(self, record: LeaseRecord) -> None:
        """It waits for its entries from now on."""
        record.state = LeaseState.WAITING
        for entry in record.entries:
            if entry.place is Place.ABSENT:
                record.unseen.add(entry)
            else:
                self.found[None] += 1
            entry.waiting[record.seq] = record

    def proceed(self, record: LeaseRecord) -> None:
        """Does whatever can be done now for a lease that waits, but for room: that is handed out by `advance`."""
        if record.state is not LeaseState.WAITING:
            return
        vram = self._vram
        problem = inadmissible(record, vram.budget, vram.slot_shares, self._max_rank)
        problem = problem or too_much_kept(record, self._entries(), vram.budget, vram.slot_shares)
        if problem is not None:
            self._owner.fail(record, (problem,))
            return
        if not self._claims.hold(record):
            return
        missing = record.missing
        if not missing:
            self._grant(record)
        elif record.images or record.parked:
            self.lines.add(record)
        elif record.fetch is None:
            wanted = {entry: found for entry, found in record.claims if entry in missing}
            then = partial(self._fetched, record, list(wanted))
            record.fetch = self._desk.fetch(list(wanted.values()), record, then)

    def at_hand(self, record: LeaseRecord, here: AtHand) -> None:
        """The host holds for the lease's fetch what is not in VRAM: the lease takes its room now, if there is any."""
        images: dict[Entry, Image] = {}
        for entry, resolved in record.claims:
            found = _of(here, entry, resolved)
            if found is None:  # it is in VRAM
                continue
            image, facts = found
            problems = self._claims.known(entry, resolved, facts, here.trust_changes)
            if problems:
                self._owner.fail(record, problems)
                return
            if not entry.claimed:
                images[entry] = image
        self._note(record, images)
        if not self._next_in_turn(record):
            self._stand_by(record)
        elif not self._take_room(record, list(images)):
            self.proceed(record)
            if record.images:
                self._park(record)
        self._lock.notify_all()

    def advance(self) -> None:
        """Something came free, or came in: let those who wait for room try, in their order."""
        self.due = True  # until it is through: what an interrupt cuts short is for the next look
        if self.lines:
            self.lines.serve(self._place)
        for record in self.fresh:
            if record.images:  # no room, or somebody's turn comes first
                self._park(record)
        self.fresh.clear()
        self.due = False
        self._lock.notify_all()

    def stir(self) -> None:
        """`advance`, now or at the next look: perhaps of one who waits for a lease, and sleeps."""
        if self.later:
            self.due = True
            self._lock.notify_all()
        else:
            self.advance()

    def leave(self, record: LeaseRecord) -> None:
        """It waits for nothing any more."""
        self.lines.remove(record)
        self._let_go(record)

    def arrived(self, entry: Entry) -> None:
        """Its bytes are in VRAM."""
        self._vram.changes += 1
        for record in list(entry.holders.values()):
            self._settle(record)
        self._owner.tidy(entry)

    def _next_in_turn(self, record: LeaseRecord) -> bool:
        """Whether room is all that a user's lease on one version lacks, and nobody waits whose turn is before."""
        if self.lines or self.later or record.purpose is not Purpose.USE:
            return False
        one = len(record.entries) == len(record.images) == 1
        return one and record.entries[0].rank <= self._max_rank and self._claims.hold(record)

    def _place(self, record: LeaseRecord) -> bool:
        """Whether the lease waits for room no longer: all that it misses has some now, or it is verified again."""
        if not self._claims.hold(record):
            return True
        if not self._desk.readable(record.images.values()):  # their loader died meanwhile, and its slab was given back
            self._park(record)
        missing = record.missing
        brief = record.purpose.brief
        gives_way = brief and missing and len(self.lines) > 1  # others wait for room, too
        placed = not gives_way and self._take_room(record, missing)
        if brief and not placed:
            self._owner.fail(record, (no_room_to_prefetch(record),))
        return placed or brief

    def _take_room(self, record: LeaseRecord, missing: Sequence[Entry]) -> bool:
        """Whether there is room for what the lease is missing: then it has it, and the bytes come."""
        evicted = self._vram.make_room(record, missing) if missing else []
        if evicted is None:
            return False
        for entry in missing:
            self._vram.claim(entry)
        self._grant(record, missing)
        for entry in missing:
            for other in list(entry.waiting.values()):
                self.proceed(other)
        for entry in evicted:
            self._owner.tidy(entry)
        return True

    def _park(self, record: LeaseRecord) -> None:
        for entry, image in record.images.items():
            if image.origin is not Origin.HOST:
                entry.cold = image
        self._let_go(record)
        record.parked = True

    def _let_go(self, record: LeaseRecord) -> None:
        """Of what the host holds for the lease, or is about to."""
        self._desk.let_go(record.fetch)
        record.fetch, record.images = None, {}

    def _grant(self, record: LeaseRecord, claimed: Sequence[Entry] = ()) -> None:
        """From here on the lease pins (I12)."""
        self._owner.move(record, LeaseState.COPYING)
        self.lines.remove(record)
        self.found[None] += len(record.unseen)
        for entry in record.entries:
            del entry.waiting[record.seq]
            entry.holders[record.seq] = record
            entry.used = entry.used or not record.purpose.brief
        self._arrivals.bring(record, list(claimed))
        for entry in record.entries:
            self._owner.tidy(entry)
        self._settle(record)

    def _settle(self, record: LeaseRecord) -> None:
        assert record.components is not None
        if all(entry.copied for entry in record.entries):
            pairs = zip(record.entries, record.components, strict=True)
            record.residents = tuple((e.resident, c.weight) for e, c in pairs if e.resident is not None)
            record.state = LeaseState.READY
            if record.purpose.brief:
                self._owner.ended(record)
            self._lock.notify_all()

    def _fetched(self, record: LeaseRecord, entries: list[Entry], ask: Ask, outcome: Images | Failure) -> None:
        if record.fetch is not ask:
            return
        if isinstance(outcome, Failure):
            for entry in entries:
                entry.verified.clear()
            self._owner.fail(record, outcome.problems)
        else:
            self._brought(record, dict(zip(entries, outcome, strict=True)))

    def _brought(self, record: LeaseRecord, images: dict[Entry, Image]) -> None:
        self._note(record, images)
        if record.purpose is Purpose.TO_HOST:
            self._owner.ended(record)
        else:
            self._stand_by(record)

    def _note(self, record: LeaseRecord, images: dict[Entry, Image]) -> None:
        """What the lease's fetch has brought."""
        record.images = images
        for entry, image in images.items():
            self.found[image.origin] += entry in record.unseen
            record.unseen.discard(entry)

    def _stand_by(self, record: LeaseRecord) -> None:
        """Its bytes are here: it tries for room, in its turn."""
        self.fresh.append(record)
        self.proceed(record)
        self.stir()


def _of(here: AtHand, entry: Entry, resolved: Resolved) -> tuple[Image, Facts] | None:
    """What the host had at hand of that claim."""
    for image, found, facts in zip(here.images, here.resolved, here.facts, strict=True):
        if image.key == entry.key and claim_of(found) == claim_of(resolved):
            return image, facts
    return None
