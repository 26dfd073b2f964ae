"""What a worker hears from its loaders: answers to its requests, facts by number, and where the slab stands.

This is Python that runs beside decode, so nothing is decoded before somebody needs it, and nothing twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from adapterd.gpu_cache.host.interface import Facts, Failure, HostUsage, Image, Progress
from adapterd.gpu_cache.host.process.books import Books, Pending
from adapterd.gpu_cache.host.process.facts import facts_from_bytes, loading_from_bytes, usage_from_bytes
from adapterd.gpu_cache.host.process.frames import Frame, Garbled
from adapterd.gpu_cache.host.process.messages import (
    Failed,
    Fetched,
    Known,
    Loading,
    Packed,
    Pong,
    Refusal,
    ResolvedAll,
    TrustChanged,
    Usage,
    Verified,
    WantTable,
    Welcome,
    from_loader,
)
from adapterd.gpu_cache.host.process.page_runs import RUN_BYTES, pages_of
from adapterd.gpu_cache.host.process.slab import SharedSlab
from adapterd.loader.errors import Problem, error_from
from adapterd.loader.identity import VersionKey

_LOG = logging.getLogger(__name__)

T = TypeVar("T")


class Hearing:
    """`begin` and `take` are for one thread at a time; the rest is for any.

    Args:
        books: of what was asked.
        worked: called with each answer.

    Attributes:
        slab: of the loader that spoke last; None before the first.
        pushes: how often what was verified before may have ceased to hold.
    """

    def __init__(self, books: Books, worked: Callable[[], None]) -> None:
        self._books, self._worked = books, worked
        self.slab: SharedSlab | None = None
        self.pushes = 0
        self._facts: dict[int, Facts | bytes] = {}
        self._usage: bytes | HostUsage = HostUsage({}, 0, {})
        self._loading: bytes | Mapping[VersionKey, Progress] = {}

    def begin(self, slab: SharedSlab) -> None:
        """Another loader: it knows nothing of what the last one said, and has verified nothing."""
        self._facts.clear()
        self.pushes += self.slab is not None
        self.slab, self._usage, self._loading = slab, HostUsage({}, len(slab.memory), {}), {}

    def take(self, frame: Frame) -> bool:
        """Whether it was an answer. Raises Garbled; AdapterdError if the loader refuses this worker."""
        message = from_loader(frame)
        match message:
            case Known(number, drop, body):
                for dropped in drop:
                    self._facts.pop(dropped, None)
                self._facts[number] = body
            case ResolvedAll(number, resolved):
                self._answer(number, resolved, holds=False)
            case Verified(number, facts, publisher):
                self._answer(number, replace(self._facts_of(facts), publisher=publisher or None), holds=True)
            case Fetched(number, images, runs):
                self._answer(number, self._images(images, runs), holds=True)
            case Failed(number, problems):
                self._answer(number, _failure(problems), holds=False)
            case TrustChanged():
                self.pushes += 1
            case Usage(body):
                self._usage = body
            case Loading(body):
                self._loading = body
            case Pong():
                pass  # that anything was heard is what counts
            case Refusal(problems):
                raise error_from(_failure(problems).problems)
            case Welcome() | WantTable():
                raise Garbled(f"{type(message).__name__} in the middle of a conversation")
        return isinstance(message, ResolvedAll | Verified | Fetched | Failed)

    def usage(self) -> HostUsage:
        """As of the loader's last word."""
        usage = self._usage
        if isinstance(usage, bytes):
            usage = self._usage = _read(usage_from_bytes, usage, HostUsage({}, 0, {}))
        return usage

    def loading(self) -> Mapping[VersionKey, Progress]:
        """As of the loader's last word."""
        loading = self._loading
        if isinstance(loading, bytes):
            loading = self._loading = _read(loading_from_bytes, loading, dict[VersionKey, Progress]())
        return loading

    def _facts_of(self, number: int) -> Facts:
        """Decoded when they are first needed, once a version and loader."""
        found = self._facts.get(number)
        if found is None:
            raise Garbled(f"facts {number} were never told")
        if isinstance(found, bytes):
            found = self._facts[number] = facts_from_bytes(found)
        return found

    def _images(self, images: Sequence[Packed], runs: bytes) -> tuple[Image, ...]:
        found, begin = [], 0
        for packed in images:
            end = begin + max(0, packed.runs) * RUN_BYTES
            found.append(self._image(packed, runs[begin:end]))
            begin = end
        if begin != len(runs):
            raise Garbled("the images have other runs of pages than came with them")
        return tuple(found)

    def _image(self, packed: Packed, runs: bytes) -> Image:
        slab = self.slab
        assert slab is not None, "a conversation has begun"
        facts = self._facts_of(packed.facts)
        layout = facts.layout
        if layout.page_bytes != slab.page_bytes:
            raise Garbled("an image has other pages than the slab")
        pages = pages_of(runs, layout.n_pages, len(slab.memory) // slab.page_bytes)
        return Image(packed.key, slab, facts.manifest, layout, pages, packed.origin, dict(packed.seconds))

    def _answer(self, number: int, outcome: object, *, holds: bool) -> None:
        pending = self._books.answered(number, self.slab if holds else None)
        self._worked()
        if pending is not None:
            try:
                settle(pending, outcome)
            except KeyboardInterrupt:  # it may have been told nothing yet, so it is asked again
                self._books.again(number, pending, holds=holds)
                raise


def settle(pending: Pending, outcome: object) -> None:
    """Tells who asked. Raises nothing but an interrupt of this thread."""
    try:
        pending.settle(outcome)
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - a caller's bug; the others are told all the same
        _LOG.exception("an answer of the host was not taken")


def _failure(problems: tuple[Problem, ...]) -> Failure:
    if not problems or problems[0].severity != "reject":
        raise Garbled("a failure without a reason")
    return Failure(problems)


def _read(decode: Callable[[bytes], T], told: bytes, nothing: T) -> T:
    try:
        return decode(told)
    except Garbled as e:
        _LOG.error("what the loader says of its slab cannot be read: %s", e)
        return nothing
