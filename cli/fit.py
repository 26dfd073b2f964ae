"""`fit`: what adapters take of a worker's memory, byte for byte, and how many fit, from manifests alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from adapterd.cli.author import Base, BaseId, BaseRevision, LimitsFile
from adapterd.cli.boundary import command
from adapterd.cli.fit_manifests import manifest_of, one_base
from adapterd.cli.inputs import BaseChoice, load_limits, parse_size
from adapterd.cli.output import Report, facts, plain, rows, size, table
from adapterd.cli.sharding import Column, Row, Tp, first_shard

if TYPE_CHECKING:
    from rich.console import RenderableType

    from adapterd.gpu_cache.fit import Footprint
    from adapterd.gpu_cache.table_shape import TableShape
    from adapterd.loader.base_model import BaseSpec
    from adapterd.loader.errors import Problem
    from adapterd.loader.layout import Dtype
    from adapterd.loader.sharding import Sharding

WIDEST_PAGE = 1 << 30


class PackedDtype(StrEnum):
    """`CacheConfig.dtype`."""

    AUTO = "auto"
    F32 = "F32"
    F16 = "F16"
    BF16 = "BF16"


Subjects = Annotated[
    list[str],
    typer.Argument(
        metavar="PATH|REF...",
        help=r"Folders, archives or REFs (tenant/name[:alias]\[@sha256:…]); the mix, in this order.",
    ),
]
Budget = Annotated[str, typer.Option(help="The arena: `vram_bytes` of the cache, such as 8GiB.")]
Dtypes = Annotated[PackedDtype, typer.Option(help="`dtype` of the cache; auto is each adapter's own.")]
PageSize = Annotated[str, typer.Option(help="`page_bytes` of the cache.")]
Slots = Annotated[int, typer.Option(min=1, help="`max_residents` of the cache: adapters in the arena at once.")]
MaxRank = Annotated[int, typer.Option(min=1, max=65_536, help="`max_rank` of the engine, for its tables.")]


@dataclass(frozen=True)
class _Adapter:
    """One of the mix: what it is called, and what it takes."""

    name: str
    taken: Footprint


@dataclass(frozen=True)
class _Arena:
    """What there is."""

    budget: int
    page_bytes: int
    slots: int

    @property
    def pages(self) -> int:
        return self.budget // self.page_bytes


def register(app: typer.Typer) -> None:
    """Put this room's command on `app`."""
    command(app, "fit")(fit)


def fit(
    subjects: Subjects,
    *,
    budget: Budget,
    base: Base = None,
    base_id: BaseId = None,
    base_revision: BaseRevision = None,
    limits: LimitsFile = None,
    dtype: Dtypes = PackedDtype.AUTO,
    page_bytes: PageSize = "1MiB",
    slots: Slots = 1024,
    max_rank: MaxRank = 128,
    tp: Tp = 1,
    column: Column = None,
    row: Row = None,
) -> Report:
    """Say how many adapters fit into a cache, byte for byte, from manifests alone: no tensor is read."""
    from adapterd.gpu_cache.fit import footprint

    arena = _arena(budget, page_bytes, slots)
    caps, choice = load_limits(limits), BaseChoice(base, base_id, base_revision)
    found = [manifest_of(text, choice, caps) for text in subjects]
    spec = one_base(found)
    sharding = first_shard(spec, tp, column or (), row or ())
    adapters = [_Adapter(name, footprint(m, dtype.value, arena.page_bytes, sharding)) for name, m, _ in found]
    shape = _tables(spec, sharding, arena, max_rank, _kernels_dtype(dtype, adapters))
    problems = (*_too_large(adapters, arena), *_not_by_kernels(adapters, shape))
    body = _body(spec, sharding, arena, adapters, shape, problems)
    return Report(body, [str(body["fit"])], lambda: _view(body), problems)


def _arena(budget: str, page_bytes: str, slots: int) -> _Arena:
    from adapterd.gpu_cache.config import CacheConfig

    nbytes, page = parse_size(budget, "--budget"), parse_size(page_bytes, "--page-bytes")
    if page > WIDEST_PAGE:
        raise typer.BadParameter(f"a page holds {size(WIDEST_PAGE)} at most", param_hint="--page-bytes")
    if nbytes < page:
        raise typer.BadParameter(f"{nbytes} bytes hold no page of {page}", param_hint="--budget")
    CacheConfig(vram_bytes=nbytes, host_bytes=nbytes, page_bytes=page, max_residents=slots)  # judges a page
    return _Arena(nbytes, page, slots)


# ------------------------------------------------------------------ what it comes to


def _kernels_dtype(dtype: PackedDtype, adapters: Sequence[_Adapter]) -> Dtype:
    """What kernels will read: the cache's word, else what most of the adapters are."""
    if dtype is not PackedDtype.AUTO:
        return dtype.value  # type: ignore[return-value]
    return Counter(a.taken.dtype for a in adapters).most_common(1)[0][0]


