"""The demo's one readable table of what happened."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from adapterd.cli.output import EXIT_OK, Report, rows, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from adapterd.cli.demo.attacks import Attack
    from adapterd.cli.demo.serving import Served

EXIT_DIFFERS = 1


def demo_report(served: Served, attacks: Sequence[Attack], device: str, seconds: float) -> Report:
    """The report; status 1 if a row differs or an attack was not refused as it must be."""
    wrong = [r.label for r in served.rows if not r.equal] + [a.name for a in attacks if not a.held]
    body = {
        "device": device,
        "kernel": served.kernel,
        "seconds": round(seconds, 2),
        "rows": [
            {"label": r.label, "rows": r.rows, "error": r.error, "equal": r.equal, "compared": r.how}
            for r in served.rows
        ],
        "loads": [{"ref": t.label, "cold_seconds": t.cold, "warm_seconds": t.warm} for t in served.loads],
        "attacks": [
            {
                "name": a.name,
                "refused_by": a.who_refuses,
                "wanted": a.wanted,
                "found": a.found,
                "held": a.held,
            }
            for a in attacks
        ],
        "wrong": wrong,
    }
    return Report(
        body,
        ids=wrong,
        view=lambda: _view(served, attacks, device, seconds, wrong),
        status=EXIT_DIFFERS if wrong else EXIT_OK,
    )


def _view(
    served: Served, attacks: Sequence[Attack], device: str, seconds: float, wrong: Sequence[str]
) -> Iterator[RenderableType]:
    batch = table("sequence", "rows", "largest difference", "compared by", "", right=("rows",))
    batch.title = f"One mixed batch on {device}, kernel {served.kernel}, {served.digests} versions"
    lines = ((r.label, r.rows, f"{r.error:.1e} of the largest logit", r.how, _mark(r.equal)) for r in served.rows)
    yield rows(batch, lines)
    loads = table(
        "adapter",
        "cold: registry → ready",
        "warm: resident",
        right=("cold: registry → ready", "warm: resident"),
    )
    loads.title = "Loading, from acquire to ready"
    yield rows(loads, ((t.label, f"{t.cold * 1e3:.1f} ms", f"{t.warm * 1e6:.0f} µs") for t in served.loads))
    refused = table("attack", "refused by", "must be", "was", "")
    refused.title = "Attacks"
    yield rows(refused, ((a.name, a.who_refuses, a.wanted, a.found, _mark(a.held)) for a in attacks))
    verdict = "everything as it must be" if not wrong else f"WRONG: {', '.join(wrong)}"
    yield f"{verdict}; {seconds:.1f} s"


def _mark(good: bool) -> str:
    return "ok" if good else "WRONG"
