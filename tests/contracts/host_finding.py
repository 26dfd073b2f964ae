"""What a host finds: versions by their names, facts by their claims, images that it has at hand."""

from __future__ import annotations

from dataclasses import replace

from adapterd.gpu_cache.host.interface import Facts, Failure, Host, Origin
from adapterd.loader.errors import Code, reject
from adapterd.loader.identity import Ref
from contracts.host_user import SECONDS, HostBench, HostUser, held_bytes
from fakes.adapters import PAGE_BYTES, MemoryLoader, image_bytes
from fakes.devices import Barrier


class HostFinding(HostBench):
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

    # At hand

    def test_what_is_at_hand_is_what_a_fetch_says_and_is_held_like_it(
        self, loader: MemoryLoader, hosts: list[Host]
    ) -> None:
        """A host may always say that it has to be asked."""
        user = self.open(loader, hosts)
        version = loader.publish("acme/a", 2, publisher="key-1")
        (image,) = user.images(version.resolved)
        for wanted in ([Ref.parse(version.pinned)], [version.resolved]):
            here = user.host.at_hand(wanted, "acme")
            assert here is None or here == replace(
                here,
                resolved=(version.resolved,),
                facts=(Facts(image.manifest, image.layout, "key-1"),),
                images=(replace(image, origin=Origin.HOST, seconds={}),),
                trust_changes=user.host.trust_changes,
            )
            user.host.forget(version.resolved.key)
            if here is not None:
                assert held_bytes(here.images[0]) == image_bytes(version.digest, 2)
                self.eventually(user, {"acme": 2 * PAGE_BYTES})
                user.host.release(here.request)
            self.eventually(user, {})
            user.images(version.resolved)

    def test_nothing_is_at_hand_that_would_have_to_be_asked_brought_or_verified(
        self, loader: MemoryLoader, hosts: list[Host]
    ) -> None:
        user = self.open(loader, hosts)
        here, other, secret = (loader.publish(name) for name in ("acme/a", "acme/b", "blue/c"))
        lie = replace(here.resolved, version_number=7)
        user.images(here.resolved)
        HostUser(user.host, "blue").images(secret.resolved)
        user.verify(other.resolved).answer()
        named = ["acme/a", f"acme/b@sha256:{here.digest}", other.pinned, secret.pinned, f"blue/a@sha256:{here.digest}"]
        loader.calls.clear()
        for ref in named:
            assert user.host.at_hand([Ref.parse(ref)], "acme") is None, ref
        for wanted in ([lie], [other.resolved], [secret.resolved], [here.resolved, other.resolved]):
            assert user.host.at_hand(wanted, "acme") is None
        loader.trust_changes += 1
        assert user.host.trust_changes == loader.trust_changes
        assert user.host.at_hand([here.resolved], "acme") is None
        user.host.close(SECONDS)
        assert user.host.at_hand([here.resolved], "acme") is None
        assert loader.calls == []
