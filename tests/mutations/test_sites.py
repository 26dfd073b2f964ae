"""The finder finds what it should: it must never silently find nothing, and new code must fall under it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections import Counter

import pytest

from mutations.equivalent import EQUIVALENT, excluded
from mutations.install import install, install_probes, place
from mutations.sites import NOT_MUTATED, PACKAGE, ROOT, Mutant, find, find_all, keeps_books, port_methods

MUTANTS = find_all()
FORGETFUL = """
from adapterd.gpu_cache.records import Entry

class Tier:
    def __init__(self, pool):
        self.pool = pool or None

    def turn(self, entry, stream, pages):
        for event in entry.fence.events:
            self._device.wait(stream, event)
        self._device.zero(stream, pages)
        device.copy_runs(stream, pages, pages, [], 1)
        event = self._device.record(stream)
        entry.tickets += 1
        self.held[entry.key] = entry
        del self.waiting[entry.key]
        self.budget.give_back("acme", 1)
        self.lock.release()
        local = []
        local.append(1)
        entry.copied, entry.joined = True, None
        if entry.dead and not entry.holders:
            return resident.generation == self._generations[resident.slot]
        return [each for each in pages if each.free]
"""


def found_in(text: str, path: str = "gpu_cache/new_room/tier.py") -> list[tuple[str, str, str]]:
    return [(m.kind, m.operator, m.before) for m in find(path, text)]


def test_every_kind_is_found_in_code_that_nobody_has_seen() -> None:
    assert found_in(FORGETFUL) == [
        ("port", "drop", "self._device.wait(stream, event)"),
        ("port", "drop", "self._device.zero(stream, pages)"),
        ("port", "drop", "device.copy_runs(stream, pages, pages, [], 1)"),
        ("port", "early", "self._device.record(stream)"),
        ("count", "drop", "entry.tickets += 1"),
        ("count", "drop", "self.held[entry.key] = entry"),
        ("count", "drop", "del self.waiting[entry.key]"),
        ("count", "drop", 'self.budget.give_back("acme", 1)'),
        ("count", "drop", "self.lock.release()"),
        ("state", "drop entry.copied", "entry.copied, entry.joined = True, None"),
        ("state", "drop entry.joined", "entry.copied, entry.joined = True, None"),
        ("currency", "false", "entry.dead"),
        ("currency", "true", "entry.dead"),
        ("guard", "without part 1", "entry.dead and not entry.holders"),
        ("guard", "without part 2", "entry.dead and not entry.holders"),
        ("currency", "false", "resident.generation == self._generations[resident.slot]"),
        ("currency", "true", "resident.generation == self._generations[resident.slot]"),
        ("guard", "always", "each.free"),
    ]


def test_guards_are_looked_for_where_books_are_kept() -> None:
    without = FORGETFUL.replace("from adapterd.gpu_cache.records import Entry", "")
    kinds = {kind for kind, _, _ in found_in(without)}
    assert kinds == {"port", "count", "currency"}
    assert {kind for kind, _, _ in found_in(without, "gpu_cache/slots.py")} >= {"guard", "state"}


@pytest.mark.parametrize(
    ("path", "kind", "text"),
    [
        ("gpu_cache/cache.py", "port", "self._device.record("),
        ("gpu_cache/cache.py", "port", "self._device.wait("),
        ("gpu_cache/cache.py", "count", "self._steps -= 1"),
        ("gpu_cache/copies.py", "port", "self._device.wait("),
        ("gpu_cache/copies.py", "port", "self._device.zero("),
        ("gpu_cache/copies.py", "port", "self._device.copy"),
        ("gpu_cache/copies.py", "port", "self._device.record("),
        ("gpu_cache/slots.py", "currency", "resident.generation"),
        ("gpu_cache/", "currency", ".trust_changes"),
        ("gpu_cache/", "currency", "entry.dead"),
        ("gpu_cache/engine/tables.py", "currency", ".generation"),
        ("gpu_cache/budgets.py", "count", "self.used[tenant] -= "),
        ("gpu_cache/pages.py", "count", "self._freed.append("),
        ("gpu_cache/idle.py", "guard", ".holders"),
    ],
)
def test_the_known_ones_are_among_them(path: str, kind: str, text: str) -> None:
    assert any(m.path.startswith(path) and m.kind == kind and text in m.before for m in MUTANTS)


def test_no_kind_has_become_rare() -> None:
    kinds = Counter(m.kind for m in MUTANTS)
    least = {"port": 6, "currency": 12, "count": 90, "state": 40, "guard": 150}
    assert {kind: n for kind, n in least.items() if kinds[kind] < n} == {}


def test_the_ports_methods_are_read_from_the_port() -> None:
    assert {"wait", "record", "zero"} < port_methods()
    assert any(method.startswith("copy") for method in port_methods())


def test_whoever_keeps_the_books_is_found_by_what_it_imports() -> None:
    keepers = {
        path
        for p in PACKAGE.rglob("*.py")
        if keeps_books(path := p.relative_to(ROOT).as_posix(), ast.parse(p.read_text()))
    }
    known = {"fences", "vram_tier", "stager", "cache", "copies", "slots", "pages", "leases", "lease_book", "tickets"}
    assert {f"gpu_cache/{name}.py" for name in known} <= keepers
    assert {p for p in keepers if p.startswith("gpu_cache/host/")}
    assert not any(p.startswith("gpu_cache/engine/") for p in keepers)


def test_every_mutant_compiles_and_is_a_change_inside_a_function() -> None:
    sources = {path: (ROOT / path).read_text() for path in {m.path for m in MUTANTS}}
    for mutant in MUTANTS:
        changed = mutant.apply(sources[mutant.path])
        assert changed != sources[mutant.path], mutant.name
        ast.parse(changed)
        assert mutant.function, mutant.name


def test_what_is_left_out_still_exists() -> None:
    for path in NOT_MUTATED:
        assert (ROOT / path).is_file()
    for each in EQUIVALENT:
        assert any(each.covers(m) for m in MUTANTS), f"{each.path}, {each.function}: {each.before} is there no more"
        assert len(each.reason) > 20
    assert sum(excluded(m) is not None for m in MUTANTS) < len(MUTANTS) / 8


def test_a_mutant_takes_the_functions_place_and_the_file_stays() -> None:
    from adapterd.gpu_cache.fences import Readers

    source = (PACKAGE / "fences.py").read_text()
    mutant = next(m for m in MUTANTS if m.function == "Readers.note" and m.kind == "count")
    whole = Mutant(
        mutant.path, mutant.function, mutant.line, "", "", mutant.before, mutant.before, mutant.span
    )  # fmt: skip
    readers = Readers()
    try:
        install(mutant)
        readers.note("stream", "event")  # type: ignore[arg-type]
        assert readers.fence().events == ()
    finally:
        install(whole)
    readers.note("stream", "event")  # type: ignore[arg-type]
    assert readers.fence().events == ("event",)
    assert (PACKAGE / "fences.py").read_text() == source


def test_a_function_that_is_watched_says_when_it_is_called() -> None:
    from adapterd.gpu_cache.fences import Readers

    mutant = next(m for m in MUTANTS if m.function == "Readers.note" and m.kind == "count")
    whole = Mutant(mutant.path, mutant.function, mutant.line, "", "", mutant.before, mutant.before, mutant.span)
    reached = set[str]()
    try:
        install_probes([mutant], reached)
        readers = Readers()
        readers.fence()
        assert not reached
        readers.note("stream", "event")  # type: ignore[arg-type]
        assert reached == {place(mutant)} == {"gpu_cache/fences.py::Readers.note"}
        assert readers.fence().events == ("event",)
    finally:
        install(whole)


def test_every_function_can_be_watched() -> None:
    """In another process: the functions stay as they are here."""
    program = (
        "from mutations.install import install_probes; from mutations.sites import find_all; "
        "install_probes(find_all(), set())"
    )
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ | {"PYTHONPATH": paths})
