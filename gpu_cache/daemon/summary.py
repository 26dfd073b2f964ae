"""The status of a cache: who has how much of its memories, and in which state."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from adapterd.gpu_cache.budgets import Budget
from adapterd.gpu_cache.config import CacheConfig
from adapterd.gpu_cache.daemon.messages import Held, Load, Memory, StatusAnswer, TenantUse
from adapterd.gpu_cache.daemon.served import ResidenceRow, Served
from adapterd.gpu_cache.records import Place
from adapterd.gpu_cache.statistics import CacheStatistics


def status_of(cache: Served, table_bytes: int = 0) -> StatusAnswer:
    """As of now. Statistics and residency are two looks: sums of one may differ a little from the other."""
    now, rows, base = cache.statistics(), tuple(cache.residency()), cache.base
    return StatusAnswer(
        base_id=base.id,
        base_revision=base.revision,
        draining=cache.draining,
        drained=cache.drained,
        vram=Memory(total=now.vram_free_bytes + sum(now.vram_bytes.values()), free=now.vram_free_bytes),
        host=Memory(total=now.host_free_bytes + sum(now.host_bytes.values()), free=now.host_free_bytes),
        tenants=tenants_of(cache.config, now, rows),
        adapters=tuple(_held(row) for row in rows if row.tier is not Place.ABSENT),
        loading=tuple(
            Load(tenant=key.tenant, digest=key.digest, stage=how.stage, done=how.done, total=how.total)
            for key, how in sorted(cache.loading().items(), key=lambda item: (item[0].tenant, item[0].digest))
        ),
        leases=dict(now.leases),
        hits=now.hits,
        host_hits=now.host_hits,
        misses=now.misses,
        leaked_leases=now.leaked_leases,
        steps_in_flight=now.steps_in_flight,
        table_bytes=table_bytes,
    )


def tenants_of(config: CacheConfig, now: CacheStatistics, rows: Iterable[ResidenceRow]) -> tuple[TenantUse, ...]:
    """Every tenant that is configured or has something here, by name."""
    states: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        states[row.tenant][_state(row)] += row.bytes
    budget = Budget("vram", config.vram_pages, config.page_bytes, config.tenants, config.default_budget)
    names = sorted({*config.tenants, *now.vram_bytes, *now.host_bytes, *states})
    return tuple(
        TenantUse(
            tenant=name,
            in_use=states[name]["in_use"],
            pinned=states[name]["pinned"],
            idle=states[name]["idle"],
            staging=states[name]["staging"],
            guaranteed=budget.guaranteed(name) * config.page_bytes,
            maximum=budget.maximum(name) * config.page_bytes,
            host=now.host_bytes.get(name, 0),
        )
        for name in names
    )


def _state(row: ResidenceRow) -> str:
    """As of `TenantUse`; what is not in VRAM is in none of its states."""
    if row.tier is Place.STAGING:
        return "staging"
    if row.tier is not Place.RESIDENT:
        return "elsewhere"
    if row.leases:
        return "in_use"
    return "pinned" if row.pinned else "idle"


def _held(row: ResidenceRow) -> Held:
    return Held(
        tenant=row.tenant, digest=row.digest, adapters=row.adapters, tier=row.tier, bytes=row.bytes, rank=row.rank,
        generation=row.generation, pinned=row.pinned, leases=row.leases, priority=row.priority,
    )  # fmt: skip
