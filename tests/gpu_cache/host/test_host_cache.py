"""The in-process host: the contract, and what only shows when its jobs run one by one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from adapterd.gpu_cache import TenantBudget
from adapterd.gpu_cache.host.host_cache import HostCache
from adapterd.gpu_cache.host.interface import Host, Image
from adapterd.gpu_cache.host.loading import Prepared, Serving
from adapterd.gpu_cache.host.pool import FairPool
from adapterd.gpu_cache.host.tier import PlainSlab
from adapterd.loader.errors import Code, reject
from adapterd.loader.identity import Ref
from adapterd.loader.layout import Layout
from adapterd.loader.sharding import Rule, Sharding
from adapterd.loader.sources import Resolved
from contracts.host import HostContract
from contracts.host_user import HostUser
from fakes.adapters import PAGE_BYTES, ManualPool, MemoryLoader, TaggedImage, make_base


class TestHostCache(HostContract):
    def make(
        self, loader: MemoryLoader, *, pages: int, tenants: Mapping[str, TenantBudget], keep_host: bool, threads: int
    ) -> Host:
        slab = PlainSlab(memoryview(bytearray(pages * PAGE_BYTES)), PAGE_BYTES)
        pool = FairPool.of(threads, tenants, TenantBudget())
        return HostCache(slab, loader.base, loader=loader, pool=pool, tenants=tenants, keep_host=keep_host)


class ByHand:
    """A host whose jobs and answers run when the test says so."""

    def __init__(self, pages: int = 8, loader: MemoryLoader | None = None, **settings: object) -> None:
        self.loader, self.pool = loader or MemoryLoader(), ManualPool()
        slab = PlainSlab(memoryview(bytearray(pages * PAGE_BYTES)), PAGE_BYTES)
        self.host = HostCache(
            slab,
            self.loader.base,
            loader=self.loader,
            pool=self.pool,
            answers=self.pool,
            **settings,  # type: ignore[arg-type]
        )
        self.user = HostUser(self.host)

    def fetched(self, *wanted: Resolved, **options: object) -> tuple[Image, ...]:
        answers: list[tuple[Image, ...]] = []
        self.host.fetch(wanted, wanted[0].tenant, answers.append, **options)  # type: ignore[arg-type]
        self.pool.run_all()
        return answers[0]


@pytest.mark.parametrize("keep_host", [False, True])
@pytest.mark.parametrize("jobs", range(4))
def test_a_fetch_released_at_any_time_gives_everything_back(jobs: int, keep_host: bool) -> None:
    world = ByHand(keep_host=keep_host)
    versions = [world.loader.publish(f"acme/{name}", 2).resolved for name in "ab"]
    asked = world.user.fetch(*versions)
    for _ in range(jobs):
        world.pool.run_one()
    world.host.release(asked.number)
    world.pool.run_all()
    assert asked.silent
    for version in versions:
        world.host.forget(version.key)
    assert world.host.usage().free_bytes == 8 * PAGE_BYTES
    assert len(world.fetched(*versions)) == 2


def test_files_that_have_gone_from_the_disk_are_brought_again_once() -> None:
    """A store of limited size gives up what it likes, also between the verification and the packing."""
    world = ByHand()
    version = world.loader.publish("acme/a").resolved
    world.loader.failures["fill acme/a"] = reject(Code.STORAGE_UNAVAILABLE, "store", "gone")
    asked = world.user.fetch(version)
    world.pool.run_one()
    world.pool.run_one()
    world.loader.failures.clear()
    world.pool.run_all()
    assert len(asked.answer()) == 1
    assert world.loader.calls == ["prepare acme/a", "fill acme/a"] * 2
    world.host.forget(version.key)
    world.host.release(asked.number)
    world.loader.failures["fill acme/a"] = reject(Code.STORAGE_UNAVAILABLE, "store", "gone")
    world.loader.calls.clear()
    asked = world.user.fetch(version)
    world.pool.run_all()
    assert asked.problem().code is Code.STORAGE_UNAVAILABLE
    assert world.loader.calls == ["prepare acme/a", "fill acme/a"] * 2


def test_the_packed_form_is_kept_after_the_answer() -> None:
    world = ByHand()
    world.loader.keeps_packed = True
    asked = world.user.fetch(world.loader.publish("acme/a").resolved)
    world.pool.run_one()
    world.pool.run_one()
    assert not asked.silent
    assert world.loader.calls == ["prepare acme/a", "fill acme/a"]
    world.pool.run_all()
    assert world.loader.calls[2:] == ["keep acme/a"]


def test_ranks_of_one_group_share_the_slab_and_not_the_bytes() -> None:
    world = ByHand()
    first = world.loader.publish("acme/a", 2).resolved
    rules = (Rule("q_proj", "column", 2),)
    parts = [Serving(world.loader.base, "auto", Sharding(rank, 2, rules)) for rank in range(2)]
    (one,), (two,), (again,) = (world.fetched(first, serving=serving) for serving in (*parts, replace(parts[1])))
    assert set(one.pages).isdisjoint(two.pages)
    assert again.pages == two.pages


def test_workers_with_other_bases_and_dtypes_share_the_slab_and_not_the_bytes() -> None:
    world = ByHand()
    first = world.loader.publish("acme/a", 2).resolved
    (image,) = world.fetched(first)
    (half,) = world.fetched(first, serving=Serving(world.loader.base, "F16"))
    (same,) = world.fetched(first, serving=Serving(world.loader.base))
    assert same.pages == image.pages
    assert set(half.pages).isdisjoint(image.pages)
    world.loader.base = other = make_base("b" * 40)
    moved = world.loader.publish("acme/a", 2).resolved
    (new,) = world.fetched(moved, serving=Serving(other))
    assert new.key.base == other.pin
    assert len({*image.pages, *half.pages, *new.pages}) == 6
    world.host.rebase(other)
    assert set(world.host.usage().images) == {new.key}
    assert world.host.usage().tenants == {"acme": 6 * PAGE_BYTES}  # the forgotten ones are held


def test_ten_thousand_requests_for_one_version_are_one_load() -> None:
    world = ByHand()
    version = world.loader.publish("acme/a", 2).resolved
    asked = [world.user.fetch(version) for _ in range(10_000)]
    refused = world.user.fetch(version)
    world.pool.run_all()
    assert refused.problem().code is Code.QUEUE_FULL
    assert all(len(each.answer()) == 1 for each in asked)
    assert world.loader.calls == ["prepare acme/a", "fill acme/a"]
    for each in asked:
        world.host.release(each.number)


class Unreadable(TaggedImage):
    """Prepared by a loader with a bug: what it says of itself cannot be read."""

    @property
    def layout(self) -> Layout:
        raise ZeroDivisionError


class Anonymous(TaggedImage):
    """The same, of who signed it."""

    @property
    def publisher(self) -> str | None:
        raise ZeroDivisionError


class Buggy(MemoryLoader):
    made: type[TaggedImage] = TaggedImage

    def prepare(self, *asked: object) -> Prepared:
        image = super().prepare(*asked)  # type: ignore[arg-type]
        assert isinstance(image, TaggedImage)
        return self.made(image.version, self, image.origin)


@pytest.mark.parametrize("made", [Unreadable, Anonymous])
def test_books_that_break_at_the_end_of_a_job_fail_who_waits_and_nobody_else(made: type[TaggedImage]) -> None:
    """Our own bug. The next request begins anew."""
    world = ByHand(loader=Buggy())
    other, version = world.loader.publish("acme/other").resolved, world.loader.publish("acme/a", 2).resolved
    world.loader.made = made  # type: ignore[attr-defined]
    asked = [world.user.fetch(version), world.user.verify(version), world.user.fetch(version)]
    with pytest.raises(ZeroDivisionError):
        world.pool.run_all()
    world.loader.made = TaggedImage  # type: ignore[attr-defined]
    bystander = world.user.fetch(other)
    world.pool.run_all()
    assert [each.problem().code for each in asked] == [Code.INTERNAL] * 3
    assert len(bystander.answer()) == 1
    assert len(world.fetched(version)) == 1
    for key in (version.key, other.key):
        world.host.forget(key)
    world.host.release(bystander.number)
    assert world.host.usage().free_bytes == 6 * PAGE_BYTES  # of the image that is held


def test_verified_bytes_in_the_slab_are_at_hand_by_digest_and_by_what_they_were_found_as() -> None:
    world = ByHand()
    versions = [world.loader.publish(f"acme/{name}", 2) for name in "ab"]
    world.fetched(*(version.resolved for version in versions))
    for wanted in ([Ref.parse(version.pinned) for version in versions], [version.resolved for version in versions]):
        here = world.host.at_hand(wanted, "acme")
        assert here is not None
        assert here.resolved == tuple(version.resolved for version in versions)
        assert [image.key for image in here.images] == [version.resolved.key for version in versions]
    assert not world.pool.busy


def test_a_bound_on_what_waits_does_not_concern_what_is_at_hand() -> None:
    world = ByHand(tenants={"acme": TenantBudget(max_waiting=1)})
    version = world.loader.publish("acme/a").resolved
    world.fetched(version)
    waiting = world.user.resolve("acme/a")
    assert world.host.at_hand([version], "acme") is not None
    world.pool.run_all()
    assert not waiting.silent


def test_what_was_at_hand_was_used() -> None:
    world = ByHand(pages=4)
    old, new, third = (world.loader.publish(f"acme/{name}", 2).resolved for name in "abc")
    for version in (old, new):
        asked = world.user.fetch(version)
        world.pool.run_all()
        world.host.release(asked.number)
    here = world.host.at_hand([old], "acme")
    assert here is not None
    world.host.release(here.request)
    world.fetched(third)
    assert world.host.usage().images.keys() == {old.key, third.key}
