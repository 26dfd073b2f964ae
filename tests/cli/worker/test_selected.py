"""Who may ask the cache for an adapter while others stand in line for theirs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from adapterd.cli.worker.requests import names_of
from adapterd.cli.worker.selected import LOOK_EVERY, Selected
from adapterd.cli.worker.tally import Progress
from adapterd.gpu_cache.records import Place
from adapterd.gpu_cache.residency import Residence
from adapterd.gpu_cache.step_budget import StepBudget, StepLimits
from adapterd.loader.sources import Resolved, Source
from fakes.hanging_source import HangingSource
from fakes.worker_world import ALL, MIB, WorkerWorld

PROMPT = [3, 1, 4, 1, 5]
AHEAD = 4


@dataclass
class Asker:
    """A candidate that has not started."""

    id: str
    tenant: str
    names: frozenset[str] | None
    arrival: int = 0
    started: bool = False
    pending: int = 1
    most_tokens: int = 2

    @property
    def adapter_bytes(self) -> dict[str, int]:
        return {}


@dataclass(frozen=True)
class Listed:
    tenant: str
    adapters: tuple[str, ...]
    tier: Place = Place.RESIDENT


class Listing:
    """The cache's list, and how often it was asked for."""

    def __init__(self, *rows: Listed) -> None:
        self.rows, self.looks = rows, 0

    def __call__(self) -> Sequence[Listed]:
        self.looks += 1
        return self.rows


def selected(listing: object = None) -> Selected:
    limits = StepLimits(kv_blocks=64, rows=64, adapter_bytes=8 * MIB, load_slots=1, load_bytes=MIB)
    return Selected(StepBudget(limits), AHEAD, listing)  # type: ignore[arg-type]


def askers(name: str, count: int, tenant: str = "acme") -> list[Asker]:
    return [Asker(f"{tenant}/{name} {number}", tenant, frozenset({name})) for number in range(count)]


def test_a_wish_names_adapters_of_its_tenant_or_nothing_that_can_be_had() -> None:
    assert names_of(None, "acme") == frozenset()
    assert names_of("acme/a:prod", "acme") == {"a"}
    assert names_of((("acme/a", 1.0), ("acme/b", 0.5)), "acme") == {"a", "b"}
    assert names_of((("acme/a", 1.0), ("blue/b", 0.5)), "acme") is None
    assert names_of("no ref", "acme") is None


def test_only_who_is_all_in_vram_passes_the_line() -> None:
    listing = Listing(Listed("acme", ("here", "also")), Listed("acme", ("near",), Place.HOST), Listed("blue", ("new",)))
    cold = askers("cold", AHEAD + 1)
    both = Asker("both", "acme", frozenset({"here", "also"}))
    half = Asker("half", "acme", frozenset({"here", "cold"}))
    wrong = Asker("wrong", "acme", None)
    line = [*cold, half, wrong, *askers("near", 1), *askers("new", 1), both, *askers("new", 1, "blue")]
    admitted = selected(listing).admit(line, [])
    assert [each.id for each in admitted] == [*(c.id for c in cold[:AHEAD]), "both", "blue/new 0"]


def test_those_who_pass_have_seats_of_their_own_and_take_none_from_the_line() -> None:
    chooser = selected(Listing(Listed("acme", ("here",))))
    cold, warm = askers("cold", 2 * AHEAD), askers("here", 3 * AHEAD)
    first = chooser.admit([*cold, *warm], [])
    assert first == [*cold[:AHEAD], *warm[:AHEAD]]
    for _ in range(2 * LOOK_EVERY):  # both kinds of seats are taken
        assert chooser.admit([*cold[AHEAD:], *warm[AHEAD:]], first) == []
    # One of the line has started: the next of the line comes, though as many as may pass are there.
    assert chooser.admit([*cold[AHEAD:], *warm[AHEAD:]], first[1:]) == [cold[AHEAD]]


def test_the_list_is_asked_for_now_and_then_only() -> None:
    listing = Listing()
    chooser, line = selected(listing), askers("cold", AHEAD + 1)
    for _ in range(LOOK_EVERY):
        chooser.admit(line[:AHEAD], [])  # nobody stands in line
    assert listing.looks == 0
    for _ in range(3 * LOOK_EVERY):
        chooser.admit(line, [])
    assert listing.looks == 3
    assert len(selected().admit(line, [])) == AHEAD


class SlowSource(HangingSource):
    """One adapter of it hangs."""

    def statement(self, version: Resolved) -> bytes:
        return super().statement(version) if version.adapter == "slow" else self._inner.statement(version)


def test_while_adapters_are_slow_to_come_those_that_are_here_serve(tmp_path: Path) -> None:
    sources: list[SlowSource] = []

    def slow(inner: Source) -> SlowSource:
        sources.append(SlowSource(inner))
        return sources[0]

    def residency() -> Sequence[Residence]:
        return world.cache.residency()

    scheduler = selected(residency)
    with WorkerWorld(tmp_path, wrap=slow, scheduler=scheduler) as world:
        for seed, name in enumerate(("finance", "slow"), 1):
            world.publisher.publish("acme", name, modules=ALL, rank=4, alpha=8, seed=seed)
        wanted = world.answer("acme/finance", PROMPT)
        for number in range(2 * AHEAD):
            world.ask(f"slow {number}", "acme/slow", PROMPT)
        for number in range(2 * AHEAD):
            world.ask(f"here {number}", "acme/finance", PROMPT)
        world.run(lambda: all(len(world.tokens(f"here {number}")) == 4 for number in range(2 * AHEAD)))
        assert {tuple(world.tokens(f"here {number}")) for number in range(2 * AHEAD)} == {tuple(wanted)}
        assert world.loop.step() is Progress.WAITING
        world.check_held(AHEAD)
        sources[0].barrier.open()
        world.run()
        assert all(len(world.tokens(f"slow {number}")) == 4 for number in range(2 * AHEAD))
