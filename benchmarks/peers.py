"""What a table of peers says of the engine: goals E1 to E6 and every workload, from the lines that a harness wrote.

    python -m benchmarks.peers benchmarks/results/kernels-*.jsonl

Reads JSON lines: a header (`kind` = header, with card, versions and rates), then a workload each (`kind` = kernel:
`wl`, `phase`, `shape`, `T`, `dist`, `rank`, `floor_us`, `peers` → name → `graph_us`, `eager_us`, or why there is none).
The engine is the peer `project`, its batch-invariant mode `project_invariant`. A line of the kind endtoend has what a
linear takes with its base GEMM (`base_us`, and by peer `marginal_us` on top). Ratios are inside one file, which is one
run; where several have that mode, the last of them tells it. A prototype (`sketch`) is told, but it is no peer.
Writes benchmarks/results/kernels_peers.md and docs/img/kernels.svg.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.dots import Dots, dots
from benchmarks.machine import ROOT

OURS, INVARIANT = "project", "project_invariant"
NO_PEERS = {OURS, INVARIANT, "sketch"}
NAMES = {
    OURS: "adapterd", INVARIANT: "adapterd, batch-invariant", "vllm": "vLLM", "sglang_v2": "SGLang triton_v2",
    "sglang_csgmv": "SGLang csgmv", "slora_bgmv": "S-LoRA bgmv", "sketch": "prototype",
}  # fmt: skip
FACTS = (
    ("card", "device"),
    ("torch", "torch"),
    ("Triton", "triton"),
    ("CUDA", "cuda"),
    ("driver", "driver"),
    ("commit", "commit"),
)
SHOWN = (OURS, "sglang_v2", "sglang_csgmv", "slora_bgmv", "vllm")
TABLE = ROOT / "benchmarks/results/kernels_peers.md"
PLOT = ROOT / "docs/img/kernels.svg"


@dataclass(frozen=True)
class Measured:
    """One workload of one run. `times`: µs a linear in a replayed graph, by peer; `eager`: launched from Python."""

    run: str
    phase: str
    linear: str
    rows: int
    owners: str
    rank: str
    floor: float
    times: Mapping[str, float]
    eager: Mapping[str, float]
    why: Mapping[str, str]

    @property
    def name(self) -> str:
        owners = {"all": "distinct", "1": "one adapter"}.get(self.owners, self.owners)
        owners = f"{owners} adapters" if owners.isdigit() else owners
        return f"{self.linear} T{self.rows} {owners} r{self.rank.replace('het', ' mixed')}".replace("r mixed", "mixed")

    def without(self, peer: str) -> Measured:
        return replace(self, times={name: us for name, us in self.times.items() if name != peer})

    @property
    def over_floor(self) -> float:
        return self.times[OURS] / self.floor

    @property
    def best_peer(self) -> tuple[str, float] | None:
        peers = {name: us for name, us in self.times.items() if name not in NO_PEERS}
        return min(peers.items(), key=lambda item: item[1]) if peers else None

    @property
    def faster(self) -> float:
        """Than the best peer; NaN without one."""
        return self.best_peer[1] / self.times[OURS] if self.best_peer else math.nan


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def read(path: Path) -> tuple[dict[str, Any], list[Measured]]:
    records = lines_of(path)
    header = next((record for record in records if record["kind"] == "header"), {})
    return header, [_measured(path.name, record) for record in records if record["kind"] == "kernel"]


def _measured(run: str, record: Mapping[str, Any]) -> Measured:
    peers: Mapping[str, Mapping[str, Any]] = record["peers"]
    return Measured(
        run, record["phase"], record["shape"], record["T"], record["dist"], record["rank"], record["floor_us"],
        {name: p["graph_us"] for name, p in peers.items() if "graph_us" in p},
        {name: p["eager_us"] for name, p in peers.items() if "eager_us" in p},
        {name: str(p.get("error") or f"off by {p.get('rel_err')}") for name, p in peers.items() if "graph_us" not in p},
    )  # fmt: skip


# --- goals


@dataclass(frozen=True)
class Goal:
    """Of every workload that `holds` picks, `figure` is to be at most (or at least) `bound`."""

    name: str
    what: str
    holds: Callable[[Measured], bool]
    figure: Callable[[Measured], float]
    bound: float
    most: bool = True

    def row(self, all_of: Iterable[Measured]) -> str:
        values = {m.name: self.figure(m) for m in all_of if self.holds(m) and not math.isnan(self.figure(m))}
        if not values:
            return f"| {self.name} | {self.what} | not measured | | |"
        worst = max(values, key=lambda n: values[n]) if self.most else min(values, key=lambda n: values[n])
        kept = sum((v <= self.bound) if self.most else (v >= self.bound) for v in values.values())
        sign = "≤" if self.most else "≥"
        return (
            f"| {self.name} | {self.what} | {sign} {self.bound:g} | {kept} of {len(values)} | "
            f"{values[worst]:.2f} ({worst}) |"
        )


def _decode(owners: str, rank: str, *linears: str, rows: int = 64) -> Callable[[Measured], bool]:
    def holds(m: Measured) -> bool:
        return (m.phase, m.rows, m.owners, m.rank) == ("decode", rows, owners, rank) and m.linear in linears

    return holds


def _prefill(*ranks: str) -> Callable[[Measured], bool]:
    return lambda m: m.phase == "prefill" and m.owners == "8" and m.rank in ranks


def _over(peer: str) -> Callable[[Measured], float]:
    return lambda m: m.times[peer] / m.times[OURS] if peer in m.times else math.nan


def goals() -> list[Goal]:
    floor: Callable[[Measured], float] = lambda m: m.over_floor  # noqa: E731
    faster: Callable[[Measured], float] = lambda m: m.faster  # noqa: E731
    four = ("qo", "qkv", "gate_up", "down")
    found = [
        Goal("E1", f"{name} T{rows} distinct r16, over the floor", _decode("all", "16", name, rows=rows), floor, most)
        for rows, bounds in ((64, (1.8, 1.5, 1.3, 1.7)), (256, (1.3, 1.2, 1.1, 1.3)))
        for name, most in zip(four, bounds, strict=True)
    ]  # fmt: skip
    found += [
        Goal("E2", "distinct r16 T64, over the best peer", _decode("all", "16", *four), faster, 1.5, most=False),
        Goal("E2", "distinct mixed T64, over the best peer", _decode("all", "het", *four), faster, 1.6, most=False),
    ]
    for rank in ("16", "64"):
        small, large = _decode("zipf", rank, "qo", "qkv"), _decode("zipf", rank, "gate_up")
        found.append(Goal("E2", f"Zipf r{rank} T64, q/o and qkv, over the best peer", small, faster, 1.3, most=False))
        found.append(Goal("E2", f"Zipf r{rank} T64, gate_up, over the best peer", large, faster, 1.1, most=False))
    v2 = _over("sglang_v2")
    found += [
        Goal("E3", "prefill, 8 adapters, all ranks, over triton_v2", _prefill("16", "64", "het"), v2, 1.1, most=False),
        Goal("E3", "prefill, 8 adapters, r16, over the floor", _prefill("16"), floor, 1.4),
        Goal("E5", "eager, T64: csgmv's time over ours", _rows_64, _eager_over("sglang_csgmv"), 1.0, most=False),
        Goal("E6", "batch-invariant over default, decode distinct", _distinct, _invariant_cost, 1.5),
    ]  # fmt: skip
    return found


def _rows_64(m: Measured) -> bool:
    return m.rows == 64


def _distinct(m: Measured) -> bool:
    return m.phase == "decode" and m.owners == "all"


def _eager_over(peer: str) -> Callable[[Measured], float]:
    return lambda m: m.eager[peer] / m.eager[OURS] if {peer, OURS} <= m.eager.keys() else math.nan


def _invariant_cost(m: Measured) -> float:
    return m.times[INVARIANT] / m.times[OURS] if INVARIANT in m.times else math.nan


# --- what LoRA adds to a layer

LAYER = ("decode/qkv/T64/aall/r16", "decode/qo/T64/aall/r16", "decode/gate_up/T64/aall/r16", "decode/down/T64/aall/r16")
"""The four linears of a layer of Llama-8B, 64 rows, each its own adapter of rank 16."""


def layer_rows(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Goal E4, from lines with and without the base GEMM."""
    by_name = {record["wl"]: record for record in records if record["kind"] == "endtoend"}
    if not all(name in by_name for name in LAYER):
        return []
    base = sum(by_name[name]["base_us"] for name in LAYER)
    ours, v2 = (sum(by_name[name]["peers"][peer]["marginal_us"] for name in LAYER) for peer in (OURS, "sglang_v2"))
    told = (
        f"{ours / base:.2f}: {ours:.1f} µs on top of {base:.1f}; triton_v2 {v2:.1f}, beside the GEMM if that is faster"
    )
    return [
        f"| E4 | a layer T64 distinct r16, LoRA over the base | ≤ 0.45 | {_held(ours / base, 0.45)} | {told} |",
        f"| E4 | the same over what triton_v2 adds | ≤ 0.6 | {_held(ours / v2, 0.6)} | {ours / v2:.2f} |",
    ]


