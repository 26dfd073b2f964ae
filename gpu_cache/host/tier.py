"""The host slab: one allocation, in which adapters are packed, and where they stay until room is needed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from adapterd.gpu_cache.budgets import Budget
from adapterd.gpu_cache.config import CacheConfig
from adapterd.gpu_cache.device import Device
from adapterd.gpu_cache.eviction import Candidate, Policy, plan_evictions
from adapterd.gpu_cache.host.loading import Prepared
from adapterd.gpu_cache.host.pages import SlabPages
from adapterd.gpu_cache.records import Entry

if TYPE_CHECKING:
    import torch


class HostTier:
    """Pages of the slab and whose they are. Methods need the cache's lock, but for `write`."""

    def __init__(self, device: Device, config: CacheConfig, policy: Policy) -> None:
        self._page_bytes, self._policy = config.page_bytes, policy
        self.budget = Budget("host", config.host_pages, config.page_bytes, config.tenants, config.default_budget)
        self._pages = SlabPages(config.host_pages)
        self.slab: torch.Tensor = device.allocate_host(config.host_pages * config.page_bytes)

    def make_room(self, entry: Entry, seq: int, entries: Iterable[Entry]) -> list[Entry] | None:
        """Makes room for `entry`'s image, for the sake of lease `seq`: who was dropped, or None if it must wait."""
        by_key = {e.key: e for e in entries if _droppable(e, seq)}
        candidates = [Candidate(e.key, e.pages, e.last_used) for e in by_key.values()]
        victims = plan_evictions(self._policy, self.budget, entry.key.tenant, entry.pages, candidates, _always)
        return None if victims is None else [self._dropped(by_key[v.key]) for v in victims]

    def take(self, entry: Entry) -> tuple[int, ...]:
        """Gives `entry` its pages; `make_room` has said yes."""
        pages = self._pages.take(entry.pages)
        assert pages is not None, "the budget and the slab disagree"
        entry.image = pages
        self.budget.take(entry.key.tenant, entry.pages)
        return pages

    def drop(self, entry: Entry) -> None:
        """Frees the pages. Nothing reads or writes them any more: no job, no copy in flight."""
        assert entry.image is not None
        self._pages.give_back(entry.image)
        self.budget.give_back(entry.key.tenant, entry.pages)
        entry.image, entry.filled = None, False

    def write(self, prepared: Prepared, pages: Sequence[int]) -> None:
        """Packs into `pages`. Without the lock, on a loader thread: the pages are the job's own.

        Raises what `fill` raises.
        """
        size, nbytes = self._page_bytes, len(pages) * self._page_bytes
        if pages[-1] - pages[0] + 1 == len(pages):
            prepared.fill(_view(self.slab)[pages[0] * size : pages[0] * size + nbytes])
            return
        buffer = memoryview(bytearray(nbytes))
        prepared.fill(buffer)
        whole = _view(self.slab)
        for index, page in enumerate(pages):
            whole[page * size : (page + 1) * size] = buffer[index * size : (index + 1) * size]

    def _dropped(self, entry: Entry) -> Entry:
        self.drop(entry)
        return entry


def _view(slab: torch.Tensor) -> memoryview:
    return slab.numpy().data


def _droppable(entry: Entry, seq: int) -> bool:
    """Filled, nobody reads it, and either in VRAM anyway or not wanted by a lease that waits as long as `seq`."""
    if not entry.filled or (entry.resident is not None and not entry.copied):
        return False
    return entry.resident is not None or not entry.spared_for(seq)


def _always(_victims: Sequence[Candidate]) -> bool:
    """Any free pages serve."""
    return True
