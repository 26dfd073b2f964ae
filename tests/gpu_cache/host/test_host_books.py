"""The books of the in-process host, looked at between its jobs and in the middle of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from adapterd.gpu_cache.host.host_cache import HostCache
from adapterd.gpu_cache.host.interface import Facts, Origin
from adapterd.gpu_cache.host.loading import Fill, Serving
from adapterd.gpu_cache.host.tier import PlainSlab
from adapterd.loader.errors import AdapterdError, Code, error
from adapterd.loader.image import Memory
from adapterd.loader.manifest import Manifest
from adapterd.loader.sources import Resolved
from contracts.host_user import Asked, HostUser, held_bytes
from fakes.adapters import PAGE_BYTES, ManualPool, MemoryLoader, TaggedImage, image_bytes, make_base


class Midway:
    """In the place of a barrier: what happens while the loader is at it, once."""

    def __init__(self, happens: Callable[[], object]) -> None:
        self._happens: list[Callable[[], object]] = [happens]

    def stop(self) -> None:
        if self._happens:
            self._happens.pop()()


class Loading(MemoryLoader):
    """Images of a class of the test's; and what `prepare` asks, before it answers."""

    made: type[TaggedImage] = TaggedImage
    asks: Callable[[Callable[[], bool]], None] | None = None

    def prepare(self, resolved: Any, serving: Any, cancelled: Any, told: Any) -> TaggedImage:
        image = super().prepare(resolved, serving, lambda: False, told)
        assert isinstance(image, TaggedImage)
        if self.asks is not None:
            asks, self.asks = self.asks, None
            asks(cancelled)
        return self.made(image.version, self, image.origin)


class World:
    def __init__(self, pages: int = 8, **settings: object) -> None:
        self.loader, self.pool = Loading(), ManualPool()
        slab = PlainSlab(memoryview(bytearray(pages * PAGE_BYTES)), PAGE_BYTES)
        self.host = HostCache(
            slab, self.loader.base, loader=self.loader, pool=self.pool, answers=self.pool, **settings  # type: ignore[arg-type]
        )  # fmt: skip
        self.user = HostUser(self.host)

    def version(self, name: str, pages: int = 1) -> Resolved:
        return self.loader.publish(f"acme/{name}", pages).resolved

    def done(self, asked: Asked) -> Any:
        """Its answer, once all jobs have run."""
        self.pool.run_all()
        assert not asked.silent, "it waits"
        return asked.answer()

    def origin(self, version: Resolved) -> Origin:
        """Where it is found; it is let go of again."""
        asked = self.user.fetch(version)
        (image,) = self.done(asked)
        self.host.release(asked.number)
        self.pool.run_all()
        return image.origin  # type: ignore[no-any-return]

    @property
    def free(self) -> int:
        return self.host.usage().free_bytes // PAGE_BYTES

    def midway(self, where: str, happens: Callable[[], object]) -> None:
        self.loader.barriers[where] = Midway(happens)  # type: ignore[assignment]


@pytest.fixture
def world() -> World:
    return World()


# For whom a request is


def test_what_is_packed_for_one_dtype_is_known_for_that_one_only(world: World) -> None:
    version, half = world.loader.publish("acme/a"), Serving(world.loader.base, "F16")
    world.host.fetch([version.resolved], "acme", lambda _: None, serving=half)
    world.pool.run_all()
    for serving, asks in ((half, []), (None, ["resolve acme/a"])):
        world.loader.calls.clear()
        found: list[Any] = []
        world.host.resolve([replace(version.resolved.ref, alias=None)], "acme", found.append, serving=serving)
        world.pool.run_all()
        assert found[0][0].version_digest == version.digest
        assert world.loader.calls == asks


def test_a_version_is_verified_for_the_base_that_is_named(world: World) -> None:
    world.loader.base = other = make_base("b" * 40)
    found: list[object] = []
    world.host.verify(world.version("a"), "acme", found.append, serving=Serving(other))
    world.pool.run_all()
    assert isinstance(found[0], Facts)


# What is known without asking


def test_a_foreign_digest_is_unknown_though_its_bytes_are_here(world: World) -> None:
    version = world.loader.publish("acme/a")
    world.origin(version.resolved)
    asked = HostUser(world.host, "blue").resolve(version.pinned)
    assert world.done(asked).problems[0].code is Code.NOT_FOUND


def test_a_digest_that_an_alias_is_said_to_mean_is_looked_up(world: World) -> None:
    version = world.loader.publish("acme/a")
    world.origin(version.resolved)
    world.loader.calls.clear()
    world.done(world.user.resolve(f"acme/a:default@sha256:{version.digest}"))
    assert world.loader.calls == ["resolve acme/a"]


def test_a_digest_whose_bytes_are_not_in_the_slab_is_looked_up(world: World) -> None:
    version = world.loader.publish("acme/a")
    world.done(world.user.verify(version.resolved))
    world.loader.calls.clear()
    world.done(world.user.resolve(version.pinned))
    assert world.loader.calls == ["resolve acme/a"]


# What stays, and what goes


