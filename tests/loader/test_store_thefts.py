"""The verified store against stolen ground: the bucket, the database, the API with its admission key."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from adapterd.loader.errors import Code, NotFound, Refused, Untrusted
from adapterd.loader.identity import CONFIG_FILE, WEIGHTS_FILE, FileEntry, version_digest
from adapterd.loader.limits import DEFAULT_LIMITS
from adapterd.loader.trust import oms
from fakes.packages import tiny_llama_spec, write_package
from fakes.registry_simulator import RegistrySimulator
from fakes.store_world import BASE, EVERY_LINEAR, OTHER_REVISION, World, current, left, refusal

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
