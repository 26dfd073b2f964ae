"""Where each module of a resident adapter lies in the arena: its block table.

A table is made once per use of a slot and kept until the slot's generation moves on. It holds no
tensors and no copy of the layout, only pieces of `layout.blocks`: thousands of residents stay cheap.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from adapterd.gpu_cache.engine.reference import Term
from adapterd.loader.base_model import EXPERTS_PART
from adapterd.loader.errors import Code, error
from adapterd.loader.layout import Block, Matrix

if TYPE_CHECKING:
    from torch import Tensor

    from adapterd.gpu_cache.engine.plan import ResidentLike

TORCH_DTYPE: Mapping[str, torch.dtype] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class ModuleBlocks:
    """One adapted module: its effective scaling and its rank blocks, rank rows ascending."""

    scaling: float
    a: tuple[Block, ...]
    b: tuple[Block, ...]


class ResidentTable:
    """The modules of one resident, by the adapter's own module path.

    Blocks are looked up when the first is asked for: where kernels run, nobody does.

    Attributes:
        paths: of the modules; the same object for equal sets.
    """

    def __init__(self, resident: ResidentLike, paths: frozenset[str]) -> None:
        self.resident, self.paths = resident, paths

    @cached_property
    def modules(self) -> Mapping[str, ModuleBlocks]:
        return _modules(self.resident)

    def term(self, path: str, weight: float, arena: Tensor) -> Term | None:
        """What this resident adds to module `path`, as views into the arena; None if it leaves it alone."""
        module = self.modules.get(path)
        if module is None:
            return None
        views = [tuple(self._view(block, arena) for block in side) for side in (module.a, module.b)]
        return Term(views[0], views[1], module.scaling * weight)

    def _view(self, block: Block, arena: Tensor) -> Tensor:
        """[rows, width] of the layout's dtype; a block lies inside one page, so it is one piece."""
        layout = self.resident.layout
        dtype = TORCH_DTYPE[layout.dtype]
        begin = self.resident.pages[block.page] * layout.page_bytes + block.offset
        raw = arena.narrow(0, begin, block.rows * block.width * dtype.itemsize)
        return raw.view(dtype).view(block.rows, block.width)


class Tables:
    """The tables of what is resident, by slot. Not thread-safe: the engine's step lock guards it.

    Args:
        served: every module path that the engine has wrapped.
    """

    def __init__(self, served: Collection[str]) -> None:
        self._served = frozenset(served)
        self._by_slot: dict[int, ResidentTable] = {}
        self._paths: dict[frozenset[str], frozenset[str]] = {}

    def of(self, resident: ResidentLike) -> ResidentTable:
        """The table of `resident`.

        Raises:
            Failed: MODULE_NOT_SERVED, a problem for each module that the engine did not wrap (I24).
        """
        kept = self._by_slot.get(resident.slot)
        if kept is not None and _same_use(kept.resident, resident):
            return kept
        self._check(resident)
        paths = frozenset([module.name for module in resident.manifest.modules])
        table = ResidentTable(resident, self._paths.setdefault(paths, paths))
        self._by_slot[resident.slot] = table
        return table

    def _check(self, resident: ResidentLike) -> None:
        missing = [m.name for m in resident.manifest.modules if m.name not in self._served]
        if missing:
            more = f" and {len(missing) - 1} more modules" if len(missing) > 1 else ""
            adapts = f"version sha256:{resident.key.digest} adapts this module{more}"
            if EXPERTS_PART in missing[0].split("."):
                raise error(
                    Code.MODULE_NOT_SERVED, missing[0], f"{adapts}, and adapters of experts are not served",
                    "Publish it without its modules of experts.",
                )  # fmt: skip
            raise error(
                Code.MODULE_NOT_SERVED, missing[0], f"{adapts}, not wrapped by the engine",
                "Name it in `targets`, name the linear that holds it in `stacked`, or publish without it.",
            )  # fmt: skip


def _same_use(kept: ResidentLike, wanted: ResidentLike) -> bool:
    return kept is wanted or (kept.generation == wanted.generation and kept.key == wanted.key)


def _modules(resident: ResidentLike) -> dict[str, ModuleBlocks]:
    placed: dict[tuple[int, Matrix], list[Block]] = {}
    for block in resident.layout.blocks:
        placed.setdefault((block.module, block.matrix), []).append(block)
    return {
        module.name: ModuleBlocks(module.scaling, _rising(placed[index, "a"]), _rising(placed[index, "b"]))
        for index, module in enumerate(resident.manifest.modules)
    }


def _rising(blocks: list[Block]) -> tuple[Block, ...]:
    return tuple(sorted(blocks, key=lambda block: block.row))
