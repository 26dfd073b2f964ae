"""Which linears of a live model are served, and the hook that stands behind each of them.

A layer is wrapped by a forward hook, not replaced: its class, weights, path and state dict stay what
they were, its own forward runs as ever (so quantised bases work whatever their packing), and removing
the hook is all there is to undo.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import nn

from adapterd.gpu_cache.engine.bind import check_table
from adapterd.gpu_cache.engine.sharding.joining import check_point
from adapterd.gpu_cache.engine.sharding.placements import check_placement, held_base
from adapterd.gpu_cache.engine.widths import live_widths
from adapterd.gpu_cache.table_shape import HEAD_NAMES
from adapterd.loader.base_model import BaseModule, BaseSpec, ModuleKind
from adapterd.loader.errors import Code, error
from adapterd.loader.sharding import WHOLE, Axis, Sharding

if TYPE_CHECKING:
    from adapterd.gpu_cache.engine.sharding.reduced import Reduce

NO_REDUCED: Mapping[str, Reduce] = {}
SERVED_KINDS = frozenset({ModuleKind.LINEAR, ModuleKind.CONV1D})


@dataclass(frozen=True, slots=True)
class Slice:
    """Columns [offset, offset + width) of a layer's output, which adapters know as module `path`."""

    path: str
    offset: int
    width: int


@dataclass(frozen=True, slots=True)
class Site:
    """One live linear to wrap.

    Attributes:
        path: in the live model.
        module: the live module itself.
        in_features, out_features: its widths; of a sharded one, those of this rank's part.
        slices: what it holds for adapters: itself, or the parts of a fused linear that are served.
        axis: along which it is sharded; None if it is replicated.
        reduce: sums over the ranks, for a row-parallel layer that reduces its output itself.
    """

    path: str
    module: nn.Module
    in_features: int
    out_features: int
    slices: tuple[Slice, ...]
    axis: Axis | None = None
    reduce: Reduce | None = None


def find_sites(
    model: nn.Module,
    base: BaseSpec,
    stacked: Mapping[str, Sequence[str]],
    targets: Iterable[str] | None,
    sharding: Sharding = WHOLE,
    reduced: Mapping[str, Reduce] = NO_REDUCED,
) -> tuple[Site, ...]:
    """The linears to wrap, in the model's order. See `LoRAEngine` for the rules.

    Raises:
        Failed: BASE_TABLE_INVALID if the model is not the table's (`bind.check_table`), or a fused linear
            lacks some of its parts in the table. SETTINGS_INVALID for a sharding that is not the model's;
            MODULE_NOT_SERVED as `joining.check_point`.
        Refused: SHAPE_MISMATCH naming the fused linear whose parts do not add up to it.
        ValueError: a name in `stacked`, `targets` or `reduced` that fits nothing.
    """
    held = held_base(base, sharding)
    sites = list(_all_sites(model, held, stacked))
    if not sites:
        raise error(
            Code.BASE_TABLE_INVALID, base.id, "the model has none of the linears of this base's module table",
            "Make the table from this very model: BaseSpec.from_module(model, id=…, revision=…).",
        )  # fmt: skip
    check_table(model, held, {part.path for site in sites for part in site.slices})
    for site in sites:
        check_placement(site, base, sharding)
    sites = list(_sharded(_unshared(sites), sharding, reduced))
    if targets is None:
        wanted = [site for site in sites if not _is_head(site.path, model)]
    else:
        wanted = list(_targeted(sites, tuple(targets)))
    for site in wanted:
        check_point(site)
    return tuple(wanted)


def _all_sites(model: nn.Module, base: BaseSpec, stacked: Mapping[str, Sequence[str]]) -> Iterator[Site]:
    unused = set(stacked)
    for path, module in model.named_modules(remove_duplicate=False):
        widths = live_widths(module)
        if widths is None or isinstance(model.get_submodule(path.rpartition(".")[0]), nn.MultiheadAttention):
            continue  # MultiheadAttention reads the weight of its out_proj without calling it
        key = next((k for k in stacked if _names(k, path)), None)
        parts = [path[: -len(key)] + name for name in stacked[key]] if key else []
        unused.discard(key or "")
        slices = _stacked_slices(path, widths, parts, base) or _plain_slice(path, widths, base)
        if slices:
            yield Site(path, module, *widths, slices)
    if unused:
        raise ValueError(f"stacked names no linear of the model: {', '.join(sorted(unused))}")


