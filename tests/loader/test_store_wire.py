"""The verified store on a wire that breaks, ends early, never ends or glues something on."""

from __future__ import annotations

import pytest

from adapterd.loader.errors import Code, Unavailable
from adapterd.loader.identity import WEIGHTS_FILE
from fakes.store_world import BASE, World, current, left, refusal


def test_a_broken_connection_is_resumed(world: World) -> None:
    world.registry.faults.break_after = 5000
    stored = world.ensure()
    assert (stored.directory / WEIGHTS_FILE).read_bytes() == current(world).files[WEIGHTS_FILE]
    resumed = [r for r in world.registry.ranges if r]
    assert resumed
    assert resumed == sorted(resumed, key=lambda r: int(r[6:-1]))


def test_a_body_that_ends_early_is_asked_for_the_rest(world: World) -> None:
    world.registry.faults.cut_at = 8192
    stored = world.ensure()
    assert (stored.directory / WEIGHTS_FILE).read_bytes() == current(world).files[WEIGHTS_FILE]


@pytest.mark.parametrize("fault", [{"cut_at": 0}, {"break_after": 0}, {"cut_at": 100}])
def test_a_body_that_never_gets_on_is_given_up(world: World, fault: dict[str, int]) -> None:
    vars(world.registry.faults).update(fault)
    assert isinstance(refusal(world.ensure), Unavailable)
    assert left(world.root) == []
    world.registry.faults = type(world.registry.faults)()
    assert world.ensure().source == "downloaded"


def test_a_stored_file_that_was_cut(world: World) -> None:
    version = current(world)
    version.files[WEIGHTS_FILE] = version.files[WEIGHTS_FILE][:-1]
    assert isinstance(refusal(world.ensure), Unavailable)
    assert left(world.root) == []


def test_an_endless_body_is_cut_off_at_the_admitted_size(world: World) -> None:
    world.registry.faults.endless = True
    stored = world.ensure()
    for name, data in current(world).files.items():
        assert (stored.directory / name).read_bytes() == data
    assert world.registry.sent < current(world).statement.total_bytes + 4 * 8192


def test_bytes_glued_to_the_end_are_not_written(world: World) -> None:
    world.registry.faults.glued = b"\x80\x04 surplus"
    stored = world.ensure()
    assert {p.name: p.read_bytes() for p in stored.directory.iterdir()} == current(world).files


def test_no_server_leaves_nothing(world: World) -> None:
    resolved = world.resolve()
    world.registry.faults.refuse_connections = 100
    found = refusal(lambda: world.store().ensure(resolved, world.registry.source(), BASE))
    assert found.code is Code.SERVER_UNREACHABLE
    assert left(world.root) == []
