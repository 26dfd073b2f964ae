"""The verified store against a registry that lies, a wire that breaks, and a disk that fills or rots."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from adapterd.loader.errors import (
    AdapterdError,
    Code,
    NotFound,
    Refused,
    Unavailable,
    Untrusted,
    error,
)
from adapterd.loader.identity import CONFIG_FILE, WEIGHTS_FILE, FileEntry, Ref, VersionKey, version_digest
from adapterd.loader.limits import DEFAULT_LIMITS
from adapterd.loader.sources import FolderSource, Resolved
from adapterd.loader.store import StoredVersion, VerifiedStore
from adapterd.loader.store_folder import StoreFolder
from adapterd.loader.trust import oms
from adapterd.loader.trust.keys import generate_publisher_key
from fakes.disk import file_size_limit
from fakes.packages import tiny_llama_spec, write_package
from fakes.registry_simulator import RegistrySimulator, SimVersion
from fakes.store_world import BASE, EVERY_LINEAR, World

OTHER_REVISION = tiny_llama_spec(revision="8" * 40)


def refusal(call: Callable[[], object]) -> AdapterdError:
    with pytest.raises(AdapterdError) as caught:
        call()
    return caught.value


def left(root: Path) -> list[str]:
    """What lies in the store beside its locks."""
    return sorted(p.name for p in root.iterdir() if p.name != ".locks")


def current(world: World) -> SimVersion:
    return world.registry.versions["acme", "finance"][1]


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
    package = tmp_path / "root" / "acme" / "finance" / "2"
    package.mkdir(parents=True)
    for name, data in version.files.items():
        (package / name).write_bytes(data)
    assert version.signature is not None
    (package / "model.sig").write_bytes(version.signature)
    (package.parent / "2.admission.dsse.json").write_bytes(version.envelope)
    (package.parent / "aliases.json").write_text('{"default": 2}')
    source = FolderSource(tmp_path / "root")
    stored = world.store().ensure(source.resolve(Ref.parse("acme/finance"), "acme"), source, BASE)
    assert stored.manifest.digest == version.statement.manifest_digest


# --- the bucket was stolen


@pytest.mark.parametrize(
    ("name", "position"), [(CONFIG_FILE, 3), (WEIGHTS_FILE, 20), (WEIGHTS_FILE, -1), ("README.md", 0)]
)
def test_a_flipped_byte(world: World, name: str, position: int) -> None:
    world.registry.flip_byte(current(world), name, position)
    found = refusal(world.ensure)
    assert found.code in (Code.HASH_MISMATCH, Code.CHUNK_MISMATCH)
    assert found.problem.where.startswith(name)
    assert left(world.root) == []


def test_nothing_more_is_fetched_after_the_first_bad_file(world: World) -> None:
    world.registry.flip_byte(current(world), "README.md", 0)
    refusal(world.ensure)
    assert world.fetched() == ["README.md"]


def test_nothing_is_parsed_before_its_digest_holds(world: World) -> None:
    """A tensor file that no parser would take is refused for its digest, not for its form."""
    version = current(world)
    version.files[WEIGHTS_FILE] = b"\xff" * len(version.files[WEIGHTS_FILE])
    assert refusal(world.ensure).code is Code.HASH_MISMATCH


def test_a_large_file_is_given_up_at_its_first_bad_chunk(world: World) -> None:
    size = 3 * (4 << 20)
    package = {"tensors": {}, "modules": EVERY_LINEAR, "rank": 4}
    version = world.publish("acme/big", 7, package=package)
    grown = version.files[WEIGHTS_FILE] + bytes(size)
    files = tuple(
        FileEntry(f.path, f.sha256, len(grown)) if f.path == WEIGHTS_FILE else f for f in version.statement.files
    )
    signature = oms.sign(files, world.key, name="big")
    held = oms.verify(signature, files, [world.key.public])
    world.registry.reissue(
        version,
        files=files,
        version_digest=version_digest(files),
        chunks=("0" * 64,) * 4,
        oms_root_digest=held.root_digest,
        signature_sha256=held.bundle_sha256,
    )
    version.signature, version.files[WEIGHTS_FILE] = signature, grown
    world.registry.aliases["acme", "big", "default"] = version.digest
    before = world.registry.sent
    found = refusal(lambda: world.ensure("acme/big"))
    assert isinstance(found, Untrusted)
    assert found.code is Code.CHUNK_MISMATCH
    assert world.registry.sent - before < size / 2
    assert left(world.root) == []


def test_a_missing_file(world: World) -> None:
    del current(world).files["README.md"]
    assert isinstance(refusal(world.ensure), NotFound)
    assert left(world.root) == []


def test_a_signature_of_other_files(world: World) -> None:
    old, new = world.registry.versions["acme", "finance"]
    new.signature = old.signature
    assert refusal(world.ensure).code is Code.MANIFEST_NOT_EXACT
    assert world.fetched() == []


def test_a_withheld_signature(world: World) -> None:
    current(world).signature = None
    assert refusal(world.ensure).code is Code.SIGNATURE_MISSING
    assert world.fetched() == []


# --- the database was stolen


def test_statements_of_two_versions_swapped(world: World) -> None:
    world.registry.swap_statements(*world.registry.versions["acme", "finance"])
    found = refusal(world.ensure)
    assert found.code is Code.STATEMENT_MISMATCH
    assert world.fetched() == []


def test_rows_of_two_versions_swapped_whole(world: World) -> None:
    """Every row agrees with itself, but number 1 is now what was admitted as number 2."""
    old, new = world.registry.versions["acme", "finance"]
    old.number, new.number = new.number, old.number
    found = refusal(world.ensure)
    assert (found.code, found.problem.where) == (Code.STATEMENT_MISMATCH, "version number")


def test_another_tenants_version_under_this_name(world: World) -> None:
    secret = world.publish("globex/secret", 5)
    world.registry.versions["acme", "finance"].append(secret)
    world.registry.aliases["acme", "finance", "default"] = secret.digest
    found = refusal(world.ensure)
    assert (found.code, found.problem.where) == (Code.STATEMENT_MISMATCH, "tenant")


def test_another_adapters_version_under_this_name(world: World) -> None:
    other = world.publish("acme/other", 6)
    world.registry.versions["acme", "finance"].append(other)
    world.registry.aliases["acme", "finance", "default"] = other.digest
    assert refusal(world.ensure).problem.where == "adapter"


def test_a_base_that_the_row_lies_about(world: World) -> None:
    world.publish("acme/elsewhere", 8, base=OTHER_REVISION, package={"base": OTHER_REVISION})
    world.registry.rewrite_resolved = lambda item: item | {"base": BASE.pin.as_json()}
    found = refusal(lambda: world.ensure("acme/elsewhere"))
    assert (found.code, found.problem.where) == (Code.STATEMENT_MISMATCH, "base revision")


def test_a_version_for_another_base(world: World) -> None:
    world.publish("acme/elsewhere", 8, base=OTHER_REVISION, package={"base": OTHER_REVISION})
    found = refusal(lambda: world.ensure("acme/elsewhere"))
    assert isinstance(found, Refused)
    assert found.code is Code.BASE_REVISION_MISMATCH
    table = tiny_llama_spec(layers=1)
    resolved = replace(world.resolve(), base=table.pin)
    assert refusal(lambda: world.store().ensure(resolved, world.registry.source(), BASE)).code is Code.BASE_MISMATCH
    named = replace(world.resolve(), base=replace(BASE.pin, id="other/model"))
    assert refusal(lambda: world.store().ensure(named, world.registry.source(), BASE)).code is Code.BASE_MISMATCH


# --- the API was stolen, with its admission key


def test_an_unsigned_file_added(world: World) -> None:
    version = current(world)
    version.files["tokenizer.json"] = b"{}"
    files = tuple(sorted([*version.statement.files, FileEntry("tokenizer.json", _sha(b"{}"), 2)]))
    world.registry.reissue(version, files=files, version_digest=version_digest(files))
    world.registry.aliases["acme", "finance", "default"] = version.digest
    found = refusal(world.ensure)
    assert (found.code, found.problem.where) == (Code.MANIFEST_NOT_EXACT, "tokenizer.json")
    assert world.fetched() == []


def _sha(data: bytes) -> str:
    from adapterd.loader.identity import sha256_hex

    return sha256_hex(data)


def test_a_statement_that_says_nobody_signed(world: World) -> None:
    version = current(world)
    world.registry.reissue(version, oms_root_digest=None, signature_sha256=None, publisher="none")
    version.signature = None
    assert refusal(world.ensure).code is Code.SIGNATURE_MISSING


def test_another_manifest_than_the_files_have(world: World) -> None:
    world.registry.reissue(current(world), manifest_digest="0" * 64)
    found = refusal(world.ensure)
    assert (found.code, found.problem.where) == (Code.STATEMENT_MISMATCH, "manifest digest")
    assert left(world.root) == []


def test_a_stranger_s_registry(world: World) -> None:
    stranger = RegistrySimulator()
    world.registry.admission_key = stranger.admission_key
    world.registry.reissue(current(world))
    assert refusal(world.ensure).code is Code.KEY_UNKNOWN
    assert world.fetched() == []


def test_a_version_that_never_passed_the_checks(world: World) -> None:
    """The worker repeats the structural checks: a signed and admitted file of wrong shape is refused."""
    bad = np.zeros((4, 31), dtype="<f4")
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    made = write_package(world.inbox / "bad", seed=9, tensors={name: bad}).directory
    version = current(world)
    version.files = {p.name: p.read_bytes() for p in made.iterdir()}
    files = tuple(FileEntry(n, _sha(d), len(d)) for n, d in sorted(version.files.items()))
    version.signature = oms.sign(files, world.key, name="finance")
    held = oms.verify(version.signature, files, [world.key.public])
    world.registry.reissue(
        version,
        files=files,
        version_digest=version_digest(files),
        chunks=(_sha(version.files[WEIGHTS_FILE]),),
        oms_root_digest=held.root_digest,
        signature_sha256=held.bundle_sha256,
    )
    world.registry.aliases["acme", "finance", "default"] = version.digest
    found = refusal(world.ensure)
    assert isinstance(found, Refused)
    assert found.code is Code.SHAPE_MISMATCH
    assert left(world.root) == []


@pytest.mark.parametrize("limits", [{"max_total_bytes": 1000}, {"max_files": 2}])
def test_a_statement_cannot_make_a_worker_fetch_too_much(world: World, limits: dict[str, int]) -> None:
    store = world.store(limits=replace(DEFAULT_LIMITS, **limits))
    found = refusal(lambda: store.ensure(world.resolve(), world.registry.source(), BASE))
    assert found.code is Code.QUOTA_EXCEEDED
    assert world.fetched() == []


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


# --- the wire


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


# --- the disk


def rot(path: Path, position: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: rot(d / CONFIG_FILE, 40),
        lambda d: rot(d / WEIGHTS_FILE, 9),
        lambda d: (d / WEIGHTS_FILE).write_bytes(b"short"),
        lambda d: (d / WEIGHTS_FILE).unlink(),
        lambda d: (d / "extra.txt").write_text("x"),
        lambda d: (d / "folder").mkdir(),
        lambda d: ((d / CONFIG_FILE).unlink(), (d / CONFIG_FILE).symlink_to("/etc/hostname")),
    ],
    ids=["config", "header", "short", "gone", "extra", "folder", "link"],
)
def test_a_local_copy_that_does_not_hold_is_fetched_again(world: World, damage: Callable[[Path], object]) -> None:
    directory = world.ensure().directory
    damage(directory)
    stored = world.ensure()
    assert stored.source == "downloaded"
    assert {p.name: p.read_bytes() for p in directory.iterdir()} == current(world).files


def test_a_rotten_tensor_byte_is_found_by_recheck(world: World) -> None:
    directory = world.ensure().directory
    rot(directory / WEIGHTS_FILE)
    assert world.ensure().source == "disk"  # pack() checks every chunk that it packs
    seen: list[int] = []
    assert world.ensure(recheck=True, progress=seen.append).source == "downloaded"
    assert world.ensure(recheck=True).source == "disk"
    assert (directory / WEIGHTS_FILE).read_bytes() == current(world).files[WEIGHTS_FILE]


def test_recheck_repeats_the_content_checks(world: World) -> None:
    stored = world.ensure(recheck=True)
    assert all(m.delta_norm is not None for m in stored.manifest.modules)
    assert all(m.delta_norm is None for m in world.ensure().manifest.modules)


def test_a_doubted_copy_is_hashed_and_replaced_if_it_does_not_hold(world: World) -> None:
    stored, kept = world.ensure(), world.ensure("acme/finance:old")
    world.store().doubt(stored.key)
    world.store().doubt(stored.key)
    assert left(world.root) == sorted([kept.key.path_digest(), stored.key.path_digest()])
    assert world.ensure().source == "disk"
    rot(stored.directory / WEIGHTS_FILE)
    world.store().doubt(stored.key)
    assert world.ensure().source == "downloaded"


@pytest.mark.parametrize("mark", [None, b"", b"{}", b'{"schema": "adapterd.verified/1", "version_digest": "0"}'])
def test_without_its_mark_a_copy_is_hashed_again(world: World, mark: bytes | None) -> None:
    stored = world.ensure()
    path = stored.directory.parent / "verified.json"
    good = path.read_bytes()
    path.unlink() if mark is None else path.write_bytes(mark)
    seen: list[int] = []
    assert world.ensure(progress=seen.append).source == "disk"
    assert sum(seen) == stored.statement.total_bytes
    assert path.read_bytes() == good
    path.unlink()
    rot(stored.directory / WEIGHTS_FILE)
    assert world.ensure().source == "downloaded"


def test_lost_evidence_is_fetched_again(world: World) -> None:
    stored = world.ensure()
    for path in (stored.directory.parent / "evidence").iterdir():
        path.unlink()
    assert world.ensure().source == "disk"
    for path in (stored.directory.parent / "evidence").iterdir():
        path.write_bytes(b"{")
    assert world.ensure().source == "disk"


def test_a_full_disk(world: World) -> None:
    resolved, store = world.resolve(), world.store()
    with file_size_limit(20_000):
        found = refusal(lambda: store.ensure(resolved, world.registry.source(), BASE))
    assert isinstance(found, Unavailable)
    assert found.code is Code.STORAGE_FULL
    assert left(world.root) == []
    assert store.ensure(resolved, world.registry.source(), BASE).source == "downloaded"


def test_a_root_that_cannot_be_made(world: World, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    found = refusal(lambda: VerifiedStore(tmp_path / "file" / "store", world.trust))
    assert found.code is Code.STORAGE_UNAVAILABLE


@pytest.mark.parametrize("at", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_download_leaves_nothing(world: World, at: type[BaseException]) -> None:
    def interrupt(_: int) -> None:
        raise at

    with pytest.raises(at):
        world.ensure(progress=interrupt)
    assert left(world.root) == []
    assert world.ensure().source == "downloaded"


KILLED = """
import os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from fakes.packages import tiny_llama_spec
from adapterd.loader.identity import Ref
from adapterd.loader.sources import FolderSource
from adapterd.loader.store import VerifiedStore
from adapterd.loader.trust.policy import TrustStore
source = FolderSource(sys.argv[2])
store = VerifiedStore(Path(sys.argv[3]), TrustStore.load(sys.argv[4]))
resolved = source.resolve(Ref.parse("acme/finance"), "acme")
seen = 0
def die(n):
    global seen
    seen += n
    if seen > int(sys.argv[5]):
        os.kill(os.getpid(), 9)
