"""The module table of a live torch module; on the meta device, too. Weights are not read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, cast

from adapterd.loader.base_model import EXPERTS_PART, BaseModule, ModuleKind, stack_path, without_experts_inside

if TYPE_CHECKING:
    import torch
    from torch import nn


def modules_of_live(model: nn.Module) -> Iterable[BaseModule]:
    """All modules that a table lists, in no order.

    Linears are told by their class or, as quantised ones often derive from nothing, by `in_features` and
    `out_features`, where nothing inside of them is a linear or has parameters.
    """
    # An embedding that two parents share is one object with two names, and an adapter may use either.
    named = model.named_modules(remove_duplicate=False)
    found = {m.path: m for m in _listed(named)}
    return without_experts_inside(found)


def _listed(named: Iterable[tuple[str, nn.Module]]) -> Iterator[BaseModule]:
    for path, module in named:
        if path and (listed := live_module(path, module)):
            yield listed


def live_module(path: str, module: nn.Module) -> BaseModule | None:
    """The entry of the live `module` at `path`; None for one that tables do not list."""
    from torch import nn

    if path.rpartition(".")[2] == EXPERTS_PART:
        return BaseModule(stack_path(path), ModuleKind.EXPERTS, 0, 0)
    if isinstance(module, nn.Embedding):
        return BaseModule(path, ModuleKind.EMBEDDING, module.num_embeddings, module.embedding_dim)
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
        rows, columns = cast("torch.Tensor", module.weight).shape
        return BaseModule(path, ModuleKind.CONV1D, int(rows), int(columns))
    widths = getattr(module, "in_features", None), getattr(module, "out_features", None)
    if isinstance(widths[0], int) and isinstance(widths[1], int) and _is_whole(module):
        return BaseModule(path, ModuleKind.LINEAR, widths[0], widths[1])
    return None


def _is_whole(module: nn.Module) -> bool:
    """A leaf, or one whose parts only hold packed weights, as torch.ao's do; a wrapper's parts are layers."""
    inner = [part for part in module.modules() if part is not module]
    return not any(hasattr(part, "in_features") or next(part.parameters(), None) is not None for part in inner)