def _held(value: float, most: float) -> str:
    return f"{int(value <= most)} of 1"


# --- the page


def table(header: Mapping[str, Any], found: Sequence[Measured], files: Sequence[str], more: Sequence[str] = ()) -> str:
    """Args: more: rows of goals that are not about one workload."""
    names = [name for name in NAMES if any(name in m.times for m in found)]
    lines = [
        "# The engine's kernels beside their peers",
        "",
        ", ".join(f"{word} {header.get(key)}" for word, key in FACTS) + f"; from {', '.join(files)}.",
        "µs a linear in a replayed CUDA graph over buffer sets larger than the L2; (×) is over the floor: the fewest",
        f"bytes over the copy rate of the same run, {header.get('copy_Bps', 0) / 1e12:.2f} TB/s.",
        "",
        "| goal | what | bound | held by | worst |",
        "|---|---|---|---|---|",
        *(goal.row(found) for goal in goals()),
        *more,
        "",
        _summary(found),
        "",
        "| workload | floor | " + " | ".join(NAMES[n] for n in names) + " | over the best peer |",
        "|---" * (len(names) + 3) + "|",
    ]  # fmt: skip
    for m in found if not any(m.best_peer for m in found) else [m for m in found if m.best_peer]:
        cells = [f"{m.times[n]:.1f} ({m.times[n] / m.floor:.2f})" if n in m.times else "–" for n in names]
        lines.append(f"| {m.name} | {m.floor:.1f} | {' | '.join(cells)} | {_than_best(m)} |")
    lost = [(m.name, name, why) for m in found for name, why in m.why.items()]
    if lost:
        lines += ["", "Not timed, because wrong or refused:", ""]
        lines += [f"- {workload}, {NAMES.get(name, name)}: {why[:120]}" for workload, name, why in lost]
    return "\n".join(lines) + "\n"


