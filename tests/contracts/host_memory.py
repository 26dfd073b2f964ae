"""What a host does with its memory: who gets it, in which order, and how long images stay."""

from __future__ import annotations

from adapterd.gpu_cache import TenantBudget
from adapterd.gpu_cache.host.interface import Failure, Host, Origin
from adapterd.loader.errors import Code, reject
from contracts.host_user import SECONDS, HostBench, HostUser, held_bytes
from fakes.adapters import PAGE_BYTES, MemoryLoader, image_bytes
from fakes.devices import Barrier


class HostMemory(HostBench):
    # Fetch

    def test_an_image_holds_the_bytes_and_says_where_they_were(self, loader: MemoryLoader, hosts: list[Host]) -> None:
        user = self.open(loader, hosts)
        version = loader.publish("acme/a", 3)
        user.verify(version.resolved).answer()
        (image,) = user.images(version.resolved)
        assert held_bytes(image) == image_bytes(version.digest, 3)
        assert image.slab is user.host.slab
        assert image.key == version.resolved.key
        assert image.origin is Origin.SOURCE
        assert set(image.seconds) == {"verify", "pack"}
        (again,) = user.images(version.resolved)
        assert again.pages == image.pages
        assert (again.origin, dict(again.seconds)) == (Origin.HOST, {})
        assert user.host.usage().images == {version.resolved.key: 3 * PAGE_BYTES}

    def test_bytes_that_gave_way_come_back_from_the_disk(self, loader: MemoryLoader, hosts: list[Host]) -> None:
        user = self.open(loader, hosts, pages=4)
        one, two = loader.publish("acme/a", 3).resolved, loader.publish("acme/b", 3).resolved
        user.images(one)
        user.images(two)
        (image,) = user.images(one)
        assert image.origin is Origin.DISK
        assert held_bytes(image) == image_bytes(one.version_digest, 3)

    def test_an_image_stays_until_every_holder_has_let_go(self, loader: MemoryLoader, hosts: list[Host]) -> None:
        user = self.open(loader, hosts, pages=4)
        one, two = loader.publish("acme/a", 3), loader.publish("acme/b", 3)
        holders = [user.fetch(one.resolved), user.fetch(one.resolved)]
        images = [asked.answer()[0] for asked in holders]
        waiting = user.fetch(two.resolved)
        user.host.release(holders[0].number)
        user.verify(two.resolved).answer()
        assert waiting.silent
        assert held_bytes(images[1]) == image_bytes(one.digest, 3)
        user.host.release(holders[1].number)
        user.host.release(holders[1].number)
        assert held_bytes(waiting.answer()[0]) == image_bytes(two.digest, 3)

    def test_two_fetches_that_each_need_more_than_half_do_not_block_each_other(
        self, loader: MemoryLoader, hosts: list[Host]
    ) -> None:
        user = self.open(loader, hosts, pages=8)
        versions = [loader.publish(f"acme/{name}", 3).resolved for name in "abcd"]
        for pair in (versions[:2], versions[2:]):
            user.fetch(*pair)
        for _ in range(2):
            done = user.heard.get(timeout=SECONDS)
            images = done.answer()
            assert [held_bytes(image) for image in images] == [image_bytes(image.key.digest, 3) for image in images]
            user.host.release(done.number)

    def test_what_can_never_fit_is_refused_with_the_numbers(self, loader: MemoryLoader, hosts: list[Host]) -> None:
        budgets = {"acme": TenantBudget(max_host_bytes=4 * PAGE_BYTES)}
        user = self.open(loader, hosts, pages=8, tenants=budgets)
        small, large = loader.publish("acme/a", 3).resolved, loader.publish("acme/b", 2).resolved
        problem = user.fetch(small, large).problem()
        assert problem.code is Code.BUDGET_EXCEEDED
        assert f"{5 * PAGE_BYTES} bytes" in problem.message
        assert f"{4 * PAGE_BYTES}" in problem.message
        user.images(small)
        user.images(large)
        assert user.host.usage().tenants["acme"] <= 4 * PAGE_BYTES

    def test_a_guaranteed_share_is_not_given_to_others(self, loader: MemoryLoader, hosts: list[Host]) -> None:
        user = self.open(loader, hosts, pages=8, tenants={"blue": TenantBudget(guaranteed_host_bytes=4 * PAGE_BYTES)})
        blue = HostUser(user.host, "blue")
        kept = loader.publish("blue/b", 4).resolved
        blue.images(kept)
        for index in range(6):
            user.images(loader.publish(f"acme/a{index}", 2).resolved)
        assert blue.images(kept)[0].origin is Origin.HOST

    def test_bytes_that_do_not_hold_fail_all_who_wait_and_the_next_verifies_anew(
        self, loader: MemoryLoader, hosts: list[Host]
    ) -> None:
        user = self.open(loader, hosts)
        bad, good = loader.publish("acme/bad"), loader.publish("acme/good")
        loader.failures["fill acme/bad"] = reject(Code.CHUNK_MISMATCH, "weights", "chunk 3")
        waiting = [user.fetch(bad.resolved), user.fetch(good.resolved, bad.resolved)]
        fine = user.fetch(good.resolved)
        assert [asked.problem().code for asked in waiting] == [Code.CHUNK_MISMATCH] * 2
        assert held_bytes(fine.answer()[0]) == image_bytes(good.digest, 1)
        assert bad.resolved.key not in user.host.usage().images
        loader.failures.clear()
        loader.calls.clear()
        user.images(bad.resolved)
        assert loader.calls == ["prepare acme/bad", "fill acme/bad"]

    def test_without_a_tier_the_image_goes_with_its_last_holder(self, loader: MemoryLoader, hosts: list[Host]) -> None:
        user = self.open(loader, hosts, keep_host=False)
        user.images(loader.publish("acme/a", 3).resolved)
        self.eventually(user, {})

    # Order

    def test_the_higher_priority_gets_memory_first_then_the_older(
        self, loader: MemoryLoader, hosts: list[Host]
    ) -> None:
        user = self.open(loader, hosts, pages=2)
        versions = {name: loader.publish(f"acme/{name}", 2).resolved for name in "abcd"}
        for version in versions.values():
            user.verify(version).answer()
        held = user.fetch(versions["a"])
        held.answer()
        waiting = {
            "b": user.fetch(versions["b"]), "c": user.fetch(versions["c"]), "d": user.fetch(versions["d"], priority=1),
        }  # fmt: skip
        user.verify(versions["a"]).answer()  # whatever was asked before has been looked at
        assert all(asked.silent for asked in waiting.values())
        for name in "dbc":
            user.host.release(held.number)
            held = waiting.pop(name)
            held.answer()
            user.verify(versions["a"]).answer()
            assert all(asked.silent for asked in waiting.values()), name

    def test_a_large_fetch_is_not_starved_by_small_ones_and_other_tenants_are_not_held_up(
        self, loader: MemoryLoader, hosts: list[Host]
    ) -> None:
        user = self.open(loader, hosts, pages=4)
        small, large, late = (loader.publish(f"acme/{n}", p).resolved for n, p in (("s", 1), ("l", 4), ("t", 1)))
        other = loader.publish("blue/b", 1).resolved
        for version in (small, large, late):
            user.verify(version).answer()
        first = user.fetch(small)
        first.answer()
        waiting, behind = user.fetch(large), user.fetch(late)
        blue = HostUser(user.host, "blue")
        blue.images(other)
        again = user.fetch(small)
        again.answer()  # needs no memory: it is not held up
        assert waiting.silent
        assert behind.silent
        user.host.release(first.number)
        user.host.release(again.number)
        waiting.answer()
        assert behind.silent
        user.host.release(waiting.number)
        behind.answer()

    def test_a_tenant_with_too_many_waiting_is_refused_and_others_are_not(
        self, loader: MemoryLoader, hosts: list[Host]
    ) -> None:
        user = self.open(loader, hosts, tenants={"acme": TenantBudget(max_waiting=3)})
        version, other = loader.publish("acme/a").resolved, loader.publish("blue/b").resolved
        barrier = loader.barriers["prepare acme/a"] = Barrier()
        waiting = [user.verify(version), user.fetch(version), user.resolve("acme/a")]
        waiting[2].answer()
        waiting[2] = user.verify(version)
        barrier.await_arrival()
        for refused in (user.verify(version), user.fetch(version), user.resolve("acme/a")):
            assert refused.problem().code is Code.QUEUE_FULL
        assert not isinstance(HostUser(user.host, "blue").verify(other).answer(), Failure)
        barrier.open()
        assert not any(isinstance(asked.answer(), Failure) for asked in waiting)
        user.resolve("acme/a").answer()
