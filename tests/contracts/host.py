"""What every `Host` must do, over a loader in memory whose calls can be stopped, and with real threads."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from adapterd.gpu_cache import TenantBudget
from adapterd.gpu_cache.host.interface import Facts, Failure, Host, Image, Origin, Progress, Stage
from adapterd.loader.errors import Code, Problem, reject
from adapterd.loader.identity import Ref, VersionKey
from adapterd.loader.sources import Resolved
from fakes.adapters import PAGE_BYTES, MemoryLoader, image_bytes, make_base
from fakes.devices import Barrier

SECONDS = 20.0
"""After which a test gives up."""


@dataclass
class Asked:
    """One request, and its answers as they come. `heard` gets the request itself with each."""

    heard: queue.SimpleQueue[Asked]
    number: int = 0
    answers: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)

    def settle(self, outcome: Any) -> None:
        self.answers.put(outcome)
        self.heard.put(self)

    def answer(self) -> Any:
        return self.answers.get(timeout=SECONDS)

    def problem(self) -> Problem:
        outcome = self.answer()
        assert isinstance(outcome, Failure), outcome
        return outcome.problems[0]

    @property
    def silent(self) -> bool:
        return self.answers.empty()


class HostUser:
    """Asks a host for a tenant, as a cache does."""

    def __init__(self, host: Host, tenant: str = "acme") -> None:
        self.host, self.tenant = host, tenant
        self.heard: queue.SimpleQueue[Asked] = queue.SimpleQueue()

    def resolve(self, *refs: str) -> Asked:
        asked = Asked(self.heard)
        asked.number = self.host.resolve([Ref.parse(ref) for ref in refs], self.tenant, asked.settle)
        return asked

    def verify(self, resolved: Resolved) -> Asked:
        asked = Asked(self.heard)
        asked.number = self.host.verify(resolved, self.tenant, asked.settle)
        return asked

    def fetch(self, *wanted: Resolved, priority: int = 0) -> Asked:
        asked = Asked(self.heard)
        asked.number = self.host.fetch(wanted, self.tenant, asked.settle, priority=priority)
        return asked

    def images(self, *wanted: Resolved) -> tuple[Image, ...]:
        """Fetched, and released at once: they stay until room is needed."""
        asked = self.fetch(*wanted)
        images = asked.answer()
        assert not isinstance(images, Failure), images
        self.host.release(asked.number)
        return images  # type: ignore[no-any-return]


def held_bytes(image: Image) -> bytes:
    """What the slab holds at the image's pages."""
    memory, size = memoryview(image.slab.memory).cast("B"), image.slab.page_bytes
    return b"".join(bytes(memory[page * size : (page + 1) * size]) for page in image.pages)


