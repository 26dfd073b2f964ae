"""The verified store on firm ground: what is fetched, found again and kept apart; and who must have signed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from adapterd.loader.errors import Code
from adapterd.loader.identity import Ref
from adapterd.loader.sources import FolderSource, Resolved
from adapterd.loader.trust import oms
from adapterd.loader.trust.keys import generate_publisher_key
from fakes.store_world import BASE, EVERY_LINEAR, World, as_folder, current, left, refusal

# --- the good way


def test_a_version_is_fetched_once_and_then_found(world: World) -> None:
    seen: list[int] = []
    stored = world.ensure(progress=seen.append)
    version = current(world)
    assert stored.source == "downloaded"
    assert stored.manifest.digest == version.statement.manifest_digest
    assert stored.statement == version.statement
    assert {p.name: p.read_bytes() for p in stored.directory.iterdir()} == version.files
    assert sum(seen) == version.statement.total_bytes
    asked = len(world.registry.requests)
    again = world.store().ensure(world.resolve(), world.registry.source(), BASE)
    assert again == replace(stored, source="disk")
    assert world.registry.requests[asked:] == ["POST /v1/resolve"]


def test_no_name_becomes_a_path(world: World) -> None:
    stored = world.ensure()
    assert left(world.root) == [stored.key.path_digest()]
    for path in world.root.rglob("*"):
        for name in ("acme", "finance", "tiny", "old", "default"):
            assert name not in path.name


def test_versions_tenants_and_bases_do_not_meet(world: World) -> None:
    world.publish(
        "globex/finance", 2, package={"modules": EVERY_LINEAR, "rank": 16, "files": {"README.md": b"# two\n"}}
    )
    one, old = world.ensure(), world.ensure("acme/finance:old")
    twin = world.ensure("globex/finance")
    assert one.key.digest == twin.key.digest
    assert len({one.directory, old.directory, twin.directory}) == 3


def test_two_names_of_one_content_share_files_and_keep_their_own_evidence(world: World) -> None:
    other = generate_publisher_key()
    world.trust.add_publisher_key("acme", other.public)
    package = {"modules": EVERY_LINEAR, "rank": 16, "files": {"README.md": b"# two\n"}}
    world.publish("acme/copy", 2, package=package, key=other)
    first = world.ensure()
    fetched = len(world.fetched())
    second = world.ensure("acme/copy")
    assert second.directory == first.directory
    assert second.source == "disk"
    assert len(world.fetched()) == fetched
    assert (first.statement.adapter, second.statement.adapter) == ("finance", "copy")
    assert second.checked.signature is not None
    assert second.checked.signature.key_id == other.public.key_id


def test_from_a_folder(world: World, tmp_path: Path) -> None:
    version = current(world)
    as_folder(version, tmp_path / "root")
    source = FolderSource(tmp_path / "root")
    stored = world.store().ensure(source.resolve(Ref.parse("acme/finance"), "acme"), source, BASE)
    assert stored.manifest.digest == version.statement.manifest_digest


# --- policy


def test_an_unsigned_version_needs_the_tenants_leave(world: World) -> None:
    world.publish("acme/unsigned", 4, key=None)
    assert refusal(lambda: world.ensure("acme/unsigned")).code is Code.SIGNATURE_MISSING
    world.trust.require_publisher("acme", required=False)
    assert world.ensure("acme/unsigned").checked.signature is None


def test_a_key_that_is_revoked_later_refuses_the_copy_on_disk(world: World) -> None:
    store = world.store()
    resolved, source = world.resolve(), world.registry.source()
    store.ensure(resolved, source, BASE)
    world.trust.revoke_key(world.key.public.key_id)
    assert refusal(lambda: store.ensure(resolved, source, BASE)).code is Code.KEY_REVOKED
    world.registry.faults.refuse_connections = 100
    assert refusal(lambda: store.ensure(resolved, source, BASE)).code is Code.KEY_REVOKED


def test_a_version_signed_again_after_a_revocation_is_taken_without_fetching_it_again(world: World) -> None:
    world.ensure()
    world.trust.revoke_key(world.key.public.key_id)
    again = generate_publisher_key()
    world.trust.add_publisher_key("acme", again.public)
    version = current(world)
    version.signature = oms.sign(version.statement.files, again, name="finance")
    held = oms.verify(version.signature, version.statement.files, [again.public])
    world.registry.reissue(version, signature_sha256=held.bundle_sha256, publisher=held.key_id)
    fetched = len(world.fetched())
    stored = world.ensure()
    assert stored.source == "disk"
    assert stored.statement.publisher == again.public.key_id
    assert len(world.fetched()) == fetched
    world.registry.faults.refuse_connections = 100
    resolved = Resolved(Ref("acme", "finance"), "acme", "finance", version.digest, 2, BASE.pin)
    assert world.store().ensure(resolved, world.registry.source(), BASE).source == "disk"
