"""What was used last goes last: an acquire and a step both count as use."""

from __future__ import annotations

import pytest

from fakes.cache_world import World
from machines.books import resident_keys


@pytest.mark.parametrize("use", ["acquire", "step"])
def test_the_longest_unused_goes(use: str) -> None:
    with World(vram=2) as world:
        versions = {name: world.loader.publish(f"acme/{name}") for name in "abc"}
        old = world.ready("acme/a")
        world.ready("acme/b").release()
        if use == "step":
            world.step(old)
        else:
            world.ready("acme/a").release()
        old.release()
        world.settle()
        world.ready("acme/c")
        assert {key.digest for key in resident_keys(world.cache, "acme")} == {versions[n].digest for n in "ac"}
