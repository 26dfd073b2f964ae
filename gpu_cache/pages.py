"""The arena's pages: which are free, who had them last, and after which marks they may be overwritten.

A page belongs to one adapter. Any free pages serve, so nothing fragments: `take` fails only when fewer
pages are free than wanted (I15). They are handed out as aligned pairs where possible, because lone 1 MiB
pages spread over a large arena cost up to 7 % in the TLB; the odd page closes an adapter. Oldest freed
first, because its fence has most likely been passed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from adapterd.gpu_cache.device import Run
from adapterd.gpu_cache.fences import OPEN, Fence


@dataclass(frozen=True, slots=True)
class Allotment:
    """Pages for one adapter.

    Attributes:
        pages: page numbers; aligned pairs first, in ascending order, lone pages last.
        fence: what the copy stream must wait for before it writes any of them.
        scrub: those of `pages` that another tenant had last; they are zeroed first (I10).
    """

    pages: tuple[int, ...]
    fence: Fence
    scrub: tuple[int, ...]


class PagePool:
    """Free and used pages of one arena. Guarded by the cache's lock; touches no memory itself."""

    def __init__(self, count: int) -> None:
        self._used: set[int] = set()
        self._pairs: dict[int, None] = dict.fromkeys(range(count // 2))  # both pages free; ordered: oldest first
        self._lone: dict[int, None] = dict.fromkeys(range(count - count % 2, count))  # free, the partner is not
        self._fences: list[Fence] = [OPEN] * count
        self._tenants: list[str | None] = [None] * count
        self.count = count

    @property
    def free(self) -> int:
        return 2 * len(self._pairs) + len(self._lone)

    def take(self, wanted: int, tenant: str) -> Allotment | None:
        """`wanted` ≥ 1 free pages for `tenant`, or None when fewer are free."""
        if wanted > self.free:
            return None
        pages = self._take_pairs(wanted // 2)
        while len(pages) < wanted:
            pages.append(self._take_lone())
        self._used.update(pages)
        fence = Fence.merged([self._fences[p] for p in pages])
        tenants = self._tenants
        scrub = tuple([p for p in pages if tenants[p] is not None and tenants[p] != tenant])
        for page in pages:
            self._fences[page] = OPEN
            self._tenants[page] = tenant
        return Allotment(tuple(pages), fence, scrub)

    def give_back(self, pages: Sequence[int], fence: Fence) -> None:
        """Frees `pages`; who takes them next must pass `fence` before writing."""
        for page in pages:
            assert page in self._used, f"page {page} is free already"
            self._used.remove(page)
            self._fences[page] = fence
            self._free_one(page)

    def _take_pairs(self, wanted: int) -> list[int]:
        chosen = sorted(islice(self._pairs, wanted))
        for pair in chosen:
            del self._pairs[pair]
        return [page for pair in chosen for page in (2 * pair, 2 * pair + 1)]

    def _take_lone(self) -> int:
        """A page whose partner is used already; only if there is none, half of a pair."""
        if self._lone:
            page = next(iter(self._lone))
            del self._lone[page]
            return page
        pair = next(iter(self._pairs))
        del self._pairs[pair]
        self._lone[2 * pair + 1] = None
        return 2 * pair

    def _free_one(self, page: int) -> None:
        partner = page ^ 1
        if partner in self._lone:
            del self._lone[partner]
            self._pairs[page // 2] = None
        else:
            self._lone[page] = None


def runs(sources: Sequence[int], targets: Sequence[int]) -> list[Run]:
    """Page copies joined where both sides are neighbours: (first source page, first target page, how many)."""
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
