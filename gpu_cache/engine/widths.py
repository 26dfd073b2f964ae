"""What a live module says about its widths."""

from __future__ import annotations

from torch import nn


def live_widths(module: nn.Module) -> tuple[int, int] | None:
    """(in_features, out_features) of a linear or a transformers Conv1D, None for anything else."""
    widths = getattr(module, "in_features", None), getattr(module, "out_features", None)
    if isinstance(widths[0], int) and isinstance(widths[1], int):
        return widths[0], widths[1]
    weight = getattr(module, "weight", None)
    if isinstance(getattr(module, "nf", None), int) and weight is not None and weight.dim() == 2:
        return int(weight.shape[0]), int(weight.shape[1])
    return None
