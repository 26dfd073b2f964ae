"""How what was asked of a host ends: released, forgotten, reloaded, closed; and how far it is until then."""

from __future__ import annotations

import threading

import pytest

from adapterd.gpu_cache.host.interface import Host, Progress, Stage
from adapterd.loader.errors import Code, reject
from contracts.host_user import SECONDS, Asked, HostBench, held_bytes
from fakes.adapters import PAGE_BYTES, MemoryLoader, image_bytes, make_base
from fakes.devices import Barrier


class HostEnds(HostBench):
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
