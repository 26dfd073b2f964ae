"""Which request runs next: the adapter-aware selector against first come first served and strict locality.

    python -m benchmarks.scheduling

A simulation, on one core and without a GPU: half a minute. Writes benchmarks/results/scheduling.json and
scheduling.md, and docs/img/scheduling.svg. `docs/scheduling.md` says what the model leaves out.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.charts import Panel, Series, chart
from benchmarks.machine import ROOT, circumstances, store
from benchmarks.scheduling_world import GIB, Costs, Played, Policy, SimRequest, Trace, play

from adapterd.gpu_cache import Place
from adapterd.gpu_cache.selector import PATIENCE, Selection, Selector
from adapterd.gpu_cache.step_budget import AdapterKey, Fits, Reservation, StepBudget, StepLimits, Want
from adapterd.gpu_cache.whereabouts import Whereabouts

EXPONENTS = (0.6, 0.9, 1.2)
BURSTS = (0, 200)
LIMITS = StepLimits(kv_blocks=8192, rows=2048, adapter_bytes=16 * GIB, load_slots=8, load_bytes=GIB)
Residency = dict[AdapterKey, Whereabouts]


class Plain(ABC):
    """What the compared policies share: the same budget, rows for those that run, and loads that end on arrival."""

    def __init__(self, budget: StepBudget) -> None:
        self.budget = budget
        self.held: dict[str, Reservation] = {}
        self.loading: dict[AdapterKey, Reservation] = {}
        self.arrived: dict[AdapterKey, Reservation] = {}
        self.rows: Reservation | None = None

    def select(
        self, waiting: Sequence[SimRequest], running: Sequence[SimRequest], residency: Residency, *, tick: int
    ) -> Selection[SimRequest]:
        self._settle(running, residency)
        started, loads = self.choose(waiting, residency)
        return Selection((*running, *started), tuple(started), tuple(loads), self.budget.held, ())

    @abstractmethod
    def choose(self, waiting: Sequence[SimRequest], residency: Residency) -> tuple[list[SimRequest], list[AdapterKey]]:
        """Who starts now, and which adapters are loaded for whom."""

    def _settle(self, running: Sequence[SimRequest], residency: Residency) -> None:
        for ended in self.held.keys() - {request.id for request in running}:
            self.held.pop(ended).give_back()
        for key in [key for key in self.loading if residency[key].place is not Place.STAGING]:
            self.loading.pop(key).give_back()
            kept = self.budget.reserve(Want(adapters={key: residency[key].nbytes}))
            assert isinstance(kept, Reservation)
            self.arrived[key] = kept  # until the first that wants it starts
        if self.rows is not None:
            self.rows.give_back()
        rows = self.budget.reserve(Want(rows=sum(request.rows for request in running)))
        assert isinstance(rows, Reservation)
        self.rows = rows

    def start(self, request: SimRequest, residency: Residency) -> bool:
        keys = {(request.tenant, digest): residency[request.tenant, digest] for digest in request.adapters}
        if any(each.place is not Place.RESIDENT for each in keys.values()):
            return False
        wanted = {key: each.nbytes for key, each in keys.items()}
        whole = Want(kv_blocks=request.kv_blocks, rows=request.rows, adapters=wanted)
        if self.rows is None or not isinstance(self.budget.ask(whole), Fits):
            return False
        held = self.budget.reserve(Want(kv_blocks=request.kv_blocks, adapters=wanted))
        assert isinstance(held, Reservation)
        self.held[request.id] = held
        self.budget.grow(self.rows, Want(rows=request.rows))
        for key in wanted.keys() & self.arrived.keys():
            self.arrived.pop(key).give_back()
        return True

    def load(self, request: SimRequest, residency: Residency) -> list[AdapterKey]:
        found: list[AdapterKey] = []
        for key in ((request.tenant, digest) for digest in request.adapters):
            if residency[key].place in {Place.RESIDENT, Place.STAGING} or key in self.loading:
                continue
            size = residency[key].nbytes
            answer = self.budget.reserve(Want(adapters={key: size}, load_slots=1, load_bytes=size))
            if isinstance(answer, Reservation):
                self.loading[key] = answer
                found.append(key)
        return found


class FirstCome(Plain):
    """Strictly by arrival. The first that cannot start loads its adapter, and everybody behind it waits."""

    look_ahead = 1

    def choose(self, waiting: Sequence[SimRequest], residency: Residency) -> tuple[list[SimRequest], list[AdapterKey]]:
        started: list[SimRequest] = []
        for request in waiting:
            if not self.start(request, residency):
                break
            started.append(request)
        ahead = waiting[len(started) : len(started) + self.look_ahead]
        return started, [key for request in ahead for key in self.load(request, residency)]


class FirstComeLookingAhead(FirstCome):
    """The same, but the adapters of the next 32 load meanwhile: what look-ahead alone is worth."""

    look_ahead = 32


class Locality(Plain):
    """Whoever's adapter is in VRAM, by arrival; others are loaded only when nobody like that is left."""

    def choose(self, waiting: Sequence[SimRequest], residency: Residency) -> tuple[list[SimRequest], list[AdapterKey]]:
        started = [request for request in waiting if self.start(request, residency)]
        left = [request for request in waiting if request.id not in self.held]
        if any(self._is_here(request, residency) for request in left):
            return started, []
        return started, [key for request in left[:32] for key in self.load(request, residency)]

    def _is_here(self, request: SimRequest, residency: Residency) -> bool:
        return all(residency[request.tenant, digest].place is Place.RESIDENT for digest in request.adapters)


