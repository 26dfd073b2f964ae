"""Where in a distributed layer's call the delta joins: at this rank's part of the output, before any reduction.

So the base's reduction sums the deltas, too, and there is no other one (I21). Three kinds of layers:

* plain local weights (a framework that reduces outside of the linear), and torch's `parallelize_module`, whose
  reduction is a forward hook: a forward hook in front of all others.
* transformers' plans, which put a forward of their own around the class's, with the reduction inside: a step
  around the inner one.
* a layer whose own forward reduces: there is no such point. Such layers are named by the user (`reduced`); the
  hook stands behind, and the engine sums the rank-r intermediate itself (`reduced.add_reduced`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import CellType
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from adapterd.gpu_cache.engine.widths import as_dtensor
from adapterd.loader.errors import AdapterdError, Code, error

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from adapterd.gpu_cache.engine.layers import Site
    from adapterd.loader.sharding import Axis

Hook = Callable[[nn.Module, Sequence[Any], dict[str, Any], Any], Tensor | None]
_INNER = "original_forward"
"""What transformers' tensor_parallel calls the forward that it puts its own around."""


class Handle(Protocol):
    """Takes a hook off again."""

    def remove(self) -> None: ...


def join(site: Site, hook: Hook) -> Handle:
    """Put `hook` where the output of `site` is this rank's own; `check_point` has passed."""
    module = site.module
    if site.axis is None and as_dtensor(getattr(module, "weight", None)) is None:
        return module.register_forward_hook(hook, with_kwargs=True)
    if site.reduce is not None:
        return module.register_forward_hook(hook, with_kwargs=True)
    inside = LocalHook(site.path, site.axis, hook)
    cell = inner_forward(module)
    if cell is not None:
        return InnerForward(module, cell, inside)
    return module.register_forward_hook(inside, with_kwargs=True, prepend=True)


def check_point(site: Site) -> None:
    """Whether there is a point at which the delta can join.

    Raises:
        Failed: MODULE_NOT_SERVED for a row-parallel layer whose forward somebody replaced by one that is not known.
    """
    known = site.reduce is not None or inner_forward(site.module) is not None
    if site.axis == "row" and not known and "forward" in vars(site.module):
        raise _hidden(site.path)


class LocalHook:
    """Gives `hook` this rank's part of distributed tensors, and puts what it returns in their place.

    Raises (when called):
        Failed: MODULE_NOT_SERVED if the output there is not what the axis makes it: partial for a row-parallel
            layer, cut along its last dimension for a column-parallel one.
    """

    def __init__(self, path: str, axis: Axis | None, hook: Hook) -> None:
        self._path, self._axis, self._hook = path, axis, hook

    def __call__(self, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], output: Any) -> Any:
        y = as_dtensor(output)
        if y is not None:
            self._check_output(y)
        here = [self._local(value) for value in args]
        named = {name: self._local(value) for name, value in kwargs.items()}
        changed = self._hook(module, here, named, output if y is None else y.to_local())
        return changed if y is None or changed is None else _like(y, changed)

    def _local(self, value: Any) -> Any:
        x = as_dtensor(value)
        if x is None:
            return value
        if any(how.is_partial() for how in x.placements):
            raise self._unexpected("input", x)
        return x.to_local()

    def _check_output(self, y: DTensor) -> None:
        cut = [how for how in y.placements if not how.is_replicate()]
        fits = {
            None: not cut,
            "row": len(cut) == 1 and cut[0].is_partial(),
            "column": len(cut) == 1 and getattr(cut[0], "dim", None) in {-1, y.dim() - 1},
        }
        if not fits[self._axis]:
            raise self._unexpected("output", y)

    def _unexpected(self, what: str, tensor: DTensor) -> AdapterdError:
        return error(
            Code.MODULE_NOT_SERVED, self._path,
            f"its {what} is placed as {tensor.placements}, which is none for a layer that is "
            f"{'replicated' if self._axis is None else f'{self._axis}-parallel'}",
            "Leave this module out of `targets`.",
        )  # fmt: skip


class InnerForward:
    """In the place of a module's own forward, inside of the one that a plan put around it."""

    def __init__(self, module: nn.Module, cell: CellType, hook: LocalHook) -> None:
        self._module, self._cell, self._hook = module, cell, hook
        self._forward, self._removed = cell.cell_contents, False
        cell.cell_contents = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self._forward(*args, **kwargs)
        changed = None if self._removed else self._hook(self._module, args, kwargs, output)
        return output if changed is None else changed

    def remove(self) -> None:
        """Idempotent. One that another engine has wrapped since stays, and does nothing."""
        self._removed = True
        if self._cell.cell_contents is self:
            self._cell.cell_contents = self._forward


def inner_forward(module: nn.Module) -> CellType | None:
    """Where a transformers plan keeps the forward that it calls inside of its own; None without such a plan."""
    forward = vars(module).get("forward")
    names = getattr(getattr(forward, "__code__", None), "co_freevars", ())
    if _INNER not in names or not str(getattr(forward, "__module__", "")).startswith("transformers."):
        return None
    cell: CellType = getattr(forward, "__closure__", ())[names.index(_INNER)]
    return cell


def _like(y: DTensor, local: Tensor) -> Tensor:
    return type(y).from_local(
        local, y.device_mesh, y.placements, run_check=False, shape=y.shape, stride=y.stride()
    )  # fmt: skip


def _hidden(path: str) -> AdapterdError:
    return error(
        Code.MODULE_NOT_SERVED, path,
        "its forward was replaced, and may end with the reduction of a row-parallel layer",
        "Say so in `reduced`, with what sums over the ranks; the engine then sums its own intermediate.",
    )  # fmt: skip
