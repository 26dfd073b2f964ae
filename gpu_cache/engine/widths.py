"""What a live module says about its widths."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def live_widths(module: nn.Module) -> tuple[int, int] | None:
    """(in_features, out_features) of a linear or a transformers Conv1D, None for anything else.

    Of a distributed weight, what this rank holds: such a linear's own attributes are those of the whole.
    """
    weight = getattr(module, "weight", None)
    if is_transposed(module) and weight is not None and weight.dim() == 2:
        here = _here(weight)
        return here[0], here[1]
    widths = getattr(module, "in_features", None), getattr(module, "out_features", None)
    if not isinstance(widths[0], int) or not isinstance(widths[1], int):
        return None
    if weight is not None and as_dtensor(weight) is not None and tuple(weight.shape) == (widths[1], widths[0]):
        here = _here(weight)
        return here[1], here[0]
    return widths[0], widths[1]


def is_transposed(module: nn.Module) -> bool:
    """Whether it keeps its weight as [in, out], as transformers' Conv1D does."""
    return isinstance(getattr(module, "nf", None), int) and not hasattr(module, "in_features")


def as_dtensor(value: object) -> DTensor | None:
    """`value`, if it is distributed. Nothing is imported for models that are not."""
    module = sys.modules.get("torch.distributed.tensor")
    return value if module is not None and isinstance(value, module.DTensor) else None


def _here(weight: Any) -> tuple[int, ...]:
    local = as_dtensor(weight)
    return tuple(weight.shape if local is None else local.to_local().shape)
