"""How a lease comes to know its versions: from what is here, what the host has at hand, or what the source answers.

The first that can say it does, and only what is not here is asked for. Then the lease waits for these versions, or is
refused them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from adapterd.gpu_cache.admission import short_cut
from adapterd.gpu_cache.asking import Desk
from adapterd.gpu_cache.composition import Component, normalise
from adapterd.gpu_cache.host.interface import AtHand, Failure, Image
from adapterd.gpu_cache.placement import Placement
from adapterd.gpu_cache.records import Ask, Entry, LeaseRecord, Purpose
from adapterd.gpu_cache.remembered import Remembered
from adapterd.gpu_cache.residency import Ledger
from adapterd.gpu_cache.revocation import Refusals
from adapterd.gpu_cache.shelf import Shelf
from adapterd.gpu_cache.warm import Meaning
from adapterd.loader.errors import AdapterdError, Problem
from adapterd.loader.identity import VersionKey

if TYPE_CHECKING:
    from adapterd.loader.identity import Ref
    from adapterd.loader.sources import Resolved


class VersionsOwner(Protocol):
    """Whom it tells, with the cache's lock held."""

    def fail(self, record: LeaseRecord, problems: tuple[Problem, ...]) -> None: ...

    def touch(self, entries: Sequence[Entry]) -> None:
        """They are used now."""
        ...


class Versions:
    """Methods need the cache's lock."""

    def __init__(
        self,
        desk: Desk,
        shelf: Shelf,
        ledger: Ledger,
        remembered: Remembered,
        refusals: Refusals,
        placement: Placement,
        owner: VersionsOwner,
    ) -> None:
        self._desk, self._shelf, self._ledger, self._remembered = desk, shelf, ledger, remembered
        self._refusals, self._placement, self._owner = refusals, placement, owner

    def seek(self, record: LeaseRecord, meaning: Meaning | None) -> None:
        """Without asking anybody outside; a lease whose versions are not known then is `RESOLVING` still.

        Args:
            meaning: what the same wish came to the last time, if that is known.
        """
        refs = [asked.ref for asked in record.asked]
        if meaning is not None and self._returns(record, meaning):
            return
        known = record.resolved or short_cut(record.asked, record.tenant, record.base, self._shelf.entries)
        if known is not None:
            self._attach(record, known)
        elif (here := self._at_hand(record, refs)) is not None:
            self._attach(record, here.resolved, here)
        elif (remembered := self._remembered.resolved(refs, record.tenant, record.base)) is not None:
            self._attach(record, remembered)

    def ask(self, record: LeaseRecord) -> None:
        """Has the host look up what it names."""
        refs = [asked.ref for asked in record.asked]
        record.lookup = self._desk.resolve(refs, record.tenant, partial(self._resolved, record))

    def _returns(self, record: LeaseRecord, meaning: Meaning) -> bool:
        """Whether the host has at hand what it meant the last time."""
        here = self._at_hand(record, meaning.resolved)
        if here is not None:
            self._attach(record, here.resolved, here, meaning.components)
        return here is not None

    def _attach(
        self,
        record: LeaseRecord,
        found: Sequence[Resolved],
        here: AtHand | None = None,
        components: tuple[Component, ...] = (),
    ) -> None:
        """The lease knows its versions now; `here`, if that is how, and what they come to, if that is known."""
        keys = [c.key for c in components] or _keys(record, found, () if here is None else here.images)
        if not self._enter(record, found, keys, components):
            return
        if here is None and (missing := record.missing):
            here = self._at_hand(record, [each for entry, each in record.claims if entry in missing])
        if here is None:
            self._placement.proceed(record)
        else:
            self._placement.at_hand(record, here)

    def _at_hand(self, record: LeaseRecord, wanted: Sequence[Ref] | Sequence[Resolved]) -> AtHand | None:
        """If the host has all of it at hand, the lease's fetch is done with that."""
        found = None if record.purpose is Purpose.TO_HOST else self._desk.at_hand(wanted, record.tenant)
        if found is None:
            return None
        record.fetch, here = found
        return here

    def _enter(
        self,
        record: LeaseRecord,
        found: Sequence[Resolved],
        keys: Sequence[VersionKey],
        components: tuple[Component, ...],
    ) -> bool:
        """Whether it may be had: then the lease waits for these versions."""
        record.resolved = tuple(found)
        for key, each in zip(keys, found, strict=True) if self._refusals else ():
            refusal = self._refusals.refusal(each, self._ledger.publisher(key, each))
            if refusal is not None:
                self._owner.fail(record, (refusal,))
                return False
        try:
            record.components = components or normalise(zip(keys, (a.weight for a in record.asked), strict=True))
        except AdapterdError as failure:
            self._owner.fail(record, failure.problems)
            return False
        chosen = {c.key: self._shelf.entry(c.key) for c in record.components}
        record.entries = tuple(chosen.values())
        record.claims = tuple([(chosen[key], each) for key, each in zip(keys, found, strict=True) if key in chosen])
        self._placement.enter(record)
        self._owner.touch(record.entries)
        return True

    def _resolved(self, record: LeaseRecord, ask: Ask, outcome: tuple[Resolved, ...] | Failure) -> None:
        if record.lookup is not ask or not record.live:
            return
        record.lookup = None
        if isinstance(outcome, Failure):
            self._owner.fail(record, outcome.problems)
            return
        for asked, found in zip(record.asked, outcome, strict=True):
            self._ledger.named(asked.ref, VersionKey(record.tenant, record.base, found.version_digest))
        self._attach(record, outcome)


def _keys(record: LeaseRecord, found: Sequence[Resolved], images: Sequence[Image]) -> list[VersionKey]:
    """One a version. Where the host's is equal it is the host's own: to find equal objects takes longer."""
    keys = [VersionKey(record.tenant, record.base, each.version_digest) for each in found]
    if len(images) < len(keys):
        return keys
    return [image.key if image.key == key else key for image, key in zip(images, keys, strict=True)]
