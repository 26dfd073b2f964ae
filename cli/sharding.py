"""`--tp` and its rules: which linears a tensor-parallel group cuts, and along which side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from adapterd.loader.base_model import BaseSpec
    from adapterd.loader.sharding import Axis, Rule, Sharding

MOST_RANKS = 64
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROWS = ("o_proj", "down_proj")
"""As the plans of llama-like models cut their linears; no rule is made where a base has none of that name."""

Tp = Annotated[int, typer.Option("--tp", min=1, max=MOST_RANKS, help="Ranks of a tensor-parallel group.")]
Column = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME[=SLICES]",
        help="A linear whose outputs are cut; SLICES, a divisor of the ranks, where fewer slices than ranks exist, as "
        "of key and value heads. Repeatable; with it, or --row, no names are taken for granted.",
        show_default=", ".join(COLUMNS),
    ),
]
Row = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME[=SLICES]",
        help="A linear whose inputs are cut. Repeatable.",
        show_default=", ".join(ROWS),
    ),
]


def first_shard(base: BaseSpec, size: int, column: Sequence[str], row: Sequence[str]) -> Sharding:
    """Of the first rank. Shards are even, or refused: each of the other ranks holds as much.

    Raises:
        typer.BadParameter: rules without ranks, or none where there must be some.
        Failed: SETTINGS_INVALID for rules that the base cannot be cut by.
    """
    from adapterd.loader.sharding import WHOLE, Sharding

    if size == 1:
        if column or row:
            raise typer.BadParameter("--column and --row say how --tp ranks cut the base", param_hint="--tp")
        return WHOLE
    rules = tuple([*_said(column, "column", size), *_said(row, "row", size)] or _usual(base, size))
    if not rules:
        message = "the base has none of the usual names: say with --column and --row which linears are cut"
        raise typer.BadParameter(message, param_hint="--tp")
    made = Sharding(0, size, rules)
    made.check(base)
    return made


def _usual(base: BaseSpec, size: int) -> Iterator[Rule]:
    from adapterd.loader.base_model import ModuleKind
    from adapterd.loader.sharding import Rule

    there = {m.path.rpartition(".")[2] for m in base.modules if m.kind is not ModuleKind.EXPERTS}
    yield from (Rule(name, "column", size) for name in COLUMNS if name in there)
    yield from (Rule(name, "row", size) for name in ROWS if name in there)


def _said(words: Iterable[str], axis: Axis, size: int) -> Iterator[Rule]:
    from adapterd.loader.sharding import Rule

    for word in words:
        name, equals, slices = word.partition("=")
        if not name or (equals and not (slices.isascii() and slices.isdecimal() and len(slices) < 6)):
            raise typer.BadParameter(f"{word!r} is not NAME or NAME=SLICES", param_hint=f"--{axis}")
        yield Rule(name, axis, int(slices) if equals else size)
