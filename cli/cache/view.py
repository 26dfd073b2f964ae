"""A worker's cache as people see it: memories as bars, adapters as a table."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rich.text import Text

from adapterd.cli.output import facts, plain, rows, size, table

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from adapterd.gpu_cache.daemon.messages import Gone, Held, Load, Located, Memory, StatusAnswer, TenantUse

BAR_CELLS = 32
STATES = ("in_use", "pinned", "staging", "idle")
STYLES = {"in_use": "green", "pinned": "cyan", "staging": "yellow", "idle": "blue"}
BLOCKS = {"in_use": "█", "pinned": "▓", "staging": "▒", "idle": "░", "": "·"}
LETTERS = {"in_use": "#", "pinned": "@", "staging": "+", "idle": "-", "": "."}
"""Where the terminal has no blocks."""


def status_view(told: StatusAnswer) -> Iterator[RenderableType]:
    """Facts, and a line a tenant."""
    leases = ", ".join(f"{number} {state}" for state, number in told.leases.items() if number)
    yield facts(
        [
            ("base", f"{told.base_id}@{told.base_revision}"),
            ("state", _state(told)),
            ("vram", _filled(told.vram)),
            ("host", _filled(told.host)),
            ("tables", size(told.table_bytes)),
            ("leases", leases or "none"),
            ("found", f"{told.hits} in VRAM, {told.host_hits} in host memory, {told.misses} elsewhere"),
            ("leaked", told.leaked_leases),
            ("steps in flight", told.steps_in_flight),
        ]
    )
    if told.loading:
        yield _loads(told.loading)
    if told.tenants:
        yield _tenants(told)
        yield legend()


def adapters_table(adapters: Iterable[Held]) -> Table:
    """Every version that is in a memory, the largest first in each tenant."""
    made = table("tenant", "adapters", "digest", "tier", "size", "rank", "leases", "pinned", right=["size", "rank"])
    ordered = sorted(adapters, key=lambda held: (held.tenant, -held.bytes))
    cells = (
        (h.tenant, ", ".join(h.adapters), f"sha256:{h.digest}", h.tier, size(h.bytes), h.rank, h.leases, _yes(h.pinned))
        for h in ordered
    )
    return rows(made, cells)


def change_line(row: Located | Gone) -> str:
    """One change: where the version is now."""
    digest = f"sha256:{row.digest}"
    tier = getattr(row, "tier", "gone")
    words = [f"{tier:<8}", row.tenant, digest]
    if tier != "gone":
        words += [",".join(row.adapters), size(row.bytes), f"rank {row.rank}"]  # type: ignore[union-attr]
    return "  ".join(map(plain, words))


def bar(use: TenantUse, total: int, cells: int = BAR_CELLS) -> Text:
    """One tenant's part of VRAM; whatever is not nothing has a cell."""
    marks = BLOCKS if "utf" in (sys.stdout.encoding or "").lower() else LETTERS
    drawn = Text()
    for state in STATES:
        width = _cells(getattr(use, state), total, cells)
        drawn.append(marks[state] * min(width, cells - len(drawn)), STYLES[state])
    drawn.append(marks[""] * (cells - len(drawn)), "dim")
    return drawn


def legend() -> Text:
    """What the marks mean."""
    marks = BLOCKS if "utf" in (sys.stdout.encoding or "").lower() else LETTERS
    parts = [(f"{marks[state]} ", STYLES[state]) for state in STATES]
    words = ("in use", "pinned", "staging", "idle")
    return Text.assemble(*(part for pair in zip(parts, (f"{word}   " for word in words), strict=True) for part in pair))


def _state(told: StatusAnswer) -> str:
    if told.drained:
        return "drained: new leases are refused, and nothing is left"
    return "draining: new leases are refused" if told.draining else "serving"


def _tenants(told: StatusAnswer) -> Table:
    numbers = ["in use", "pinned", "staging", "idle", "guaranteed", "at most", "host"]
    made = table("tenant", "vram", *numbers, right=numbers)
    for use in told.tenants:
        sizes = (use.in_use, use.pinned, use.staging, use.idle, use.guaranteed, use.maximum, use.host)
        made.add_row(Text(plain(use.tenant)), bar(use, told.vram.total), *(Text(_size(nbytes)) for nbytes in sizes))
    return made


def _loads(loading: Iterable[Load]) -> Table:
    """What is on its way into host memory."""
    made = table("loading", "digest", "stage", "done", right=["done"])
    return rows(made, ((each.tenant, f"sha256:{each.digest}", each.stage, _done(each)) for each in loading))


def _done(load: Load) -> str:
    if not load.total:
        return _size(load.done)
    return size(load.total) if load.stage == "pack" else f"{size(load.done)} of {size(load.total)}"


def _cells(nbytes: int, total: int, cells: int) -> int:
    return max(1, round(cells * nbytes / total)) if nbytes and total else 0


def _filled(memory: Memory) -> str:
    used = memory.total - memory.free
    percent = f" ({100 * used / memory.total:.0f} %)" if memory.total else ""
    return f"{size(used)} of {size(memory.total)}{percent}"


def _size(nbytes: int) -> str:
    return size(nbytes) if nbytes else "-"


def _yes(value: bool) -> str:
    return "yes" if value else "-"