def _tables(base: BaseSpec, sharding: Sharding, arena: _Arena, max_rank: int, dtype: Dtype) -> TableShape:
    from adapterd.gpu_cache.table_shape import TableShape, served_by_default

    return TableShape(tuple(served_by_default(base, sharding)), arena.slots, max_rank, dtype, arena.page_bytes)


def _too_large(adapters: Sequence[_Adapter], arena: _Arena) -> Iterator[Problem]:
    from adapterd.loader.errors import Code, warn

    for adapter in adapters:
        if adapter.taken.pages > arena.pages:
            message = f"takes {adapter.taken.pages} pages, the budget holds {arena.pages}"
            yield warn(Code.BUDGET_EXCEEDED, adapter.name, message, "Raise the budget: it would never be served.")


def _not_by_kernels(adapters: Sequence[_Adapter], shape: TableShape) -> Iterator[Problem]:
    from adapterd.gpu_cache.fit import beyond_tables
    from adapterd.loader.errors import Code, warn

    hint = "The reference serves it, slowly. --dtype and --max-rank say what the kernels are made for."
    for adapter in adapters:
        unserved = [m.name for m in adapter.taken.modules if m.name not in shape.index]
        if unserved:
            message = f"adapts {unserved[0]}, which no engine serves by default"
            yield warn(Code.MODULE_NOT_SERVED, adapter.name, message, "It needs an engine with `targets`.")
        elif why := beyond_tables(adapter.taken, shape):
            yield warn(Code.KERNEL_UNAVAILABLE, adapter.name, why, hint)


def _body(
    base: BaseSpec,
    sharding: Sharding,
    arena: _Arena,
    adapters: Sequence[_Adapter],
    shape: TableShape,
    problems: Sequence[Problem],
) -> dict[str, Any]:
    from adapterd.gpu_cache.fit import PLAN_BYTES, in_turn

    pages = [a.taken.pages for a in adapters]
    return {
        "base": {"id": base.id, "revision": base.revision},
        "arena": {
            "budget": arena.budget, "page_bytes": arena.page_bytes, "pages": arena.pages, "slots": arena.slots,
            "unused": arena.budget % arena.page_bytes,
        },
        "tables": {
            "dtype": shape.dtype, "modules": len(shape.matrices), "rows": shape.slots, "row_bytes": shape.row_bytes,
            "bytes": shape.nbytes, "plan_bytes": PLAN_BYTES,
        },
        "tp": {
            "size": sharding.size,
            "rules": [{"name": r.name, "axis": r.axis, "slices": r.slices} for r in sharding.rules],
        },
        "fit": in_turn(pages, arena.pages, arena.slots),
        "adapters": [
            {"subject": a.name, "fit": in_turn([a.taken.pages], arena.pages, arena.slots), **a.taken.as_json()}
            for a in adapters
        ],
        "problems": [p.as_json() for p in problems],
    }  # fmt: skip


def _view(body: dict[str, Any]) -> Iterator[RenderableType]:
    arena, tables, adapters = body["arena"], body["tables"], body["adapters"]
    tp, pages = body["tp"], f"{arena['pages']} pages of {arena['page_bytes']}"
    cut = [f"{r['name']} ({r['axis']}, {r['slices']})" for r in tp["rules"]]
    yield facts([
        ("base", f"{body['base']['id']}@{body['base']['revision']}"),
        ("arena", f"{arena['budget']} bytes ({size(arena['budget'])}): {pages}"),
        ("slots", arena["slots"]),
        *([("ranks", f"{tp['size']}; all figures are those of each; cut are {', '.join(cut)}")] if cut else []),
        ("tables, beside it", f"{tables['bytes']} bytes: {tables['rows']} rows of {tables['row_bytes']} bytes"),
        ("tables' modules", f"{tables['modules']}, for kernels that read {tables['dtype']}"),
        ("plan, beside it", f"{tables['plan_bytes']} bytes"),
        ("fit, in turn" if len(adapters) > 1 else "fit", body["fit"]),
    ])  # fmt: skip
    for adapter in adapters:
        yield _module_table(adapter)
    columns = ("adapter", "dtype", "r(K+N)", "alignment", "slack", "scales", "zeros", "pages", "total", "fit")
    lines = (
        (a["subject"], a["dtype"], a["bytes"], a["alignment"], a["slack"], *_quantised(a), a["pages"],
         a["total_bytes"], a["fit"])
        for a in adapters
    )  # fmt: skip
    yield rows(table(*columns, right=columns[2:]), lines)


def _quantised(adapter: dict[str, Any]) -> tuple[int, int]:
    modules = adapter["modules"]
    return sum(m["scales"] for m in modules), sum(m["zeros"] for m in modules)


def _module_table(adapter: dict[str, Any]) -> RenderableType:
    columns = ("module", "rank", "in", "out", "r(K+N)", "alignment", "scales", "zeros", "table cells")
    keys = ("name", "rank", "in_features", "out_features", "bytes", "alignment", "scales", "zeros", "cells")
    lines = ([module[key] for key in keys] for module in adapter["modules"])
    return rows(table(*columns, right=columns[1:], title=plain(adapter["subject"])), lines)