def test_what_was_used_last_stays() -> None:
    world = World(pages=2)
    a, b, c = (world.version(name) for name in "abc")
    for version in (a, b, a, c):
        world.origin(version)
    assert set(world.host.usage().images) == {a.key, c.key}


def test_an_image_stays_as_long_as_somebody_knows_of_the_version() -> None:
    world = World(keep_host=False)
    version = world.version("a")
    verified = world.user.verify(version)
    world.origin(version)
    assert world.origin(version) is Origin.HOST
    world.host.release(verified.number)
    assert world.free == 8


def test_nothing_is_remembered_of_what_nobody_holds(world: World) -> None:
    """The books do not grow with the versions that were ever asked for."""
    version = world.version("a", 2)
    for _ in range(2):
        verified, resolved, fetched = (
            world.user.verify(version),
            world.user.resolve("acme/a"),
            world.user.fetch(version),
        )
        world.pool.run_all()
        world.host.forget(version.key)
        assert resolved.answer()  # and holds nothing
        for asked in (verified, fetched, fetched):
            world.host.release(asked.number)
        world.pool.run_all()
        assert not (world.host._requests or world.host._entries or world.host._tier._entries)
        assert world.host.usage().tenants == {}
    assert world.loader.calls.count("prepare acme/a") == 2
    world.host.release(world.user.verify(version).number)
    world.pool.run_all()
    assert not world.host._entries


def test_memory_that_is_packed_into_is_nobody_elses_though_it_was_released(world: World) -> None:
    world = World(keep_host=False)
    version, seen = world.version("a", 2), list[int]()
    asked = world.user.fetch(version)
    world.midway("fill acme/a", lambda: (world.host.release(asked.number), seen.append(world.free)))
    world.pool.run_all()
    assert seen == [6]
    assert world.free == 8


def test_what_waits_for_room_does_not_drop_what_it_wants_itself() -> None:
    world = World(pages=3)
    a, held, b = world.version("a"), world.version("held"), world.version("b", 2)
    world.origin(a)
    holder = world.user.fetch(held)
    world.done(holder)
    both = world.user.fetch(a, b)
    world.pool.run_all()
    assert both.silent
    assert a.key in world.host.usage().images
    world.host.release(holder.number)
    assert [image.origin for image in world.done(both)] == [Origin.HOST, Origin.SOURCE]


# Where bytes are found


def test_bytes_that_came_while_one_waited_were_not_here_when_it_asked() -> None:
    """And who waits for more than what another one packs goes on waiting."""
    world = World(pages=3)
    held, a, b = world.version("held"), world.version("a"), world.version("b", 2)
    holder = world.user.fetch(held)
    world.done(holder)
    for version in (a, b):
        world.done(world.user.verify(version))
    both, alone = world.user.fetch(a, b), world.user.fetch(a, priority=1)
    (image,) = world.done(alone)
    assert image.origin is Origin.SOURCE
    assert both.silent
    world.host.release(holder.number)
    assert [image.origin for image in world.done(both)] == [Origin.SOURCE, Origin.SOURCE]


def test_bytes_that_went_while_one_waited_are_brought_again() -> None:
    world = World(pages=3)
    a, held, b, c = world.version("a"), world.version("held", 2), world.version("b", 2), world.version("c")
    world.origin(a)
    holder = world.user.fetch(held)
    world.done(holder)
    both, urgent = world.user.fetch(a, b), world.user.fetch(c, priority=1)
    world.pool.run_all()
    assert both.silent
    for asked in (urgent, holder):
        world.host.release(asked.number)
    assert [image.origin for image in world.done(both)] == [Origin.DISK, Origin.SOURCE]


class FromPacked(TaggedImage):
    def fill(self, out: Memory) -> Fill:
        super().fill(out)
        return Fill(Origin.PACKED)


def test_a_second_image_is_not_verified_again_and_says_where_it_came_from() -> None:
    world = World(pages=2, keep_host=False)
    world.loader.made = FromPacked
    version = world.version("a")
    world.done(world.user.verify(version))
    stages = []
    for _ in range(2):
        asked = world.user.fetch(version)
        (image,) = world.done(asked)
        stages.append(set(image.seconds))
        assert image.origin is Origin.PACKED
        world.host.release(asked.number)
        world.origin(world.version("other", 2))  # needs all the room
    assert stages == [{"verify", "pack"}, {"pack"}]


# Claims and failures


def test_a_claim_is_not_served_before_it_is_verified(world: World) -> None:
    """Though another claim on the same bytes is, and has room for them."""
    digest = "d" * 64
    good = world.loader.publish("acme/a", 2, digest=digest).resolved
    bad = world.loader.publish("acme/stolen", 2, digest=digest).resolved
    stolen, own = world.user.fetch(bad), world.user.fetch(good)

    def asks(_cancelled: Callable[[], bool]) -> None:
        assert len(world.done(own)) == 1  # meanwhile
        assert stolen.silent
        raise error(Code.STATEMENT_MISMATCH, "statement", "not yours")

    world.loader.asks = asks
    assert world.done(stolen).problems[0].code is Code.STATEMENT_MISMATCH