store.ensure(resolved, source, tiny_llama_spec(), progress=die)
"""


def test_a_killed_process_leaves_only_what_the_next_start_sweeps(world: World, tmp_path: Path) -> None:
    version = current(world)
    package = tmp_path / "root" / "acme" / "finance" / "2"
    package.mkdir(parents=True)
    for name, data in version.files.items():
        (package / name).write_bytes(data)
    assert version.signature is not None
    (package / "model.sig").write_bytes(version.signature)
    (package.parent / "2.admission.dsse.json").write_bytes(version.envelope)
    (package.parent / "aliases.json").write_text('{"default": 2}')
    world.trust.save(tmp_path / "trust.json")
    tests = Path(__file__).parents[1]
    arguments = [
        tests,
        tmp_path / "root",
        world.root,
        tmp_path / "trust.json",
        version.statement.total_bytes // 2,
    ]
    run = subprocess.run([sys.executable, "-c", KILLED, *map(str, arguments)], check=False, capture_output=True)
    assert run.returncode == -9, run.stderr
    assert [name.startswith(".incoming-") for name in left(world.root)] == [True]
    world.store()
    assert left(world.root) == []
    assert world.ensure().source == "downloaded"


# --- at once


def test_a_start_does_not_sweep_what_another_is_filling(world: World) -> None:
    seen: list[list[str]] = []

    def look(count: int) -> None:
        if count and not seen:
            world.store()
            seen.append(left(world.root))

    assert world.ensure(progress=look).source == "downloaded"
    assert [len(names) for names in seen] == [1]
    assert seen[0][0].startswith(".incoming-")


def test_many_threads_fetch_one_version_once(world: World) -> None:
    resolved = world.resolve()
    found: list[StoredVersion] = []
    start = threading.Barrier(6)

    def work() -> None:
        store = world.store()
        start.wait()
        found.append(store.ensure(resolved, world.registry.source(), BASE))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(f.source for f in found) == ["disk"] * 5 + ["downloaded"]
    assert sorted(world.fetched()) == sorted(current(world).files)
    assert len({f.directory for f in found}) == 1


def test_the_key_is_the_served_base_s(world: World) -> None:
    stored = world.ensure()
    assert stored.key == VersionKey("acme", BASE.pin, current(world).digest)
    assert stored.directory.parent.name == stored.key.path_digest()


def test_waiting_for_another_process_that_hangs_can_be_given_up(world: World) -> None:
    resolved = world.resolve()
    seen: list[int] = []

    def give_up(count: int) -> None:
        seen.append(count)
        if len(seen) == 3:
            raise error(Code.LEASE_CANCELLED, "acme/finance", "nobody waits for it any more")

    store = world.store()
    with StoreFolder(world.root).locked(resolved.key.path_digest()):
        found = refusal(lambda: store.ensure(resolved, world.registry.source(), BASE, progress=give_up))
        store.doubt(resolved.key)  # nor does that wait
    assert found.code is Code.LEASE_CANCELLED
    assert seen == [0, 0, 0]
    assert world.ensure().source == "downloaded"


def test_a_small_file_that_finds_no_room_leaves_no_piece_of_itself(world: World) -> None:
    stored = world.ensure()
    evidence = stored.directory.parent / "evidence"
    for path in evidence.iterdir():
        path.unlink()
    with file_size_limit(100):
        assert refusal(world.ensure).code is Code.STORAGE_FULL
    assert list(evidence.iterdir()) == []
    assert world.ensure().source == "disk"
