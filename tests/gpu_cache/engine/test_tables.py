"""A block table is kept for one use of a slot: the same adapter may come back to it with other pages."""

from __future__ import annotations

from dataclasses import replace

import torch

from adapterd.gpu_cache.engine.tables import Tables
from adapterd.gpu_cache.slots import Resident
from adapterd.loader.identity import VersionKey
from adapterd.loader.layout import Layout
from adapterd.loader.planning import plan_layout
from fakes.adapters import MODULE, MemoryLoader

PAGE = 1024


def resident_of(pages: tuple[int, ...], generation: int) -> Resident:
    version = MemoryLoader().publish("acme/a")
    layout: Layout = plan_layout(version.manifest, "F32", PAGE)
    key = VersionKey("acme", version.resolved.base, version.digest)
    return Resident(key, 0, generation, version.manifest, layout, pages[: layout.n_pages])


def test_a_table_is_made_once_for_a_use_of_a_slot() -> None:
    tables, resident = Tables([MODULE]), resident_of((0, 1, 2), 0)
    assert tables.of(resident) is tables.of(replace(resident))


def test_the_same_adapter_with_other_pages_gets_another_table() -> None:
    tables, arena = Tables([MODULE]), torch.arange(8 * PAGE // 4, dtype=torch.float32).view(torch.uint8)
    first = tables.of(resident_of((0, 1, 2), 0)).term(MODULE, 1.0, arena)
    again = tables.of(resident_of((4, 5, 6), 1)).term(MODULE, 1.0, arena)
    assert first is not None
    assert again is not None
    assert torch.equal(again.a[0], first.a[0] + 4 * PAGE / 4)
