"""What the daemon asks of a cache. `AdapterCache` is one; nothing here waits for I/O or for the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

from adapterd.gpu_cache.config import CacheConfig
from adapterd.gpu_cache.host.interface import Progress
from adapterd.gpu_cache.records import Place
from adapterd.gpu_cache.statistics import CacheStatistics

if TYPE_CHECKING:
    from adapterd.gpu_cache.cache import AdapterCache
    from adapterd.loader.base_model import BaseSpec
    from adapterd.loader.errors import Problem
    from adapterd.loader.identity import VersionKey

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


class Kept(Protocol):
    """Something that is being brought. Letting go of it changes nothing.

    Attributes:
        ready: whether it is there, as of the last `pump`.
        problems: why it will not come; empty while it may.
    """

    @property
    def ready(self) -> bool: ...
    @property
    def problems(self) -> tuple[Problem, ...]: ...


class Served(Protocol):
    """A cache, as the daemon sees it. Thread-safe. What a call refuses is raised as an AdapterdError."""

    @property
    def base(self) -> BaseSpec: ...
    @property
    def config(self) -> CacheConfig: ...
    @property
    def draining(self) -> bool: ...
    @property
    def drained(self) -> bool:
        """It is draining, and nothing is left."""
        ...

    @property
    def residency_version(self) -> int:
        """As long as it stays, no version's tier has changed."""
        ...

    def pump(self) -> None:
        """Notices what has completed. Nobody else may do it while the worker is idle."""
        ...

    def statistics(self) -> CacheStatistics: ...

    def residency(self) -> Sequence[ResidenceRow]: ...

    def loading(self) -> Mapping[VersionKey, Progress]:
        """The cold loads that run."""
        ...

    def prefetch(self, ref: str, *, tenant: str, to: Tier = "vram") -> Kept:
        """Begins to bring it."""
        ...

    def pin(self, ref: str, *, tenant: str) -> Kept:
        """Begins to bring it, and keeps it in VRAM until `unpin`."""
        ...

    def unpin(self, ref: str, *, tenant: str) -> bool:
        """Whether it was pinned."""
        ...

    def evict(self, ref: str, *, tenant: str) -> int:
        """Bytes that became free, in VRAM and in host memory. ADAPTER_IN_USE while it is leased or pinned."""
        ...

    def drain(self, on: bool) -> None:
        """While on, new leases are refused; those that are there go on. Pins are let go of."""
        ...


if TYPE_CHECKING:

    def _served(cache: AdapterCache) -> Served:
        """For the type checker: the real cache is one."""
        return cache