def _plain_slice(path: str, widths: tuple[int, int], base: BaseSpec) -> tuple[Slice, ...]:
    entry = base.module(path)
    if entry is None or entry.kind not in SERVED_KINDS or (entry.in_features, entry.out_features) != widths:
        return ()
    return (Slice(path, 0, widths[1]),)


def _stacked_slices(path: str, widths: tuple[int, int], parts: list[str], base: BaseSpec) -> tuple[Slice, ...]:
    """The parts in order along out_features; none where there are none, or none in the table."""
    entries = [_part(part, base) for part in parts]
    if not any(entries):
        return ()
    slices, offset = [], 0
    for part, entry in zip(parts, entries, strict=True):
        if entry is None:
            raise error(
                Code.BASE_TABLE_INVALID, part,
                f"`stacked` puts this module into {path}, the base's table lacks it",
                "List exactly the modules that the fused linear holds, in order.",
            )  # fmt: skip
        if entry.in_features != widths[0]:
            raise _shape_mismatch(part, widths, (entry.in_features, entry.out_features))
        slices.append(Slice(part, offset, entry.out_features))
        offset += entry.out_features
    if offset != widths[1]:
        raise _shape_mismatch(path, widths, (widths[0], offset))
    return tuple(slices)


def _part(path: str, base: BaseSpec) -> BaseModule | None:
    entry = base.module(path)
    return entry if entry is not None and entry.kind in SERVED_KINDS else None


def _shape_mismatch(path: str, live: tuple[int, int], table: tuple[int, int]) -> Exception:
    return error(
        Code.SHAPE_MISMATCH, path,
        f"the live module has in_features {live[0]} and out_features {live[1]}, the base's table says "
        f"{table[0]} and {table[1]}",
        "Load the model that the table was made from, or register the table of this one.",
    )  # fmt: skip


def _unshared(sites: list[Site]) -> Iterator[Site]:
    """Without modules that stand at two paths: a call does not say which path it is for."""
    uses: dict[int, int] = {}
    for site in sites:
        uses[id(site.module)] = uses.get(id(site.module), 0) + 1
    return (site for site in sites if uses[id(site.module)] == 1)


def _sharded(sites: Iterable[Site], sharding: Sharding, reduced: Mapping[str, Reduce]) -> Iterator[Site]:
    """With what the ranks share."""
    unused = set(reduced)
    for site in sites:
        rules = [sharding.rule(part.path) for part in site.slices]
        name = next((name for name in reduced if _names(name, site.path)), None)
        unused.discard(name or "")
        axis = next((rule.axis for rule in rules if rule is not None), None)
        yield replace(site, axis=axis, reduce=reduced[name] if name and axis == "row" else None)
    if unused:
        raise ValueError(f"reduced names no linear of the model: {', '.join(sorted(unused))}")


def _is_head(path: str, model: nn.Module) -> bool:
    """Whether the module at `path` sees fewer rows than the layer stack, by the model's word or its name."""
    output = getattr(model, "get_output_embeddings", None)
    if output is not None and output() is model.get_submodule(path):
        return True
    prefix = getattr(model, "base_model_prefix", "")
    body = getattr(model, prefix, None) if prefix else None
    if isinstance(body, nn.Module) and not path.startswith(f"{prefix}."):
        return True
    return not HEAD_NAMES.isdisjoint(path.split("."))


def _targeted(sites: list[Site], targets: tuple[str, ...]) -> Iterator[Site]:
    paths = [s.path for site in sites for s in site.slices]
    unused = [t for t in targets if not any(_names(t, path) for path in paths)]
    if unused:
        raise ValueError(f"targets names no linear of the model: {', '.join(unused)}")
    for site in sites:
        kept = tuple(s for s in site.slices if any(_names(t, s.path) for t in targets))
        if kept:
            yield replace(site, slices=kept)


def _names(name: str, path: str) -> bool:
    """Whether `name` is the path or its end, compared at dots, as PEFT compares target modules."""
    return path == name or path.endswith(f".{name}")