class Spoilt(TaggedImage):
    def fill(self, out: Memory) -> Fill:
        self.loader.say("fill", self.version)
        raise error(Code.CHUNK_MISMATCH, "weights", "not what was admitted")


def test_bytes_that_do_not_hold_fail_at_once_and_every_claim_is_verified_anew(world: World) -> None:
    digest = "d" * 64
    one = world.loader.publish("acme/a", 2, digest=digest).resolved
    two = world.loader.publish("acme/b", 2, digest=digest).resolved
    for claim in (one, two):
        world.done(world.user.verify(claim))
    world.host.forget(one.key)
    world.loader.made = Spoilt
    for claim in (one, two):
        world.done(world.user.verify(claim))
    world.loader.calls.clear()
    assert world.done(world.user.fetch(one)).problems[0].code is Code.CHUNK_MISMATCH
    assert world.loader.calls == ["fill acme/a"]
    world.loader.made = TaggedImage
    world.loader.calls.clear()
    for claim in (one, two):
        assert len(world.done(world.user.fetch(claim))) == 1
    assert world.loader.calls == ["prepare acme/a", "fill acme/a", "prepare acme/b"]


def test_bytes_that_do_not_hold_fail_nobody_who_only_verifies(world: World) -> None:
    digest = "d" * 64
    one = world.loader.publish("acme/a", 2, digest=digest).resolved
    two = world.loader.publish("acme/b", 2, digest=digest).resolved
    world.loader.made = Spoilt
    verifying: list[Asked] = []
    world.midway("fill acme/a", lambda: verifying.append(world.user.verify(two)))
    assert world.done(world.user.fetch(one)).problems[0].code is Code.CHUNK_MISMATCH
    assert isinstance(verifying[0].answer(), Facts)


# Given up, and wanted again


@pytest.mark.parametrize(
    ("raised", "served"),
    [
        (error(Code.LEASE_CANCELLED, "a", "nobody waits for it any more"), True),
        (error(Code.HASH_MISMATCH, "a", "not what was signed"), False),
    ],
)
def test_a_load_that_was_given_up_and_is_wanted_again_starts_anew_unless_it_failed(
    world: World, raised: AdapterdError, served: bool
) -> None:
    version, again = world.version("a"), list[Asked]()
    first = world.user.fetch(version)

    def asks(cancelled: Callable[[], bool]) -> None:
        world.host.release(first.number)
        assert cancelled()
        again.append(world.user.fetch(version))
        assert not cancelled()
        raise raised

    world.loader.asks = asks
    world.pool.run_all()
    outcome = again[0].answer()
    assert (outcome[0].key == version.key) if served else (outcome.problems == raised.problems)
    assert world.loader.calls.count("prepare acme/a") == 1 + served


def test_who_asks_while_it_is_verified_for_nobody_shares_the_job(world: World) -> None:
    version, again = world.version("a"), list[Asked]()
    first = world.user.fetch(version)

    def asks(cancelled: Callable[[], bool]) -> None:
        world.host.release(first.number)
        again.append(world.user.fetch(version))
        assert not cancelled()

    world.loader.asks = asks
    world.pool.run_all()
    assert len(again[0].answer()) == 1
    assert world.loader.calls == ["prepare acme/a", "fill acme/a"]


# Our own bugs


class Fading(TaggedImage):
    """What it says of itself cannot be read any more, once it was packed."""

    def fill(self, out: Memory) -> Fill:
        fill = super().fill(out)
        self.__class__ = Faded  # type: ignore[assignment]
        return fill


class Faded(TaggedImage):
    @property
    def manifest(self) -> Manifest:
        raise ZeroDivisionError


class Anonymous(TaggedImage):
    @property
    def publisher(self) -> str | None:
        raise ZeroDivisionError


def test_an_image_that_breaks_the_books_goes_and_the_next_request_begins_anew(world: World) -> None:
    version = world.version("a", 2)
    world.loader.made = Fading
    world.done(world.user.verify(version))
    asked = world.user.fetch(version)
    with pytest.raises(ZeroDivisionError):
        world.pool.run_all()
    assert world.done(asked).problems[0].code is Code.INTERNAL
    assert world.free == 8
    assert world.host.usage().images == {}
    world.loader.made = TaggedImage
    assert len(world.done(world.user.fetch(version))) == 1
    assert world.free == 6


def test_books_that_break_take_no_memory_from_who_reads_it(world: World) -> None:
    digest = "d" * 64
    one, two = (world.loader.publish(f"acme/{name}", 2, digest=digest).resolved for name in "ab")
    held = world.user.fetch(one)
    (image,) = world.done(held)
    world.loader.made = Anonymous
    asked = world.user.verify(two)
    with pytest.raises(ZeroDivisionError):
        world.pool.run_all()
    assert world.done(asked).problems[0].code is Code.INTERNAL
    assert world.free == 6
    assert held_bytes(image) == image_bytes(digest, 2)
    world.host.release(held.number)
    assert world.free == 8
