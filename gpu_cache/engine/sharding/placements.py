"""How a live model lies over the ranks, as its weights say it, and whether a sharding says the same."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from adapterd.gpu_cache.engine.widths import as_dtensor, is_transposed
from adapterd.loader.base_model import BaseSpec, ModuleKind
from adapterd.loader.errors import AdapterdError, Code, error
from adapterd.loader.sharding import WHOLE, Axis, Cut, Ranges, Rule, Sharding, joined

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from adapterd.gpu_cache.engine.layers import Site


class Placement(NamedTuple):
    """How one weight [out, in] lies over the ranks.

    Attributes:
        rank, size: in the one dimension of the mesh that it is cut over; 0 of 1 if it is replicated.
        axis: None if it is replicated.
        groups: equal parts that are cut each by itself.
    """

    rank: int = 0
    size: int = 1
    axis: Axis | None = None
    groups: int = 1

    def sharding(self, path: str, features: int) -> Sharding:
        """The sharding that cuts one module so."""
        if self.axis is None:
            return WHOLE
        return Sharding(self.rank, self.size, (self.rule(path, features),))

    def rule(self, path: str, features: int) -> Rule:
        assert self.axis is not None
        groups = (features // self.groups,) * self.groups if self.groups > 1 else ()
        return Rule(path, self.axis, self.size, groups)


def sharding_of(model: nn.Module) -> Sharding:
    """What this rank holds of every linear whose weight is a DTensor, as plans of transformers and torch make them.

    Such a model says how it is cut. One that holds plain local weights does not: write its rules (`Sharding.of`).
    Works with weights on the meta device, so that a cache can be opened before they are loaded.

    Returns:
        `WHOLE` for a model that is not distributed.

    Raises:
        Failed: SETTINGS_INVALID for a weight that is cut unevenly, or in more than one dimension of its mesh.
    """
    found: dict[tuple[int, int], list[Rule]] = {}
    for path, module in model.named_modules():
        weight = _linear_weight(module)
        placement = None if weight is None else placement_of(path, module, weight)
        if weight is None or placement is None or placement.axis is None:
            continue
        whole = _widths(module, weight)
        features = whole[1] if placement.axis == "column" else whole[0]
        placement.sharding(path, features).cut(path, *whole)  # raises what is uneven
        found.setdefault((placement.rank, placement.size), []).append(placement.rule(path, features))
    if len(found) > 1:
        raise _unclear("model", "its weights are cut over several groups of ranks")
    return next((Sharding(rank, size, tuple(rules)) for (rank, size), rules in found.items()), WHOLE)


def placement_of(path: str, module: nn.Module, weight: DTensor) -> Placement:
    """Raises Failed (SETTINGS_INVALID)."""
    cuts = [(dim, how) for dim, how in enumerate(weight.placements) if not how.is_replicate()]
    if not cuts:
        return Placement()
    along = [getattr(how, "dim", None) for _, how in cuts]
    if len(cuts) > 1 or along[0] is None:
        raise _unclear(path, f"its weight is placed as {weight.placements}")
    mesh_dim, how = cuts[0]
    is_output = (along[0] % weight.dim() == 0) != is_transposed(module)
    rank, size = weight.device_mesh.get_local_rank(mesh_dim), weight.device_mesh.size(mesh_dim)
    return Placement(rank, size, "column" if is_output else "row", getattr(how, "split_factor", 1))


def held_base(base: BaseSpec, sharding: Sharding) -> BaseSpec:
    """The base's table with the widths that this rank holds: what its live model is compared with.

    Raises:
        Failed: SETTINGS_INVALID as `Sharding.check`.
    """
    if sharding.size == 1:
        return base
    sharding.check(base)
    modules = []
    for module in base.modules:
        if module.kind in {ModuleKind.LINEAR, ModuleKind.CONV1D}:
            cut = sharding.cut(module.path, module.in_features, module.out_features)
            module = replace(module, in_features=cut.in_features, out_features=cut.out_features)  # noqa: PLW2901
        modules.append(module)
    return BaseSpec.of(modules, id=base.id, revision=base.revision)


def check_placement(site: Site, base: BaseSpec, sharding: Sharding) -> None:
    """Whether the weight of a site is cut as the sharding says: equal widths may be other features.

    A weight that is no DTensor does not say how it is cut, and is believed.

    Raises:
        Failed: SETTINGS_INVALID naming the module.
    """
    weight = _linear_weight(site.module)
    if weight is None:
        return
    in_features, out_features = _widths(site.module, weight)
    placement = placement_of(site.path, site.module, weight)
    features = out_features if placement.axis == "column" else in_features
    live = placement.sharding(site.path, features).cut(site.path, in_features, out_features)
    said = _said(site, base, sharding)
    if live != said:
        raise error(
            Code.SETTINGS_INVALID, f"sharding: {site.path}",
            f"this rank's weight holds inputs {live.inputs} and outputs {live.outputs}, the sharding says "
            f"{said.inputs} and {said.outputs}",
            "Take the sharding from the model (sharding_of). A fused linear that is cut across its parts cannot be "
            "served by their names.",
        )  # fmt: skip


def _said(site: Site, base: BaseSpec, sharding: Sharding) -> Cut:
    """What a site holds, in features of the whole live module."""
    outputs: list[tuple[int, int]] = []
    inputs: Ranges = ((0, site.in_features),)
    offset = 0
    for part in site.slices:
        entry = base.module(part.path)
        assert entry is not None, "a site's slices are modules of the table"
        cut = sharding.cut(part.path, entry.in_features, entry.out_features)
        outputs += [(offset + begin, offset + end) for begin, end in cut.outputs]
        inputs, offset = cut.inputs, offset + entry.out_features
    return Cut(inputs, joined(outputs))


def _linear_weight(module: nn.Module) -> DTensor | None:
    """The weight of a linear, or of a Conv1D, if it is distributed."""
    weight = getattr(module, "weight", None)
    if isinstance(module, nn.Embedding) or not isinstance(weight, torch.Tensor) or weight.dim() != 2:
        return None
    return as_dtensor(weight)


def _widths(module: nn.Module, weight: DTensor) -> tuple[int, int]:
    """(in_features, out_features) of the whole."""
    out_features, in_features = reversed(weight.shape) if is_transposed(module) else weight.shape
    return int(in_features), int(out_features)


def _unclear(where: str, message: str) -> AdapterdError:
    return error(
        Code.SETTINGS_INVALID, f"sharding: {where}", message,
        "Served are weights that are replicated, or cut over one dimension of the mesh, along inputs or outputs.",
    )  # fmt: skip
