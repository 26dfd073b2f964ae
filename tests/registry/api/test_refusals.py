"""What must not become a version: each with its code, closed for good, and nothing left of it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adapterd.loader.checks import examine_path
from adapterd.loader.trust.keys import generate_publisher_key
from adapterd.registry.blobs.local import LocalBlobs
from fakes.registry_world import CONFIG, SIGNATURE, WEIGHTS, Package, World, make_package


def assert_refused(world: World, package: Package, expected: str, **over: Any) -> dict[str, Any]:
    """Refused by finalize with that code, then and ever after; nothing staged, no version, no alias."""
    upload_id = world.acme.send(package, alias="prod", **over)
    for answer in (world.acme.finalize(upload_id), world.acme.finalize(upload_id)):
        assert answer.status_code == 422, answer.text
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["code"] == expected
    shown = world.acme.show(upload_id)
    assert (shown["state"], shown["version"]) == ("refused", None)
    assert expected in {p["code"] for p in shown["problems"]}
    assert world.acme.http.get(world.acme.url("/adapters/finance")).status_code == 404
    return answer.json()


@pytest.fixture
def nothing_left(world: World, tmp_path: Path) -> Any:
    yield
    assert not any(p.is_file() for p in (tmp_path / "uploads").rglob("*"))
    assert isinstance(world.context.blobs, LocalBlobs)
    assert not any(p.is_file() for p in (tmp_path / "blobs").rglob("*"))


pytestmark = pytest.mark.usefixtures("nothing_left")


def lying(package: Package, name: str) -> Package:
    """The same sizes, other bytes than were declared: see `send`."""
    data = bytearray(package.files[name])
    data[-1] ^= 1
    return package.changed({name: bytes(data)})


def test_bytes_that_are_not_the_declared_ones(world: World, package: Package) -> None:
    signed = package.signed(world.acme.key)
    upload_id = world.acme.open(signed)["id"]
    for name, data in lying(signed, WEIGHTS).files.items():
        assert world.acme.patch(upload_id, name, data).status_code == 204
    answer = world.acme.finalize(upload_id)
    assert (answer.status_code, answer.json()["code"], answer.json()["where"]) == (
        422,
        "HASH_MISMATCH",
        WEIGHTS,
    )
    assert world.acme.show(upload_id)["state"] == "refused"


def test_no_signature(world: World, package: Package) -> None:
    assert_refused(world, package, "SIGNATURE_MISSING")


def test_a_stranger_s_signature(world: World, package: Package) -> None:
    assert_refused(world, package.signed(generate_publisher_key()), "KEY_UNKNOWN")
    assert_refused(world, package.signed(world.zeta.key), "KEY_UNKNOWN")


def test_a_revoked_key(world: World, package: Package) -> None:
    key_id = world.acme.key.public.key_id
    assert world.acme.http.post(world.acme.url(f"/keys/{key_id}:revoke")).json()["status"] == "revoked"
    assert_refused(world, package.signed(world.acme.key), "KEY_REVOKED")


def test_a_file_beside_the_signed_ones(world: World, package: Package) -> None:
    answer = assert_refused(
        world, package.signed(world.acme.key).changed({"README.md": b"added later"}), "MANIFEST_NOT_EXACT"
    )
    assert answer["where"] == "README.md"


def test_a_signed_file_that_is_missing(world: World, package: Package) -> None:
    signed = package.changed({"README.md": b"card"}).signed(world.acme.key)
    answer = assert_refused(world, signed.changed({"README.md": None}), "MANIFEST_NOT_EXACT")
    assert answer["where"] == "README.md"


def test_a_config_changed_after_signing(world: World, package: Package) -> None:
    signed = package.signed(world.acme.key)
    config = json.loads(signed.files[CONFIG])
    config["lora_alpha"] = 800
    answer = assert_refused(world, signed.changed({CONFIG: json.dumps(config).encode()}), "MANIFEST_NOT_EXACT")
    assert answer["where"] == CONFIG


def test_a_signature_that_is_no_bundle(world: World, package: Package) -> None:
    assert_refused(world, package.changed({SIGNATURE: b"{}"}), "SIGNATURE_MALFORMED")


def test_a_broken_signature_is_no_better_than_none(world: World, package: Package) -> None:
    """Where unsigned uploads pass, one with a wrong signature still does not."""
    world.acme.http.put(world.acme.url("/policy"), json={"require_signature": False})
    assert_refused(world, package.signed(generate_publisher_key()), "KEY_UNKNOWN")


def test_a_package_that_does_not_fit_the_base(world: World, tmp_path: Path) -> None:
    bad = make_package(tmp_path / "bad", target_modules=["no_such_proj"])
    assert_refused(world, bad.signed(world.acme.key), "CONFIG_TENSOR_DISAGREE")


def test_a_package_without_effect_unless_it_is_allowed(world: World, tmp_path: Path) -> None:
    assert_refused(world, make_package(tmp_path / "zero", scale=0.0).signed(world.acme.key), "ZERO_DELTA")


def test_the_server_says_what_the_loader_says(world: World, tmp_path: Path) -> None:
    """Word for word, warnings included (docs/surfaces.md)."""
    bad = make_package(tmp_path / "bad", scale=0.0, revision=None).signed(world.acme.key)
    (tmp_path / "bad" / SIGNATURE).write_bytes(bad.files[SIGNATURE])
    here = [p.as_json() for p in examine_path(tmp_path / "bad", world.base).problems]
    assert {p["severity"] for p in here} == {"reject", "warn"}
    answer = assert_refused(world, bad, "ZERO_DELTA")
    assert answer["problems"] == here


def bomb(length: int, size: int) -> bytes:
    return struct.pack("<Q", length) + b"{" + b" " * (size - 9)


@pytest.mark.parametrize(
    ("data", "sent", "expected"),
    [
        (bomb(1 << 40, 4000), 32, "ST_HEADER_TOO_LARGE"),
        (bomb(1000, 4000), 1008, "ST_HEADER_INVALID"),
        (b"version https://git-lfs.github.com/spec/v1\n" + b"x" * 900, 32, "ST_HEADER_INVALID"),
        (bomb(1 << 20, 4000), 32, "ST_TRUNCATED"),
    ],
)
def test_a_wrong_header_ends_the_transfer(
    world: World,
    package: Package,
    staged_sizes: Callable[[], list[int]],
    data: bytes,
    sent: int,
    expected: str,
) -> None:
    """The header is judged as soon as it is here; nothing more is taken (I7)."""
    upload_id = world.acme.open(package.changed({WEIGHTS: data}))["id"]
    assert world.acme.patch(upload_id, WEIGHTS, data[: sent - 1]).status_code == 204
    assert world.acme.show(upload_id)["state"] == "open"
    assert staged_sizes() == [sent - 1]
    answer = world.acme.patch(upload_id, WEIGHTS, data[sent - 1 :], sent - 1)
    assert (answer.status_code, answer.json()["code"], answer.json()["where"]) == (422, expected, WEIGHTS)
    assert world.acme.show(upload_id)["state"] == "refused"
    assert world.acme.finalize(upload_id).json()["code"] == expected


@pytest.fixture
def staged_sizes(tmp_path: Path) -> Callable[[], list[int]]:
    return lambda: [p.stat().st_size for p in (tmp_path / "uploads").rglob("*") if p.is_file()]
