"""At bind time: is the live model the one that the base's table describes?

Adapters were admitted for the table. A model that lacks some of its modules, or has them with other
widths or as something else, is another model or another library's idea of it, and would be noticed
late: as an adapter that is refused at a step, or worse, as one that fits by chance.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set

from torch import nn

from adapterd.gpu_cache.engine.widths import live_widths
from adapterd.loader.base_model import BaseModule, BaseSpec, ModuleKind, stack_path
from adapterd.loader.errors import Code, error

SHOWN = 3


def check_table(model: nn.Module, base: BaseSpec, held: Set[str]) -> None:
    """Compare every module of the table with the live one.

    What the model has beside the table is no fault: no adapter can name it. A linear does for a Conv1D of
    the same widths and the reverse, because quantisers replace one by the other and an adapter cannot tell.

    Args:
        held: modules of the table that a fused linear is known to hold, with their widths.

    Raises:
        Failed: BASE_TABLE_INVALID at the first module at fault, naming the first few.
    """
    live = dict(model.named_modules(remove_duplicate=False))
    stacks = {stack_path(path) for path in live}
    unheld = (entry for entry in base.modules if entry.path not in held)
    faults = [(e.path, fault) for e in unheld if (fault := _fault(e, live, stacks))]
    if not faults:
        return
    listed = "; ".join(f"{path} {fault}" for path, fault in faults[:SHOWN])
    more = f"; and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
    raise error(
        Code.BASE_TABLE_INVALID, faults[0][0],
        f"the live model is not the one of the module table of {base.id}: {listed}{more}",
        "Load the model that the table was made from, or register the table of this one. A linear that holds "
        "several of the table's modules is named in `stacked`.",
    )  # fmt: skip


def _fault(entry: BaseModule, live: Mapping[str, nn.Module], stacks: Set[str]) -> str:
    """What is wrong, or nothing."""
    if entry.kind is ModuleKind.EXPERTS:
        return "" if entry.path in stacks else "is missing"
    module = live.get(entry.path)
    if module is None:
        return "is missing"
    wanted = entry.in_features, entry.out_features
    if entry.kind is ModuleKind.EMBEDDING:
        return "".join(_embedding_faults(module, wanted))
    found = live_widths(module)
    if found is None:
        return f"is a {type(module).__name__} and no linear"
    return _difference("in_features", "out_features", found, wanted)


def _embedding_faults(module: nn.Module, wanted: tuple[int, int]) -> Iterator[str]:
    """Engines bring embeddings of their own, padded and split, and no adapter touches them: those pass."""
    if live_widths(module) is not None:
        yield "is a linear and no embedding"
    elif isinstance(module, nn.Embedding):
        yield _difference("rows", "width", (module.num_embeddings, module.embedding_dim), wanted)


def _difference(first: str, second: str, found: tuple[int, int], wanted: tuple[int, int]) -> str:
    if found == wanted:
        return ""
    return f"has {first} {found[0]} and {second} {found[1]}, by the table {wanted[0]} and {wanted[1]}"
