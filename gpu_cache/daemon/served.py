"""What the daemon asks of a cache. `AdapterCache` is one; nothing here waits for I/O or for the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol

from adapterd.gpu_cache.config import CacheConfig
from adapterd.gpu_cache.records import Place
from adapterd.gpu_cache.statistics import CacheStatistics

if TYPE_CHECKING:
    from adapterd.loader.base_model import BaseSpec

Tier = Literal["vram", "host"]


class ResidenceRow(Protocol):
    """One version that the cache knows.

    Attributes:
        tenant, digest: which version; bare lower hex.
        adapters: the names it is known under, without the tenant.
        tier: where its bytes are.
        bytes: of its packed form, in whole pages.
        rank: the largest of its modules; 0 until it is known.
        generation: of its slot in VRAM; None elsewhere.
        pinned: whether an operator has pinned it.
        leases: live ones.
        priority: the highest of those that wait.
    """

    @property
    def tenant(self) -> str: ...
    @property
    def digest(self) -> str: ...
    @property
    def adapters(self) -> tuple[str, ...]: ...
    @property
    def tier(self) -> Place: ...
    @property
    def bytes(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def generation(self) -> int | None: ...
    @property
    def pinned(self) -> bool: ...
    @property
    def leases(self) -> int: ...
    @property
    def priority(self) -> int: ...


class Served(Protocol):
    """A cache, as the daemon sees it. Thread-safe. What a call refuses is raised as an AdapterdError."""

    @property
    def base(self) -> BaseSpec: ...
    @property
    def config(self) -> CacheConfig: ...
    @property
    def draining(self) -> bool: ...

    def pump(self) -> None:
        """Notices what has completed. Nobody else may do it while the worker is idle."""
        ...

    def statistics(self) -> CacheStatistics: ...

    def residency(self) -> Sequence[ResidenceRow]: ...

    def prefetch(self, ref: str, *, tenant: str, to: Tier = "vram") -> object:
        """Begins to bring it. What goes wrong later fails nothing but the prefetch."""
        ...

    def pin(self, ref: str, *, tenant: str) -> object:
        """Brings it, and keeps it in VRAM until `unpin`."""
        ...

    def unpin(self, ref: str, *, tenant: str) -> bool:
        """Whether it was pinned."""
        ...

    def evict(self, ref: str, *, tenant: str) -> int:
        """Bytes that became free. ADAPTER_IN_USE while it is leased or pinned."""
        ...

    def drain(self, on: bool) -> None:
        """While on, new leases are refused; those that are there go on."""
        ...
