"""What an adapted model gives, the slow and plain way: float64, one merged weight a composition.

Knows nothing of the engine: W' = W + Σ weight · scaling · B A, as LoRA's paper has it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from fakes.static_cache import Adapter

Composition = Sequence[tuple[Adapter, float]]


def merged_model(model: nn.Module, composition: Composition, fused: Sequence[tuple[str, str, int]] = ()) -> nn.Module:
    """A float64 copy of `model` with the composition merged into its weights.

    Args:
        model: must not be wrapped.
        composition: (adapter, weight).
        fused: (adapter's module path, live module path, first output row) for modules inside a fused linear.
    """
    copied = copy.deepcopy(model).double()
    places = {path: (live, row) for path, live, row in fused}
    with torch.no_grad():
        for adapter, weight in composition:
            for path, f in adapter.modules.items():
                live, row = places.get(path, (path, 0))
                change = weight * f.scaling * (f.b.double() @ f.a.double())
                target = copied.get_submodule(live)
                kept = target.weight.T if hasattr(target, "nf") else target.weight  # Conv1D: [in, out]
                kept[row : row + change.shape[0]] += change.to(kept.device)
    return copied


def per_row(
    model: nn.Module, x: Tensor, owners: Iterable[Composition], fused: Sequence[tuple[str, str, int]] = ()
) -> Tensor:
    """Each row of `x` through a model merged for that row alone; float64."""
    merged: dict[tuple[tuple[int, float], ...], nn.Module] = {}
    rows = []
    for row, composition in zip(x.double(), owners, strict=True):
        name = tuple((id(adapter), weight) for adapter, weight in composition)
        if name not in merged:
            merged[name] = merged_model(model, composition, fused)
        rows.append(merged[name](row[None])[0])
    return torch.stack(rows).detach()
