"""`bench kernels` at work: what the command's words mean, and what it tells."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapterd.cli.credentials import named, write_private
from adapterd.cli.output import Report, facts, note, plain, rows, table
from adapterd.loader.errors import Code, Problem, error

if TYPE_CHECKING:
    from rich.console import RenderableType

    from adapterd.gpu_cache.engine.tuning.face import Tuning
    from adapterd.gpu_cache.engine.tuning.machine import Machine
    from adapterd.gpu_cache.engine.tuning.measuring import Measured
    from adapterd.gpu_cache.engine.tuning.workloads import Widths

Linears = Sequence[tuple[int, tuple[int, ...]]]
TUNED_RANKS = (16, 64, 0)
DEFAULT_MODE, INVARIANT_MODE = "default", "batch-invariant"


def run_bench(
    linears: Linears, row_counts: Sequence[int], ranks: Sequence[int], device: str, tuning: Path | None,
    *, batch_invariant: bool,
) -> Report:  # fmt: skip
    """A row for each workload and mode.

    Raises:
        AdapterdError: DEVICE_ERROR; SETTINGS_INVALID or PATH_NOT_FOUND of `tuning`.
    """
    machine = _machine(device)
    from adapterd.gpu_cache.engine.tuning.face import measured, rate_of
    from adapterd.gpu_cache.engine.tuning.workloads import DECODE_ROWS, PREFILL_ROWS, RANKS, workloads

    chosen = workloads(_widths(linears), row_counts or (*DECODE_ROWS, *PREFILL_ROWS), ranks or RANKS)
    rate = rate_of(machine)
    found: list[tuple[str, Measured]] = []
    problems: list[Problem] = []

    for mode in (DEFAULT_MODE, INVARIANT_MODE) if batch_invariant else (DEFAULT_MODE,):
        invariant = mode == INVARIANT_MODE
        for one in measured(machine, chosen, rate, problems, tuning=tuning, batch_invariant=invariant):
            note(f"{len(found) + 1} {plain(one.workload.name)}: {one.us:.1f} µs, {one.ratio:.2f} of the floor")
            found.append((mode, one))
    return _bench_report(machine, rate, found, problems)


def _bench_report(
    machine: Machine, rate: float, found: Sequence[tuple[str, Measured]], problems: Sequence[Problem]
) -> Report:
    cold = sum(one.cold_s for _, one in found)
    body = {
        "machine": machine.as_json(), "copy_bytes_per_second": rate, "cold_seconds": cold,
        "rows": [{"mode": mode, **one.as_json()} for mode, one in found],
    }  # fmt: skip

    def view() -> Iterable[RenderableType]:
        yield facts(
            [
                ("card", machine.name),
                ("copy", f"{rate / 1e12:.2f} TB/s"),
                ("cold", f"{cold:.1f} s for the first steps, in none of the times below"),
            ]
        )
        lines = ((one.workload.name, mode, *_times(one), _config(one.config)) for mode, one in found)
        yield rows(table("workload", "mode", "µs", "floor", "×", "config", right=("µs", "floor", "×")), lines)

    names = [f"{one.workload.name}\t{mode}\t{one.us:.2f}" for mode, one in found]
    return Report(body, names, view, problems, status=1 if problems else 0)


def _times(one: Measured) -> tuple[str, str, str]:
    return f"{one.us:.1f}", f"{one.floor_us:.1f}", f"{one.ratio:.2f}"


def _config(config: dict[str, int]) -> str:
    return " ".join(f"{name}={value}" for name, value in config.items())


def run_tune(
    linears: Linears, row_counts: Sequence[int], ranks: Sequence[int], device: str, out: Path, minutes: float
) -> Report:
    """The table at `out`, whole or not at all, with what was measured in time.

    Raises:
        AdapterdError: DEVICE_ERROR, ALREADY_EXISTS, PATH_NOT_FOUND, STORAGE_FULL.
    """
    _check_room(out)
    machine = _machine(device)
    from adapterd.gpu_cache.engine.tuning.cases import cases
    from adapterd.gpu_cache.engine.tuning.face import tune
    from adapterd.gpu_cache.engine.tuning.workloads import DECODE_ROWS, PREFILL_ROWS

    chosen = cases(_widths(linears), row_counts or (*DECODE_ROWS, *PREFILL_ROWS), ranks or TUNED_RANKS)
    began = time.monotonic()

    def told(line: str) -> None:
        note(f"[{time.monotonic() - began:4.0f} s] {plain(line)}")

    done = tune(machine, chosen, 60 * minutes, told)
    write_private(out, done.table.text().encode(), mode=0o644)
    return _tune_report(machine, done, out)


def _tune_report(machine: Machine, done: Tuning, out: Path) -> Report:
    tally = asdict(done.tally)
    body: dict[str, Any] = {
        "machine": machine.as_json(), "file": str(out), "seconds": done.seconds, "kernels": done.kernels,
        "tally": tally, "entries": done.table.as_json()["entries"],
    }  # fmt: skip

    def view() -> Iterable[RenderableType]:
        counts = [(name.replace("_", " "), value) for name, value in tally.items() if name != "left_out"]
        left = ("left out", ", ".join(done.tally.left_out) or "nothing")
        yield facts([("card", machine.name), ("seconds", f"{done.seconds:.0f}"), *counts, left, ("table", out)])
        lines = (
            (str(e.regime), *e.key, f"{e.us:.1f}", f"{e.rule_us:.1f}", _config(asdict(e.config)))
            for e in done.table.entries
        )
        columns = ("regime", "in", "out", "slices", "lanes", "rows", "µs", "by rule", "config")
        yield rows(table(*columns, right=columns[1:-1]), lines)

    return Report(body, [str(out)], view)


def _check_room(out: Path) -> None:
    """Before minutes go into what could not be written."""
    if named(out).exists():
        raise error(Code.ALREADY_EXISTS, str(out), "exists already", "Move it away or name another place.")
    if not out.parent.is_dir():
        raise error(Code.PATH_NOT_FOUND, str(out.parent), "there is no such folder")


def _machine(device: str) -> Machine:
    if importlib.util.find_spec("torch") is None:
        raise error(Code.DEVICE_ERROR, device, "torch is not installed", "Install adapterd with the `worker` extra.")
    from adapterd.gpu_cache.engine.tuning.machine import machine_at

    return machine_at(device)


def _widths(linears: Linears) -> tuple[Widths, ...]:
    from adapterd.gpu_cache.engine.tuning.workloads import LLAMA_8B, Widths

    made = [Widths(f"{k}:{','.join(map(str, parts))}", k, parts) for k, parts in linears]
    return (*dict.fromkeys(made),) or LLAMA_8B
