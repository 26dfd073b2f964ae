"""The arena's pages: which are free, who had them last, and after which marks they may be overwritten.

A page belongs to one adapter. Any free pages serve, so nothing fragments: `take` fails only when fewer
pages are free than wanted (I15). They are handed out as aligned pairs where possible, because lone 1 MiB
pages spread over a large arena cost up to 7 % in the TLB; the odd page closes an adapter. Oldest freed
first, because its fence has most likely been passed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, repeat
from operator import is_, itemgetter, sub
from typing import NamedTuple

from adapterd.gpu_cache.device import Run
from adapterd.gpu_cache.fences import OPEN, Fence


class Allotment(NamedTuple):
    """Pages for one adapter.

    Attributes:
        pages: page numbers; aligned pairs first, in ascending order, lone pages last.
        fence: what the copy stream must wait for before it writes any of them.
        scrub: those of `pages` that another tenant had last; they are zeroed first (I10).
    """

    pages: tuple[int, ...]
    fence: Fence
    scrub: tuple[int, ...]


@dataclass(slots=True)
class _Freed:
    """Pages that came free together, from `at` on.

    Attributes:
        tenants: who had each page last.
        fence: of all of them.
        apart: the fence of each, if they are two pages that came free one by one.
    """

    pages: tuple[int, ...]
    tenants: tuple[str | None, ...]
    fence: Fence
    apart: tuple[Fence, Fence] | None = None
    at: int = 0

    def take(self, most: int) -> _Freed:
        """The next pages of it, up to so many."""
        begin, self.at = self.at, min(len(self.pages), self.at + most)
        return _Freed(self.pages[begin : self.at], self.tenants[begin : self.at], self.fence, self.apart)

    @property
    def over(self) -> bool:
        return self.at == len(self.pages)


class PagePool:
    """Free and used pages of one arena. Guarded by the cache's lock; touches no memory itself.

    What comes free together stays together, so that adapters of one size follow each other at no cost a page.
    """

    def __init__(self, count: int) -> None:
        paired = count - count % 2
        self._freed = deque([_Freed(tuple(range(paired)), (None,) * paired, OPEN)] if paired else [])  # oldest first
        self._lone: dict[int, tuple[str | None, Fence]] = {}  # free, the partner is not; oldest first
        if count % 2:
            self._lone[paired] = None, OPEN
        self._used: dict[int, tuple[tuple[int, ...], int, str]] = {}  # by first page: pages, how many in pairs, whose
        self._last: tuple[tuple[int, ...], int, str, Fence] | None = None  # came free, and is nowhere else yet
        self.count = self.free = count

    def take(self, wanted: int, tenant: str) -> Allotment | None:
        """`wanted` ≥ 1 free pages for `tenant`, or None when fewer are free."""
        if wanted > self.free:
            return None
        if self._last is not None and len(self._last[0]) == wanted == self.free:
            return self._hand_over(self._last, tenant)
        self._put_away()
        pieces = self._take_pairs(wanted - wanted % 2)
        paired = sum([len(piece.pages) for piece in pieces])
        pieces += self._take_lone(wanted - paired)
        pages, tenants = pieces[0].pages, pieces[0].tenants
        if len(pieces) > 1:
            pages = tuple([page for piece in pieces for page in piece.pages])
            tenants = tuple([each for piece in pieces for each in piece.tenants])
        scrub: tuple[int, ...] = ()
        if not {tenant, None}.issuperset(tenants):
            scrub = tuple([page for page, last in zip(pages, tenants, strict=True) if last not in {None, tenant}])
        self.free -= wanted
        self._used[pages[0]] = pages, paired, tenant
        return Allotment(pages, Fence.merged([piece.fence for piece in pieces]), scrub)

    def give_back(self, pages: tuple[int, ...], fence: Fence) -> None:
        """Frees the `pages` of an allotment; who takes them next must pass `fence` before writing."""
        known, paired, tenant = self._used.pop(pages[0], ((), 0, ""))
        assert known == pages, f"the pages {pages} are free already, or no allotment"
        self._put_away()
        self.free += len(pages)
        self._last = pages, paired, tenant, fence

    def _hand_over(self, last: tuple[tuple[int, ...], int, str, Fence], tenant: str) -> Allotment:
        """What came free last is all there is, and as much as is wanted: it goes from hand to hand."""
        pages, paired, before, fence = last
        self._used[pages[0]], self._last = (pages, paired, tenant), None
        self.free = 0
        return Allotment(pages, fence, () if before == tenant else pages)

    def _put_away(self) -> None:
        """What came free last, to the rest."""
        if self._last is not None:
            (pages, paired, tenant, fence), self._last = self._last, None
            if paired:
                self._freed.append(_Freed(pages[:paired], (tenant,) * paired, fence))
            self._free_lone(pages[paired:], tenant, fence)

    def _take_pairs(self, wanted: int) -> list[_Freed]:
        """Up to so many pages, in ascending order of the pairs."""
        pieces: list[_Freed] = []
        while wanted and self._freed:
            piece = self._freed[0].take(wanted)
            if self._freed[0].over:
                self._freed.popleft()
            wanted -= len(piece.pages)
            pieces.append(piece)
        return _in_order(pieces) if len(pieces) > 1 else pieces

    def _take_lone(self, wanted: int) -> list[_Freed]:
        """Pages whose partners are used already; only if there are none, halves of pairs."""
        pieces: list[_Freed] = []
        while wanted and self._lone:
            pages = tuple(islice(self._lone, wanted))
            taken = list(map(self._lone.pop, pages))
            tenant, fence = taken[0]
            if all(map(is_, taken, repeat(taken[0]))):  # they came free together
                pieces.append(_Freed(pages, (tenant,) * len(pages), fence))
            else:
                tenants, fences = zip(*taken, strict=True)
                pieces.append(_Freed(pages, tenants, Fence.merged(fences)))
            wanted -= len(pages)
        if wanted:
            (pair,) = self._take_pairs(2)
            rows = zip(pair.tenants, pair.apart or (pair.fence, pair.fence), strict=True)
            self._lone |= dict(zip(pair.pages, rows, strict=True))
            pieces += self._take_lone(wanted)
        return pieces

    def _free_lone(self, pages: Sequence[int], tenant: str, fence: Fence) -> None:
        lone, row = self._lone, (tenant, fence)
        for page in pages:
            if page ^ 1 not in lone:
                lone[page] = row
                continue
            other, behind = lone.pop(page ^ 1)
            tenants, fences = ((other, tenant), (behind, fence)) if page % 2 else ((tenant, other), (fence, behind))
            self._freed.append(_Freed((page & ~1, page | 1), tenants, Fence.merged(fences), fences))


def _in_order(pieces: Sequence[_Freed]) -> list[_Freed]:
    """One piece of them all; its pairs are neighbours in the order of their pages."""
    rows = [
        (each.pages[i], each.tenants[i], each.tenants[i + 1]) for each in pieces for i in range(0, len(each.pages), 2)
    ]
    rows.sort(key=itemgetter(0))
    pages = tuple([page for first, _, _ in rows for page in (first, first + 1)])
    tenants = tuple([tenant for _, *both in rows for tenant in both])
    return [_Freed(pages, tenants, Fence.merged([piece.fence for piece in pieces]))]


def runs(sources: Sequence[int], targets: Sequence[int]) -> list[Run]:
    """Page copies joined where both sides are neighbours: (first source page, first target page, how many)."""
    steps, strides = _steps(sources), _steps(targets)
    if len(sources) == len(targets) > 0 and (1 not in steps or 1 not in strides):  # none are
        return list(zip(sources, targets, repeat(1)))
    if len(sources) == len(targets) and steps == strides == {1}:  # all are
        return [(sources[0], targets[0], len(sources))]
    found: list[Run] = []
    first = start = length = 0
    for source, target in zip(sources, targets, strict=True):
        if source == first + length and target == start + length and length:
            length += 1
            continue
        if length:
            found.append((first, start, length))
        first, start, length = source, target, 1
    if length:
        found.append((first, start, length))
    return found


def _steps(pages: Sequence[int]) -> set[int]:
    """From each to the next."""
    return set(map(sub, islice(pages, 1, None), pages))


def halved(joined: Sequence[Run], pages: int) -> tuple[list[Run], list[Run]]:
    """Runs in two: those of the first `pages` pages, and the rest. One that lies across is cut."""
    left = pages
    for index, (source, target, length) in enumerate(joined):
        if length > left:
            first, rest = list(joined[:index]), list(joined[index + 1 :])
            if left:
                first.append((source, target, left))
            return first, [(source + left, target + left, length - left), *rest]
        left -= length
    return list(joined), []
