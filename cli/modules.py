"""Modules of an adapter as people read them: norms with a bar, the part of the base, two versions side by side."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from adapterd.cli.output import facts, rows, size, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from adapterd.loader.checks.share import Share
    from adapterd.loader.manifest import Manifest, ModuleEntry

BAR_CELLS = 12
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_FIELDS = ("rank", "alpha", "scaling", "dtype", "delta_norm")


def bar(value: float | None, largest: float, cells: int = BAR_CELLS) -> str:
    """`value` as a part of `largest`, in eighths of a cell, or in signs where the terminal has no blocks."""
    if not value or not largest:
        return ""
    eighths = max(round(8 * cells * min(value / largest, 1.0)), 1)
    if "utf" not in (sys.stdout.encoding or "").lower():
        return "#" * max(eighths // 8, 1)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def manifest_view(manifest: Manifest | None, share: Share | None) -> Iterator[RenderableType]:
    """What `inspect` shows: the version, the part of the base that it adapts, and every module."""
    if manifest is None:
        return
    about: list[tuple[str, object]] = [
        ("version digest", f"sha256:{manifest.version_digest}"),
        ("base", f"{manifest.base.id}@{manifest.base.revision}"),
        ("tensors", size(manifest.tensor_bytes)),
        ("files", f"{len(manifest.files)}, {size(manifest.total_bytes)}"),
    ]
    if share is not None:
        part = f"{share.adapted} of {share.linears} linears, {share.weights:.1%} of their weights"
        about.append(("adapts", part))
    yield facts(about)
    if share is not None:
        lines = ((k.name, f"{k.adapted}/{k.of}", bar(k.adapted, k.of)) for k in share.kinds)
        yield rows(table("linears", "adapted", "part", right=("adapted",)), lines)
    yield _module_table(manifest)


def _module_table(manifest: Manifest) -> RenderableType:
    largest = max((m.delta_norm or 0.0 for m in manifest.modules), default=0.0)
    numbers = ("rank", "alpha", "scaling", "in", "out", "size", "norm")
    lines = (
        (
            m.name, m.rank, f"{m.alpha:g}", f"{m.scaling:.6g}", m.dtype, m.in_features, m.out_features,
            size(m.a.nbytes + m.b.nbytes), None if m.delta_norm is None else f"{m.delta_norm:.4g}",
            bar(m.delta_norm, largest),
        )
        for m in manifest.modules
    )  # fmt: skip
    columns = ("module", "rank", "alpha", "scaling", "dtype", "in", "out", "size", "norm", "effect")
    return rows(table(*columns, right=numbers), lines)


@dataclass(frozen=True)
class Change:
    """One module that is not the same in two versions.

    Attributes:
        fields: name → [left, right], of those that differ; of an added or removed module, all, None on one side.
        norm_ratio: the right norm by the left one; None where there is none to divide by.
    """

    name: str
    change: str
    fields: dict[str, list[Any]]
    norm_ratio: float | None

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, "change": self.change, "fields": self.fields, "norm_ratio": self.norm_ratio}


def changes(left: Manifest, right: Manifest) -> list[Change]:
    """Sorted by module; what manifests tell apart, so equal norms of other values are no change."""
    a, b = ({m.name: m for m in side.modules} for side in (left, right))
    found = (_change(name, a.get(name), b.get(name)) for name in sorted(a.keys() | b.keys()))
    return [change for change in found if change is not None]


def _change(name: str, was: ModuleEntry | None, now: ModuleEntry | None) -> Change | None:
    one, two = ({} if m is None else m.as_json() for m in (was, now))
    fields = {f: [one.get(f), two.get(f)] for f in _FIELDS if one.get(f) != two.get(f)}
    if not fields:
        return None
    word = "added" if was is None else "removed" if now is None else "changed"
    ratio = norm_ratio(was.delta_norm if was else None, now.delta_norm if now else None)
    return Change(name, word, fields, ratio)


def norm_ratio(left: float | None, right: float | None) -> float | None:
    """`right` by `left`, to six digits."""
    return None if not left or right is None else float(f"{right / left:.6g}")


def total_norm(manifest: Manifest) -> float:
    """The norm of all modules' deltas taken together."""
    return math.sqrt(sum((m.delta_norm or 0.0) ** 2 for m in manifest.modules))


def change_table(found: Iterable[Change]) -> RenderableType:
    """Two versions side by side."""
    lines = ((c.name, c.change, *(_arrow(c.fields.get(f)) for f in _FIELDS), _ratio(c)) for c in found)
    return rows(
        table("module", "change", "rank", "alpha", "scaling", "dtype", "norm", "ratio", right=("ratio",)), lines
    )


def _ratio(change: Change) -> str | None:
    return None if change.norm_ratio is None else f"{change.norm_ratio:.4g}"


def _arrow(pair: list[Any] | None) -> str | None:
    if pair is None:
        return None
    return " → ".join("-" if v is None else f"{v:.6g}" if isinstance(v, float) else str(v) for v in pair)
