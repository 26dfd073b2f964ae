"""What an operator sets about a worker's cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from adapterd.gpu_cache.budgets import TenantBudget
from adapterd.loader.errors import Code, error
from adapterd.loader.layout import ALIGNMENT, ITEM_BYTES, PAGE_BYTES
from adapterd.loader.limits import DEFAULT_LIMITS, MIB, Limits
from adapterd.loader.sharding import WHOLE, Sharding

PAGES_PER_STEP = 16
"""Pages copied after each step while rows decode. Measured on one H200: 22 GB/s, and no more than 5 % on p99."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Settings of an `AdapterCache`.

    Attributes:
        device: `cpu`, `cuda` or `cuda:N`.
        vram_bytes: size of the arena; rounded down to whole pages.
        host_bytes: size of the host slab, in which adapters are packed and, with `keep_host`, stay.
        loader: where download, checks and packing run: in threads of this process, or in a loader `process`.
        loader_socket: where a loader process listens; None is one of the cache's own, which ends with it.
        loader_threads: how many.
        close_seconds: how long closing waits for loads that run; a source may hang. Then they are left alone.
        dtype: of the packed form; `auto` is the adapter's own.
        store: folder of verified versions; None is a temporary one that goes with the cache.
        store_bytes: the most that the store may take, or None for no bound; what was unused longest goes first.
        store_key: file of the key under which the store keeps packed forms and manifests, too, so that later loads
            need not make them; made if it is not there, and not in the store. None: nothing of it is kept.
        keep_host: whether verified bytes stay in the slab after their copy, until room is needed.
        max_residents: slots, that is adapters in the arena at once; guaranteed shares of VRAM have their part of them.
        max_components: of a composition.
        max_composition_rank: the most rank that one module may get from all components together.
        pages_per_step: pages copied after each step while steps run; when idle there is no limit.
        page_bytes: of arena and slab.
        tenants, default_budget: budgets by tenant, and the one of everybody else.
        limits: caps that the loader enforces.
        recheck: whether the loader repeats the content checks on every cold load.
        sharding: which part of each adapter this worker holds, as a rank of a tensor-parallel group (I21).
    """

    device: str = "cpu"
    vram_bytes: int = 256 * MIB
    host_bytes: int = 256 * MIB
    loader: Literal["thread", "process"] = "thread"
    loader_socket: Path | None = None
    loader_threads: int = 2
    close_seconds: float = 5.0
    dtype: Literal["auto", "F32", "F16", "BF16"] = "auto"
    store: Path | None = None
    store_bytes: int | None = None
    store_key: Path | None = None
    keep_host: bool = True
    max_residents: int = 1024
    max_components: int = 16
    max_composition_rank: int = 512
    pages_per_step: int = PAGES_PER_STEP
    page_bytes: int = PAGE_BYTES
    tenants: Mapping[str, TenantBudget] = field(default_factory=dict)
    default_budget: TenantBudget = TenantBudget()  # noqa: RUF009 - frozen
    limits: Limits = DEFAULT_LIMITS
    recheck: bool = False
    sharding: Sharding = WHOLE

    def __post_init__(self) -> None:
        """Raises Failed (SETTINGS_INVALID)."""
        if self.loader not in {"thread", "process"}:
            raise error(Code.SETTINGS_INVALID, "loader", f"{self.loader!r} is neither thread nor process")
        if self.dtype not in {"auto", *ITEM_BYTES}:
            hint = "Adapters are kept as F32, F16 or BF16; INT8 and FP8 are not served."
            raise error(Code.SETTINGS_INVALID, "dtype", f"{self.dtype!r} is no dtype of adapters", hint)
        if self.loader_socket is not None and self.loader != "process":
            raise error(Code.SETTINGS_INVALID, "loader_socket", "is for a loader process", 'Set loader="process".')
        positive = (
            "loader_threads",
            "max_residents",
            "max_components",
            "max_composition_rank",
            "pages_per_step",
        )
        for name in (*positive, "page_bytes"):
            if getattr(self, name) < 1:
                raise error(Code.SETTINGS_INVALID, name, f"must be at least 1, not {getattr(self, name)}")
        if self.page_bytes % ALIGNMENT:
            raise error(Code.SETTINGS_INVALID, "page_bytes", f"{self.page_bytes} is no multiple of {ALIGNMENT}")
        if self.store_bytes is not None and self.store_bytes < 1:
            raise error(Code.SETTINGS_INVALID, "store_bytes", f"must be at least 1, not {self.store_bytes}")
        for name in ("vram_bytes", "host_bytes"):
            if getattr(self, name) < self.page_bytes:
                raise error(
                    Code.SETTINGS_INVALID,
                    name,
                    f"{getattr(self, name)} bytes hold no page of {self.page_bytes}",
                )

    @property
    def vram_pages(self) -> int:
        return self.vram_bytes // self.page_bytes

    @property
    def host_pages(self) -> int:
        return self.host_bytes // self.page_bytes