class HostContract:
    """Subclasses give `make`; `MemoryLoader` may live in another thread of this process, never elsewhere."""

    def make(
        self, loader: MemoryLoader, *, pages: int, tenants: Mapping[str, TenantBudget], keep_host: bool, threads: int
    ) -> Host:
        """A host over `loader` whose slab has `pages` pages of `PAGE_BYTES`; base and page size are the loader's."""
        raise AssertionError("subclasses make their host")

    @pytest.fixture
    def loader(self) -> MemoryLoader:
        return MemoryLoader()

    @pytest.fixture
    def hosts(self) -> Iterator[list[Host]]:
        """Those to close."""
        hosts: list[Host] = []
        before = set(threading.enumerate())
        yield hosts
        for host in hosts:
            host.close(SECONDS)
        assert set(threading.enumerate()) <= before, "threads are left over"

    def open(
        self,
        loader: MemoryLoader,
        hosts: list[Host],
        *,
        pages: int = 8,
        tenants: Mapping[str, TenantBudget] | None = None,
        keep_host: bool = True,
        threads: int = 2,
    ) -> HostUser:
        host = self.make(loader, pages=pages, tenants=tenants or {}, keep_host=keep_host, threads=threads)
        hosts.append(host)
        return HostUser(host)

    # Resolve

    def test_refs_become_versions_in_order(self, loader: MemoryLoader, hosts: list[Host]) -> None:
        user = self.open(loader, hosts)
        one, two = loader.publish("acme/a"), loader.publish("acme/b", alias="prod")
        found = user.resolve("acme/b:prod", "acme/a").answer()
        assert [each.version_digest for each in found] == [two.digest, one.digest]

    def test_unknown_and_foreign_are_one_answer_and_nobody_is_asked_about_the_foreign(
        self, loader: MemoryLoader, hosts: list[Host]
    ) -> None:
        user = self.open(loader, hosts)
        loader.publish("blue/secret")
        unknown, foreign = user.resolve("acme/secret").problem(), user.resolve("blue/secret").problem()
        assert foreign.as_json() == unknown.as_json() | {"where": "blue/secret"}
        assert unknown.code is Code.NOT_FOUND
        assert loader.calls == ["resolve acme/secret"]

    def test_a_foreign_version_is_an_unknown_one(self, loader: MemoryLoader, hosts: list[Host]) -> None:
        user = self.open(loader, hosts)
        secret = loader.publish("blue/secret").resolved
        HostUser(user.host, "blue").images(secret)
        loader.calls.clear()
        assert user.verify(secret).problem().code is Code.NOT_FOUND
        assert user.fetch(secret).problem().code is Code.NOT_FOUND
        assert loader.calls == []

    def test_a_source_that_answers_something_else_is_not_believed(
        self, loader: MemoryLoader, hosts: list[Host]
    ) -> None:
        user = self.open(loader, hosts)
        asked, other = loader.publish("acme/a"), loader.publish("acme/b")
        loader.answers = {asked.digest: other.resolved}
        assert user.resolve(asked.pinned).problem().code is Code.STATEMENT_MISMATCH

    def test_a_digest_whose_bytes_are_here_needs_no_source(self, loader: MemoryLoader, hosts: list[Host]) -> None:
        user = self.open(loader, hosts)
        version = loader.publish("acme/a")
        user.images(version.resolved)
        loader.calls.clear()
        (found,) = user.resolve(version.pinned).answer()
        assert found.version_digest == version.digest
        assert user.resolve(f"acme/other@sha256:{version.digest}").problem().code is Code.NOT_FOUND
        assert loader.calls == ["resolve acme/other"]

    # Verify

    def test_facts_are_known_before_the_bytes_are_packed(self, loader: MemoryLoader, hosts: list[Host]) -> None:
        user = self.open(loader, hosts)
        version = loader.publish("acme/a", 3)
        facts = user.verify(version.resolved).answer()
        assert isinstance(facts, Facts)
        assert facts.manifest == version.manifest
        assert facts.layout.n_pages == 3
        assert loader.calls == ["prepare acme/a"]
        assert user.host.usage().images == {}

    def test_facts_say_who_signed_each_claim(self, loader: MemoryLoader, hosts: list[Host]) -> None:
        user = self.open(loader, hosts)
        first = loader.publish("acme/a", publisher="key-1")
        others = [
            loader.publish(f"acme/{n}", digest=first.digest, publisher=p) for n, p in (("b", "key-2"), ("c", None))
        ]
        for version in (first, *others, first):
            facts = user.verify(version.resolved).answer()
            assert isinstance(facts, Facts)
            assert facts.publisher == version.publisher

    def test_equal_wishes_share_the_work(self, loader: MemoryLoader, hosts: list[Host]) -> None:
        user = self.open(loader, hosts)
        version = loader.publish("acme/a", 2).resolved
        barrier = loader.barriers["prepare acme/a"] = Barrier()
        first = user.verify(version)
        barrier.await_arrival()
        others = [user.verify(version), user.fetch(version), user.fetch(version)]
        barrier.open()
        for asked in (first, *others):
            assert not isinstance(asked.answer(), Failure)
        assert loader.calls == ["prepare acme/a", "fill acme/a"]

    def test_a_claim_that_does_not_hold_fails_only_who_made_it(self, loader: MemoryLoader, hosts: list[Host]) -> None:
        user = self.open(loader, hosts)
        good = loader.publish("acme/a")
        lie = loader.publish("acme/b", digest=good.digest).resolved
        loader.failures["prepare acme/b"] = reject(Code.STATEMENT_MISMATCH, "adapter", "not this one")
        fetched, lied = user.fetch(good.resolved), user.fetch(lie)
        assert lied.problem().code is Code.STATEMENT_MISMATCH
        assert held_bytes(fetched.answer()[0]) == image_bytes(good.digest, 1)
        assert user.fetch(good.resolved, lie).problem().code is Code.STATEMENT_MISMATCH
        del loader.failures["prepare acme/b"]
        assert len(user.images(good.resolved, lie)) == 2

    def test_after_a_change_of_trust_it_is_verified_again_once(self, loader: MemoryLoader, hosts: list[Host]) -> None:
        user = self.open(loader, hosts)
        version = loader.publish("acme/a").resolved
        user.images(version)
        loader.trust_changes += 1
        assert user.host.trust_changes == loader.trust_changes
        held = user.verify(version)
        held.answer()
        user.verify(version).answer()
        assert loader.calls.count("prepare acme/a") == 2

    def test_who_asks_after_trust_has_changed_is_not_served_by_what_was_found_before(
        self, loader: MemoryLoader, hosts: list[Host]
    ) -> None:
        user = self.open(loader, hosts)
        version = loader.publish("acme/a").resolved
        barrier = loader.barriers["prepare acme/a"] = Barrier()
        early = user.verify(version)
        barrier.await_arrival()
        loader.trust_changes += 1
        assert user.host.trust_changes == loader.trust_changes
        late = user.verify(version)
        barrier.open()
        assert isinstance(early.answer(), Facts)
        assert isinstance(late.answer(), Facts)
        assert loader.calls.count("prepare acme/a") == 2

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

    # Ends

    @pytest.mark.parametrize("where", ["resolve", "prepare", "fill"])
    def test_what_is_released_while_the_loader_is_at_it_gives_everything_back(
        self, loader: MemoryLoader, hosts: list[Host], where: str
    ) -> None:
        user = self.open(loader, hosts, keep_host=False)
        version = loader.publish("acme/a", 2)
        barrier = loader.barriers[f"{where} acme/a"] = Barrier()
        asked = user.resolve("acme/a") if where == "resolve" else user.fetch(version.resolved)
        barrier.await_arrival()
        user.host.release(asked.number)
        user.host.release(asked.number)
        barrier.open()
        self.eventually(user, {})
        assert held_bytes(user.images(version.resolved)[0])  # and it can be had again
        self.eventually(user, {})

    def test_what_was_cancelled_and_is_wanted_again_is_loaded(self, loader: MemoryLoader, hosts: list[Host]) -> None:
        user = self.open(loader, hosts)
        version = loader.publish("acme/a", 2)
        barrier = loader.barriers["prepare acme/a"] = Barrier()
        gone = user.fetch(version.resolved)
        barrier.await_arrival()
        user.host.release(gone.number)
        again = user.fetch(version.resolved)
        barrier.open()
        assert held_bytes(again.answer()[0]) == image_bytes(version.digest, 2)

    def test_what_is_forgotten_goes_with_its_last_holder_and_is_found_no_more(
        self, loader: MemoryLoader, hosts: list[Host]
    ) -> None:
        user = self.open(loader, hosts)
        version = loader.publish("acme/a", 2)
        held = user.fetch(version.resolved)
        (image,) = held.answer()
        user.host.forget(version.resolved.key)
        assert held_bytes(image) == image_bytes(version.digest, 2)
        loader.calls.clear()
        user.resolve(version.pinned).answer()
        (other,) = user.images(version.resolved)
        assert loader.calls == ["resolve acme/a", "prepare acme/a", "fill acme/a"]
        assert set(other.pages).isdisjoint(image.pages)
        user.host.release(held.number)
        self.eventually(user, {"acme": 2 * PAGE_BYTES})
        user.host.forget(version.resolved.key)
        self.eventually(user, {})

    def test_after_a_reload_nothing_of_the_old_base_is_found(self, loader: MemoryLoader, hosts: list[Host]) -> None:
        user = self.open(loader, hosts)
        user.images(loader.publish("acme/a", 2).resolved)
        loader.base = make_base("b" * 40)
        user.host.rebase(loader.base)
        new = loader.publish("acme/a", 2).resolved
        (image,) = user.images(new)
        assert image.key == new.key
        assert image.key.base == loader.base.pin
        self.eventually(user, {"acme": 2 * PAGE_BYTES})

    def test_a_loader_that_cancels_by_itself_has_failed(self, loader: MemoryLoader, hosts: list[Host]) -> None:
        """A hostile source must not make the host ask for ever."""
        user = self.open(loader, hosts)
        version = loader.publish("acme/a").resolved
        for where in ("prepare", "fill"):
            loader.failures = {f"{where} acme/a": reject(Code.LEASE_CANCELLED, "source", "go away")}
            assert user.fetch(version).problem().code is Code.LEASE_CANCELLED

    def test_closing_fails_what_waits(self, loader: MemoryLoader, hosts: list[Host]) -> None:
        user = self.open(loader, hosts)
        version = loader.publish("acme/a").resolved
        barrier = loader.barriers["prepare acme/a"] = Barrier()
        waiting = [user.verify(version), user.fetch(version)]
        barrier.await_arrival()
        closing = threading.Thread(target=user.host.close, args=(SECONDS,))
        closing.start()
        assert [asked.problem().code for asked in waiting] == [Code.CACHE_CLOSED] * 2
        barrier.open()
        closing.join(SECONDS)
        assert not closing.is_alive()
        user.host.release(waiting[0].number)

    def test_whatever_is_asked_after_the_end_fails_and_not_in_the_callers_thread(
        self, loader: MemoryLoader, hosts: list[Host]
    ) -> None:
        """The caller may hold locks that `settle` takes."""
        user = self.open(loader, hosts)
        version = loader.publish("acme/a").resolved
        user.host.close(SECONDS)
        lock, told = threading.Lock(), list[threading.Thread]()

        def settle(outcome: object) -> None:
            with lock:
                told.append(threading.current_thread())

        with lock:
            asked = [user.resolve("acme/a"), user.verify(version), user.fetch(version)]
            user.host.resolve([version.ref], "acme", settle)
        assert [each.problem().code for each in asked] == [Code.CACHE_CLOSED] * 3
        self.ends(lambda: bool(told))
        assert threading.current_thread() not in told
        self.ends(lambda: not any(thread.is_alive() for thread in told))

    def test_a_load_that_runs_says_how_far_it_is(self, loader: MemoryLoader, hosts: list[Host]) -> None:
        user = self.open(loader, hosts)
        version = loader.publish("acme/a", 3).resolved
        verifying, packing = Barrier(), Barrier()
        loader.barriers = {"prepare acme/a": verifying, "fill acme/a": packing}
        asked = user.fetch(version)
        verifying.await_arrival()
        self.says(user, {version.key: Progress(Stage.VERIFY, PAGE_BYTES, 3 * PAGE_BYTES)})
        verifying.open()
        packing.await_arrival()
        self.says(user, {version.key: Progress(Stage.PACK, 0, 3 * PAGE_BYTES)})
        packing.open()
        asked.answer()
        self.says(user, {})

    def test_a_load_that_fails_is_none_any_more(self, loader: MemoryLoader, hosts: list[Host]) -> None:
        user = self.open(loader, hosts)
        version = loader.publish("acme/a", 3).resolved
        for where in ("prepare", "fill"):
            barrier = Barrier()
            loader.barriers = {f"{where} acme/a": barrier}
            loader.failures = {f"{where} acme/a": reject(Code.HASH_MISMATCH, "source", "go away")}
            asked = user.fetch(version)
            barrier.await_arrival()
            self.says(user, {version.key: None})
            barrier.open()
            asked.problem()
            self.says(user, {})

    def says(self, user: HostUser, wanted: Mapping[VersionKey, Progress | None]) -> None:
        """`loading` comes to say that; None: whatever it says of the version."""

        def holds() -> bool:
            found = user.host.loading()
            return found.keys() == wanted.keys() and all(how in {None, found[key]} for key, how in wanted.items())

        self.ends(holds)

    def ends(self, holds: Callable[[], bool]) -> None:
        """Another thread, or the loader, makes it so, and tells nobody."""
        end = time.monotonic() + SECONDS
        while not holds():
            assert time.monotonic() < end, "it never came to pass"
            os.sched_yield()

    def test_settle_may_ask_again(self, loader: MemoryLoader, hosts: list[Host]) -> None:
        """No lock of the host's is held."""
        user = self.open(loader, hosts)
        version = loader.publish("acme/a").resolved
        inner: list[Asked] = []
        heard = threading.Event()

        def settle(_outcome: object) -> None:
            inner.append(user.fetch(version))
            heard.set()

        user.host.verify(version, "acme", settle)
        assert heard.wait(SECONDS)
        assert held_bytes(inner[0].answer()[0]) == image_bytes(version.version_digest, 1)

    def eventually(self, user: HostUser, tenants: Mapping[str, int]) -> None:
        """What is in use becomes that: what a released request held goes when the loader has noticed."""
        last: Sequence[object] = ()
        for _ in range(200):
            last = (user.host.usage().tenants,)
            if last == (tenants,):
                return
            user.resolve("acme/none").answer()  # a job after those that run
        raise AssertionError(f"{last} is not {tenants}")