def _than_best(m: Measured) -> str:
    if m.best_peer is None or OURS not in m.times:
        return "–"
    text = f"{m.faster:.2f}×"
    return f"**{text}**, slower than {NAMES.get(m.best_peer[0], m.best_peer[0])}" if m.faster < 1 else text


def _summary(found: Sequence[Measured]) -> str:
    ratios = [m.faster for m in found if OURS in m.times and not math.isnan(m.faster)]
    if not ratios:
        return "No peer ran."
    ahead = sum(ratio >= 1 for ratio in ratios)
    return (
        f"Faster than the best peer in {ahead} of {len(ratios)} workloads; the median is "
        f"{statistics.median(ratios):.2f} times, the least {min(ratios):.2f}."
    )


def plot(found: Sequence[Measured]) -> str:
    """Decode of 32 rows and more, and prefill: time over floor."""
    kept = [m for m in found if OURS in m.times and m.best_peer and m.rows >= 32 and m.rank in {"16", "64", "het"}]
    kept = [m for m in kept if m.owners in {"all", "zipf", "8"}]
    rows = [(m.name, {NAMES[n]: m.times[n] / m.floor for n in SHOWN if n in m.times}) for m in kept]
    return dots(Dots("Time over the floor, in a replayed graph", "times the floor", [NAMES[n] for n in SHOWN], rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="JSON lines of one run")
    asked = parser.parse_args()
    header: dict[str, Any] = {}
    found: list[Measured] = []
    layers: list[str] = []
    newest = ""
    for path in asked.files:
        own, here = read(path)
        header = header or own
        found += [m for m in here if OURS in m.times or m.why.get(OURS)]
        if any(INVARIANT in m.times for m in here):
            newest = path.name
        layers += layer_rows(lines_of(path))
    found = [m if m.run == newest else m.without(INVARIANT) for m in found]
    if not found:
        raise SystemExit(f"no line of {', '.join(map(str, asked.files))} has the peer {OURS!r}")
    TABLE.write_text(table(header, found, [path.name for path in asked.files], layers))
    PLOT.write_text(plot([m for m in found if OURS in m.times]))
    print(TABLE.read_text())


if __name__ == "__main__":
    main()