POLICIES: dict[str, Callable[[StepBudget], Policy]] = {
    "first come": FirstCome,
    "first come, looking ahead": FirstComeLookingAhead,
    "strict locality": Locality,
    "selector": Selector,
}
PATIENCES = (0, PATIENCE, 8, 64, 512)


def measured(trace: Trace, played: Played) -> dict[str, Any]:
    """Seconds. `others` are the tenants without the burst; `base` are their base rows."""
    burst = "tenant-0"
    waits = {request: (request.first_token or 0.0) - request.at for request in played.requests}
    others = [wait for request, wait in waits.items() if request.tenant != burst]
    base = [wait for request, wait in waits.items() if request.tenant != burst and not request.adapters]
    means = {t: statistics.fmean(w for r, w in waits.items() if r.tenant == t) for t in {r.tenant for r in waits}}
    return {
        "ttft_p50": _quantile(list(waits.values()), 0.5),
        "ttft_p99": _quantile(list(waits.values()), 0.99),
        "ttft_most": max(waits.values()),
        "ttft_p99_others": _quantile(others, 0.99),
        "ttft_p99_base": _quantile(base, 0.99),
        "ttft_mean_by_tenant": {tenant: round(mean, 4) for tenant, mean in sorted(means.items())},
        "tokens_per_second": played.tokens / trace.seconds,
        "passes_most": max(request.passes for request in played.requests),
        "waiting_most": played.most_waiting,
        "segments": played.segments,
        "loads": played.memory.loads,
        "cold_loads": played.memory.cold_loads,
        "steps": played.steps,
        "requests": len(played.requests),
    }


