"""Where the weight of each adapted module lies in the base's files, and whether it is the module's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from adapterd.loader.base_directory import FAMILIES, Family
from adapterd.loader.base_model import BaseModule, BaseSpec, ModuleKind
from adapterd.loader.checks.fit import head_paths
from adapterd.loader.errors import Code, error
from adapterd.loader.formats.text import shown
from adapterd.loader.manifest import Manifest, ModuleEntry
from adapterd.loader.merge.matrices import Stored

PACKED_PARTS = ("qweight", "weight_packed")


@dataclass(frozen=True, slots=True)
class Target:
    """One adapted module in the base's files.

    Attributes:
        path: the module's path as the files have it: its tensors are `path.weight` or `path.qweight`, and so on.
        transposed: a Conv1D, whose weight is [in, out].
    """

    module: ModuleEntry
    path: str
    transposed: bool


def find_targets(
    manifest: Manifest, base: BaseSpec, config: Mapping[str, Any], tensors: Mapping[str, Stored]
) -> dict[str, Target]:
    """Every adapted module, by its path in the files.

    Args:
        tensors: of the base, by name.

    Raises:
        Refused: UNKNOWN_MODULE where no file holds a weight of the module; UNSUPPORTED_FEATURE for an output head,
            which may share its weight with the input embedding, and that one the adapter does not change.
    """
    heads = head_paths(base)
    found = {}
    for module in manifest.modules:
        entry = base.module(module.name)
        if entry is None:
            raise error(Code.UNKNOWN_MODULE, shown(module.name), "is not in the base's table")
        if entry.path in heads:
            message = "is an output head, whose weight may be the input embedding's, too: it is not merged"
            raise error(Code.UNSUPPORTED_FEATURE, shown(module.name), message)
        path = _stored_path(entry, config, tensors)
        found[path] = Target(module, path, entry.kind is ModuleKind.CONV1D)
    return found


def _stored_path(entry: BaseModule, config: Mapping[str, Any], tensors: Mapping[str, Stored]) -> str:
    """Some files hold the body of a model with a head bare, or the reverse (`base_directory.Family.prefix`)."""
    prefix = FAMILIES.get(str(config.get("model_type")), Family()).prefix
    names = [entry.path]
    if prefix:
        names += [entry.path.removeprefix(f"{prefix}."), f"{prefix}.{entry.path}"]
    held = {n for n in names if any(f"{n}.{part}" in tensors for part in ("weight", *PACKED_PARTS))}
    if len(held) == 1:
        return held.pop()
    if held:
        raise error(Code.UNKNOWN_MODULE, shown(entry.path), f"the files have several weights for it: {sorted(held)}")
    raise error(
        Code.UNKNOWN_MODULE, shown(entry.path), "the base's files hold no weight of its own for it",
        "They may be written for another version of the model's code: save them again with the version that serves.",
    )  # fmt: skip


def check_shape(target: Target, stored: Stored) -> None:
    """Raises Refused (SHAPE_MISMATCH, DTYPE_UNSUPPORTED): what is stored is not the module's weight as floats."""
    entry, module = stored.entry, target.module
    wanted = (module.out_features, module.in_features)
    wanted = wanted[::-1] if target.transposed else wanted
    if entry.dtype not in {"F64", "F32", "F16", "BF16"}:
        raise error(
            Code.DTYPE_UNSUPPORTED, shown(entry.name), f"is {entry.dtype}: floats are not added to packed integers",
            "config.json does not say how the base is quantised; merge into its original in bfloat16 or float32.",
        )  # fmt: skip
    if entry.shape != wanted:
        raise error(Code.SHAPE_MISMATCH, shown(entry.name), f"is {list(entry.shape)}, wanted {list(wanted)}")
