from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from adapterd.loader.errors import Code, Failed, NotFound, Unavailable, Untrusted
from adapterd.loader.trust.keys import Algorithm, generate_admission_key, generate_publisher_key
from adapterd.loader.trust.policy import TrustStore
from fakes.disk import file_size_limit

REGISTRY = generate_admission_key().public
ACME = generate_publisher_key().public
GLOBEX = generate_publisher_key(Algorithm.P384).public


def filled() -> TrustStore:
    trust = TrustStore()
    trust.add_admission_key(REGISTRY, "registry")
    trust.add_publisher_key("acme", ACME, "acme")
    trust.add_publisher_key("globex", GLOBEX)
    trust.require_publisher("lab", required=False)
    return trust


def refusal(path: Path) -> Untrusted:
    with pytest.raises(Untrusted) as caught:
        TrustStore.load(path)
    return caught.value


def test_an_empty_store_trusts_nobody() -> None:
    trust = TrustStore()
    assert trust.admission_keys == ()
    assert trust.tenant("acme").publishers == ()
    assert trust.tenant("acme").require_publisher


def test_it_round_trips_through_a_file(tmp_path: Path) -> None:
    trust, path = filled(), tmp_path / "trust.json"
    trust.save(path)
    assert TrustStore.load(path) == trust
    assert TrustStore.load(path).digest == trust.digest
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert trust.tenants == ("acme", "globex", "lab")
    assert [p.name for p in tmp_path.iterdir()] == ["trust.json"]


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    found = refusal(tmp_path / "trust.json")
    assert found.code is Code.TRUST_NOT_CONFIGURED
    assert "adapterctl trust init" in found.problem.hint


def test_a_file_that_others_may_write_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trust.json"
    filled().save(path)
    path.chmod(0o666)
    assert refusal(path).code is Code.TRUST_FILE_INVALID
    path.chmod(0o644)
    assert TrustStore.load(path) == filled()


def _tenant(**changes: Any) -> dict[str, Any]:
    value = filled().as_json()
    value["tenants"]["acme"].update(changes)
    return value


def _first_key(**changes: Any) -> dict[str, Any]:
    value = filled().as_json()
    value["admission_keys"][0].update(changes)
    return value


@pytest.mark.parametrize(
    "value",
    [
        [],
        {"schema": "adapterd.trust/1"},
        filled().as_json() | {"schema": "adapterd.trust/2"},
        filled().as_json() | {"default_allow": True},
        filled().as_json() | {"tenants": {"../x": {"require_publisher": True, "publishers": []}}},
        _tenant(require_publisher="yes"),
        _tenant(publishers=None),
        _tenant(publishers=[filled().as_json()["admission_keys"][0]]),
        _tenant(publishers=filled().as_json()["tenants"]["acme"]["publishers"] * 2),
        _first_key(pem="nonsense"),
        _first_key(key_id="0" * 64),
        _first_key(pem=ACME.pem, key_id=ACME.key_id),
        _first_key(revoked=1),
        _first_key(name="a\x1b[31mb"),
    ],
)
def test_anything_doubtful_in_the_file_is_refused(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "trust.json"
    path.write_text(json.dumps(value))
    assert refusal(path).code is Code.TRUST_FILE_INVALID
    with pytest.raises(Untrusted):
        TrustStore.from_json(value)


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b'{"schema": 1, "schema": 2}', b"[" * 99])
def test_a_file_that_is_no_json(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "trust.json"
    path.write_bytes(data)
    assert refusal(path).code is Code.TRUST_FILE_INVALID


def test_a_folder_is_no_trust_file(tmp_path: Path) -> None:
    assert refusal(tmp_path).code is Code.TRUST_FILE_INVALID


def test_adding_twice_renames_and_never_revives(tmp_path: Path) -> None:
    trust = filled()
    trust.revoke_key(ACME.key_id)
    trust.add_publisher_key("acme", ACME, "new name")
    (entry,) = trust.tenant("acme").publishers
    assert entry.revoked
    assert entry.name == "new name"


def test_revoking_reaches_every_role_and_tenant() -> None:
    trust = filled()
    trust.add_publisher_key("globex", ACME)
    trust.revoke_key(ACME.key_id)
    assert [k.revoked for k in trust.tenant("acme").publishers] == [True]
    assert [k.revoked for k in trust.tenant("globex").publishers] == [False, True]
    trust.revoke_key(ACME.key_id)
    trust.revoke_key(REGISTRY.key_id)
    assert trust.admission_keys[0].revoked
    with pytest.raises(NotFound):
        trust.revoke_key("0" * 64)


def test_keys_have_one_role() -> None:
    trust = TrustStore()
    for add in (lambda: trust.add_admission_key(ACME), lambda: trust.add_publisher_key("acme", REGISTRY)):
        with pytest.raises(Untrusted) as caught:
            add()
        assert caught.value.code is Code.KEY_UNSUPPORTED
    with pytest.raises(Failed):
        trust.add_publisher_key("Not A Tenant", ACME)
    assert trust == TrustStore()


def test_the_digest_changes_with_what_is_trusted() -> None:
    trust = filled()
    before = trust.digest
    trust.require_publisher("acme", required=False)
    assert trust.digest != before


def test_a_full_disk_is_told_as_one_and_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "trust.json"
    TrustStore().save(path)
    before = path.read_bytes()
    with file_size_limit(len(before)), pytest.raises(Unavailable) as caught:
        filled().save(path)
    assert (caught.value.code, caught.value.problem.where) == (Code.STORAGE_FULL, str(path))
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("trust.json", before)]


def test_a_save_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "trust.json"
    filled().save(path)
    before = path.read_bytes()
    with pytest.raises(Unavailable) as caught:
        TrustStore().save(tmp_path / "missing" / "trust.json")
    assert caught.value.code is Code.STORAGE_UNAVAILABLE
    blocked = tmp_path / "folder"
    (blocked / "trust.json").mkdir(parents=True)
    with pytest.raises(Unavailable):
        TrustStore().save(blocked / "trust.json")
    assert [p.name for p in blocked.iterdir()] == ["trust.json"]
    assert path.read_bytes() == before


def test_changes_are_counted(tmp_path: Path) -> None:
    trust = TrustStore()
    seen = [trust.changes]
    for change in (
        lambda: trust.add_admission_key(REGISTRY),
        lambda: trust.add_publisher_key("acme", ACME),
        lambda: trust.require_publisher("lab", required=False),
        lambda: trust.revoke_key(ACME.key_id),
    ):
        change()
        seen.append(trust.changes)
    assert seen == sorted(set(seen))


def test_a_running_process_takes_over_what_the_file_says_now(tmp_path: Path) -> None:
    path = tmp_path / "trust.json"
    filled().save(path)
    trust = TrustStore.load(path)
    before = trust.changes
    trust.reload(path)
    assert trust.changes == before  # the same
    edited = filled()
    edited.revoke_key(ACME.key_id)
    edited.save(path)
    trust.reload(path)
    assert trust == edited
    assert trust.changes > before
    path.write_text("{")
    with pytest.raises(Untrusted):
        trust.reload(path)
    assert trust == edited