def _quantile(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def selection_seconds(count: int = 10_000) -> float:
    """The median time of one selection with so many waiting, over 2,000 adapters, most of which are elsewhere."""
    trace = Trace(exponent=0.9, seconds=1.0, rate=float(count), burst=0)
    waiting = trace.requests()
    for request in waiting:
        request.rows = request.prompt
    residency = {
        key: Whereabouts(Place.RESIDENT if n % 20 == 0 else Place.HOST, size)
        for n, (key, size) in enumerate(trace.sizes().items())
    }
    selector, running, times = Selector[SimRequest](StepBudget(LIMITS)), list[SimRequest](), list[float]()
    for tick in range(7):
        began = time.perf_counter()
        chosen = selector.select(waiting, running, residency, tick=tick)
        times.append(time.perf_counter() - began)
        running += chosen.started
        for request in chosen.started:
            request.rows = 1
        gone = set(chosen.started)
        waiting = [request for request in waiting if request not in gone]
    return statistics.median(times)


COLUMNS = (
    ("TTFT p50 s", "ttft_p50", "{:.2f}"),
    ("TTFT p99 s", "ttft_p99", "{:.2f}"),
    ("without the burst's tenant", "ttft_p99_others", "{:.2f}"),
    ("their base rows", "ttft_p99_base", "{:.2f}"),
    ("tokens/s", "tokens_per_second", "{:.0f}"),
    ("passed over, most", "passes_most", "{:d}"),
    ("segments a step", "segments", "{:.0f}"),
    ("loads", "loads", "{:d}"),
)


def as_table(result: dict[str, Any]) -> str:
    """A short page for people."""
    trace = result["traces"][0]
    head = ["burst", "Zipf exponent", "policy", *(title for title, _, _ in COLUMNS)]
    lines = ["# Scheduling: a simulation", "", f"`{result['command']}` at commit {result['commit'][:12]}.", ""]
    lines += [
        f"{trace['adapters']} adapters of ranks 8 to 64, {trace['tenants']} tenants, {trace['rate']:.0f} requests a",
        f"second for {trace['seconds']:.0f} s; burst: so many more of one tenant at once.",
        "",
        f"| {' | '.join(head)} |",
        "|" + "---|" * len(head),
    ]
    for row in (*result["rows"], *result["patiences"]):
        cells = [str(row["burst"]), f"{row['exponent']:.1f}", row["policy"]]
        cells += [form.format(row[key]) for _, key, form in COLUMNS]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        f"One selection with 10,000 waiting requests: {result['selection_seconds'] * 1e3:.0f} ms (median of 7).",
    ]
    return "\n".join(lines) + "\n"


def drawn(rows: list[dict[str, Any]]) -> str:
    def panel(title: str, burst: int, key: str, log: bool) -> Panel:
        chosen = [row for row in rows if row["burst"] == burst]
        lines = [
            Series(name, [(row["exponent"], row[key]) for row in chosen if row["policy"] == name]) for name in POLICIES
        ]
        return Panel(title, "Zipf exponent of adapter popularity", lines, log)

    none, some = BURSTS
    return chart(
        [
            panel("Time to first token, p99 (s, log)", none, "ttft_p99", True),
            panel("Tokens a second", none, "tokens_per_second", False),
            panel("One tenant bursts: p99 of the others (s, log)", some, "ttft_p99_others", True),
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of simulated arrivals")
    parser.add_argument("--rate", type=float, default=50.0, help="requests a second")
    parser.add_argument("--dry-run", action="store_true", help="store nothing")
    asked = parser.parse_args()
    result: dict[str, Any] = {"what": "scheduling, simulated", **circumstances(), "patience": PATIENCE}
    costs = Costs()
    result["costs"], result["limits"] = asdict(costs), asdict(LIMITS)
    traces = [Trace(exponent, asked.seconds, asked.rate, burst=n) for n in BURSTS for exponent in EXPONENTS]

    def run(trace: Trace, rule: Policy, **named: object) -> dict[str, Any]:
        return {
            "exponent": trace.exponent,
            "burst": trace.burst,
            **named,
            **measured(trace, play(trace, rule, LIMITS, costs)),
        }

    result["traces"] = [asdict(trace) for trace in traces]
    result["rows"] = [
        run(trace, make(StepBudget(LIMITS)), policy=name) for trace in traces for name, make in POLICIES.items()
    ]
    result["patiences"] = [
        run(traces[-len(EXPONENTS)], Selector(StepBudget(LIMITS), patience=patience), policy=f"patience {patience}")
        for patience in PATIENCES
    ]
    result["selection_seconds"] = selection_seconds()
    table = as_table(result)
    if not asked.dry_run:
        store("scheduling", result, table)
        (ROOT / "docs/img").mkdir(exist_ok=True)
        (ROOT / "docs/img/scheduling.svg").write_text(drawn(result["rows"]))
    print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
