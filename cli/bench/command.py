"""`adapterctl bench …`, as the shell sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from adapterd.cli.boundary import command
from adapterd.cli.output import Report

MOST_ROWS = 16_384
MOST_RANK = 128
MOST_WIDTH = 1 << 20
MOST_PARTS = 8
MIXED = "mixed"

LinearOption = Annotated[
    list[str] | None,
    typer.Option(
        "--linear", metavar="K:N[,N…]", show_default=False,
        help="in_features, and the widths of the modules in it; may be repeated.  [default: those of an 8B Llama]",
    ),
]  # fmt: skip
RowsOption = Annotated[
    list[int] | None,
    typer.Option(
        min=1, max=MOST_ROWS, show_default=False,
        help="Rows of a step; from 512 on a prefill of 8 requests. May be repeated.  [default: 64, 256, 2048, 8192]",
    ),
]  # fmt: skip
RankOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="RANK", show_default=False,
        help=f"1 to {MOST_RANK}, or `{MIXED}`; may be repeated.  [default: 16, 64, {MIXED}; to tune 16, 64]",
    ),
]  # fmt: skip


def register(app: typer.Typer) -> None:
    """Put the commands on `app`."""
    bench = typer.Typer(help="The engine's kernels on the card that is here.", no_args_is_help=True)
    command(bench, "bench.kernels")(kernels)
    app.add_typer(bench, name="bench")


def kernels(
    *,
    linear: LinearOption = None,
    rows: RowsOption = None,
    rank: RankOption = None,
    device: Annotated[str, typer.Option(help="The card.")] = "cuda:0",
    tuning: Annotated[
        Path | None, typer.Option(help="Launch configurations; by default the card's own.", show_default=False)
    ] = None,
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="Time that mode, too, beside the default.")
    ] = False,
    tune: Annotated[bool, typer.Option("--tune", help="Search configurations, and write a table.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The table to make; nothing is overwritten.", show_default=False)
    ] = None,
    minutes: Annotated[
        float, typer.Option(min=0.1, max=1440, help="To tune for; what is not reached by then is left out.")
    ] = 6.0,
) -> Report:
    """Time the LoRA kernels on a CUDA card, over the fewest bytes; or search launch configurations for it.

    Every output is checked against the reference before it is timed. Times are those of a replayed graph; what is
    compiled and loaded first is told by itself.
    """
    chosen = (*map(_linear, linear or ()),)
    ranks = (*map(_rank, rank or ()),)
    if tune and (out is None or tuning is not None or batch_invariant):
        raise typer.BadParameter("takes --out, and neither --tuning nor --batch-invariant", param_hint="--tune")
    if out is not None and not tune:
        raise typer.BadParameter("goes with --tune", param_hint="--out")
    from adapterd.cli.bench.running import run_bench, run_tune

    if out is not None:
        return run_tune(chosen, rows or (), ranks, device, out, minutes)
    return run_bench(chosen, rows or (), ranks, device, tuning, batch_invariant=batch_invariant)


def _linear(text: str) -> tuple[int, tuple[int, ...]]:
    """`4096:14336,14336` as (in_features, widths)."""
    k, _, parts = text.partition(":")
    words = [k, *parts.split(",")]
    if not all(word.isascii() and word.isdecimal() and len(word) <= 7 for word in words):
        raise typer.BadParameter(f"{text!r} is not K:N[,N…]", param_hint="--linear")
    in_features, *widths = map(int, words)
    if not all(1 <= size <= MOST_WIDTH for size in (in_features, *widths)) or len(widths) > MOST_PARTS:
        raise typer.BadParameter(
            f"{text!r}: widths are 1 to {MOST_WIDTH}, and up to {MOST_PARTS} stand side by side", param_hint="--linear"
        )
    return in_features, (*widths,)


def _rank(text: str) -> int:
    """0 for mixed ranks."""
    if text == MIXED:
        return 0
    if not (text.isascii() and text.isdecimal() and len(text) <= 3 and 1 <= int(text) <= MOST_RANK):
        raise typer.BadParameter(f"{text!r} is neither 1 to {MOST_RANK} nor `{MIXED}`", param_hint="--rank")
    return int(text)
