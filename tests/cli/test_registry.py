"""The commands against a registry that runs: publish, look, move, fetch, and every way to be refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from adapterd.loader.trust.admission import open_statement
from adapterd.loader.trust.keys import PublicKey
from fakes.packages import TINY_ID, tiny_llama_spec, write_package
from fakes.shell_world import PINNED, SCOPES, ShellWorld, shell_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShellWorld]:
    with shell_world(tmp_path_factory.mktemp("world")) as made:
        yield made


def _publish(world: ShellWorld, folder: Path, name: str, *more: str, **package: object) -> dict[str, object]:
    write_package(folder, **package)  # type: ignore[arg-type]
    return world.acme.json("upload", folder, name, "--base", PINNED, "--sign", world.key, *more)


def test_the_main_road(world: ShellWorld, tmp_path: Path) -> None:
    acme = world.acme
    first = _publish(world, tmp_path / "v1", "acme/road", "--alias", "prod", seed=1)
    assert first["version"]["number"] == 1  # type: ignore[index]
    ref = f"acme/road@sha256:{first['version_digest']}"
    assert first["ref"] == ref
    assert acme.run("list", "acme", "-q").stdout.split() == ["acme/road"]
    assert acme.run("list", "-q").stdout.split() == ["acme/road"]  # the token's own tenant
    assert acme.run("list", "acme/road", "-q").stdout.split() == [ref]
    assert acme.json("show", "acme/road:prod")["ref"] == ref
    inspected = acme.json("inspect", "acme/road:prod")["manifest"]
    here = acme.json("verify", tmp_path / "v1", "--base", PINNED, "--key", f"{world.key}.pub")
    assert inspected == here["manifest"]
    there = acme.json("verify", "acme/road:prod")
    assert there["subject"] == "acme/road:prod"
    assert {k: there[k] for k in ("problems", "signature", "manifest")} == {
        k: here[k] for k in ("problems", "signature", "manifest")
    }
    shown = acme.run("show", "acme/road:prod").stdout
    assert str(first["version_digest"]) in shown
    assert "adapter_model.safetensors" in shown


def test_the_same_files_again_are_the_same_version_and_it_is_said(world: ShellWorld, tmp_path: Path) -> None:
    first = _publish(world, tmp_path / "v1", "acme/again", seed=5)
    words = ("upload", tmp_path / "v1", "acme/again", "--base", PINNED, "--sign", world.key)
    again = world.acme.run(*words)
    assert again.exit_code == 0 and "version 1 already" in again.stderr
    assert world.acme.json(*words)["version"]["number"] == first["version"]["number"]  # type: ignore[index]


def test_a_pull_is_what_was_published_with_its_statement_beside_it(world: ShellWorld, tmp_path: Path) -> None:
    told = _publish(world, tmp_path / "v1", "acme/pulled", "--alias", "default")
    out = tmp_path / "deep/out"
    body = world.acme.json("pull", "acme/pulled", "--out", out)
    assert (body["ref"], body["version_digest"]) == (told["ref"], told["version_digest"])
    assert {p.name: p.read_bytes() for p in out.iterdir()} == {
        p.name: p.read_bytes() for p in (tmp_path / "v1").iterdir()
    }
    proof = tmp_path / "deep/out.admission.dsse.json"
    trust = json.loads((world.acme.home / "config/adapterd/trust.json").read_text())
    admission = PublicKey.from_pem(trust["admission_keys"][0]["pem"])
    assert open_statement(proof.read_bytes(), [admission]).version_digest == told["version_digest"]
    assert sorted(p.name for p in out.parent.iterdir()) == ["out", "out.admission.dsse.json"]
    assert world.acme.codes("pull", "acme/pulled", "--out", out, status=7) == ["ALREADY_EXISTS"]


def test_nothing_is_kept_that_the_trust_file_does_not_vouch_for(world: ShellWorld, tmp_path: Path) -> None:
    _publish(world, tmp_path / "v1", "acme/untrusted", "--alias", "default")
    for name, words, code in [
        ("no-file", [], "TRUST_NOT_CONFIGURED"),
        ("no-admission", ["init"], "KEY_UNKNOWN"),
        ("no-publisher", ["init", "--from-server"], "KEY_UNKNOWN"),
    ]:
        shell = world.acme.with_variables(ADAPTERD_TRUST=str(tmp_path / f"{name}.json"))
        if words:
            shell.json("trust", *words)
        assert shell.codes("pull", "acme/untrusted", "--out", tmp_path / "out", status=3) == [code]
        assert shell.codes("verify", "acme/untrusted", status=3) == [code]
    assert not list(tmp_path.glob("out*"))
    assert not list(tmp_path.glob(".out*"))


def test_aliases_move_under_a_condition_and_remember(world: ShellWorld, tmp_path: Path) -> None:
    one = _publish(world, tmp_path / "v1", "acme/moves", seed=1)["version_digest"]
    two = _publish(world, tmp_path / "v2", "acme/moves", seed=2, rank=8)["version_digest"]
    acme = world.acme
    assert acme.json("alias", "set", "acme/moves:prod", "1")["before"] is None
    assert acme.json("alias", "set", "acme/moves:prod", f"sha256:{two}")["before"] == one
    acme.json("alias", "set", "acme/moves:canary", "acme/moves:prod")
    assert acme.json("alias", "list", "acme/moves")["aliases"] == {"prod": two, "canary": two}
    assert acme.run("alias", "history", "acme/moves:prod", "-q").stdout.split() == [
        f"sha256:{two}",
        f"sha256:{one}",
    ]
    assert acme.codes("alias", "set", "acme/moves:prod", "9", status=5) == ["NOT_FOUND"]
    assert acme.codes("alias", "set", "acme/moves", "1", status=1) == ["REF_INVALID"]
    assert acme.codes("show", f"acme/moves:prod@sha256:{one}", status=7) == ["REF_CONFLICT"]
    changed = acme.json("diff", f"acme/moves@sha256:{one}", "acme/moves:prod")
    assert changed["same_files"] is False
    assert {m["change"] for m in changed["modules"]} == {"changed"}
    assert changed["modules"][0]["fields"]["rank"] == [4, 8]
    assert acme.json("diff", "acme/moves:prod", "acme/moves:canary")["modules"] == []


def test_a_withdrawn_version_comes_back_by_release(world: ShellWorld, tmp_path: Path) -> None:
    ref = str(_publish(world, tmp_path / "v1", "acme/gone", "--alias", "prod")["ref"])
    acme = world.acme
    assert acme.json("quarantine", ref)["state"] == "quarantined"
    assert acme.run("pull", ref, "--out", tmp_path / "out").exit_code == 7
    assert not (tmp_path / "out").exists()
    assert acme.json("release", ref)["state"] == "active"
    assert acme.json("yank", "acme/gone:prod")["state"] == "yanked"
    acme.json("pull", ref, "--out", tmp_path / "out")


def test_another_tenants_adapter_is_no_different_from_none(world: ShellWorld, tmp_path: Path) -> None:
    _publish(world, tmp_path / "v1", "acme/secret", "--alias", "prod")
    world.globex.run("trust", "init", "--from-server")
    for words in (["show"], ["verify"], ["inspect"], ["pull"]):
        real = world.globex.run(*words, "acme/secret:prod", "--json")
        none = world.globex.run(*words, "acme/nothing:prod", "--json")
        assert (real.exit_code, none.exit_code) == (5, 5)
        assert real.stdout.replace("secret", "nothing") == none.stdout
    assert world.globex.codes("list", "acme", status=5) == ["NOT_FOUND"]


def test_the_local_check_stops_a_bad_package_before_anything_is_sent(world: ShellWorld, tmp_path: Path) -> None:
    folder = write_package(tmp_path / "zero", scale=0.0).directory
    words = ["upload", folder, "acme/zero", "--base", PINNED, "--sign", world.key]
    assert world.acme.codes(*words, status=6) == ["ZERO_DELTA"]
    assert not (folder / "model.sig").exists()
    assert world.acme.codes("show", "acme/zero", status=5) == ["NOT_FOUND"]


def test_the_server_has_the_last_word(world: ShellWorld, tmp_path: Path) -> None:
    folder = write_package(tmp_path / "unsigned").directory
    words = ["upload", folder, "acme/unsigned", "--base", PINNED]
    assert world.acme.codes(*words, status=3) == ["SIGNATURE_MISSING"]
    assert world.acme.codes(*words, status=3) == ["SIGNATURE_MISSING"]  # and again, not "continued"
    assert not list((world.acme.home / "state/adapterd/uploads").glob("*"))
    stranger = tmp_path / "stranger.pem"
    world.acme.json("keygen", stranger)
    assert world.acme.codes(*words, "--sign", stranger, status=3) == ["KEY_UNKNOWN"]


def test_the_base_is_found_in_the_configuration(world: ShellWorld, tmp_path: Path) -> None:
    folder = write_package(tmp_path / "v1", seed=5).directory
    body = world.acme.json("upload", folder, "acme/found", "--sign", world.key)
    assert body["version"]["base"]["id"] == TINY_ID
    other = write_package(tmp_path / "v2", base_model_name_or_path="somebody/else").directory
    result = world.acme.run("upload", other, "acme/found", "--sign", world.key)
    assert result.exit_code == 2
    assert PINNED in result.stderr
    words = ["upload", other, "acme/found", "--base", f"nobody/nothing@{'1' * 40}"]
    assert world.acme.codes(*words, status=5) == ["BASE_NOT_REGISTERED"]


def test_bases_are_listed_shown_and_exported(world: ShellWorld, tmp_path: Path) -> None:
    acme, out = world.acme, tmp_path / "table.json"
    assert acme.run("base", "list", "-q").stdout.split() == [PINNED]
    assert len(acme.run("base", "show", PINNED, "-q").stdout.split()) == len(tiny_llama_spec().modules)
    assert acme.json("base", "export", PINNED, "--out", out)["module_table_digest"] == tiny_llama_spec().table_digest
    assert acme.codes("base", "export", PINNED, "--out", out, status=7) == ["ALREADY_EXISTS"]
    package = write_package(tmp_path / "p").directory
    assert acme.json("verify", package, "--base", out) == acme.json("verify", package, "--base", PINNED)
    assert acme.codes("base", "add", out, status=5) == ["NOT_FOUND"]  # the operator's, and no word more
    assert acme.codes("base", "show", f"{TINY_ID}@main", status=1) == ["REF_INVALID"]


def test_administration(world: ShellWorld, tmp_path: Path) -> None:
    operator, acme = world.operator, world.acme
    assert {"acme", "globex"} <= set(operator.run("tenant", "list", "-q").stdout.split())
    assert operator.codes("tenant", "create", "acme", status=7) == ["ALREADY_EXISTS"]
    assert operator.run("list").exit_code == 2  # an operator has no tenant of its own
    made = operator.json("token", "create", "globex", "--kind", "w", "--days", "1")
    worker = acme.with_variables(ADAPTERD_TOKEN=made["token"])
    caller = worker.json("token", "whoami")["caller"]
    assert (caller["tenant"], caller["kind"], caller["scopes"]) == ("globex", "w", ["adapters:read"])
    assert made["id"] in operator.run("token", "list", "globex", "-q").stdout.split()
    operator.json("token", "revoke", made["id"], "--tenant", "globex")
    assert worker.run("token", "whoami").exit_code == 4
    everywhere = operator.json("token", "create", "--all-tenants", "--kind", "w", "--days", "1")
    assert everywhere["id"] in operator.run("token", "list", "-q").stdout.split()
    assert acme.with_variables(ADAPTERD_TOKEN=everywhere["token"]).run("list", "acme").exit_code == 0
    operator.json("token", "revoke", everywhere["id"])
    assert operator.run("token", "create").exit_code == 2
    assert operator.run("token", "create", "acme", "--all-tenants").exit_code == 2
    other = tmp_path / "other.pem"
    key_id = acme.json("keygen", other)["key_id"]
    acme.json("key", "add", "acme", f"{other}.pub")
    assert acme.codes("key", "add", "acme", other, status=3) == ["KEY_UNSUPPORTED"]  # a private key stays here
    acme.json("key", "revoke", "acme", key_id)
    assert {k["key_id"]: k["status"] for k in acme.json("key", "list", "acme")["keys"]}[key_id] == "revoked"
    policy = operator.json("tenant", "policy", "globex", "--allow-unsigned", "--allow", "ZERO_DELTA")["policy"]
    assert (policy["require_signature"], policy["allow"]) == (False, ["ZERO_DELTA"])
    assert operator.json("tenant", "policy", "globex")["policy"] == policy


def test_an_operator_sets_a_tenants_caps_and_what_it_does_not_take(world: ShellWorld, tmp_path: Path) -> None:
    caps = tmp_path / "caps.json"
    caps.write_text('{"max_rank": 2, "allowed_target_modules": ["q_proj"]}')
    world.operator.json("tenant", "create", "strict")
    policy = world.operator.json(
        "tenant", "policy", "strict", "--limits", caps, "--refuse", "SCALE_SUSPECT", "--refuse", "BASE_MISMATCH"
    )["policy"]
    assert (policy["limits"]["max_rank"], policy["limits"]["allowed_target_modules"]) == (2, ["q_proj"])
    assert policy["refuse"] == ["BASE_MISMATCH", "SCALE_SUSPECT"]
    assert world.operator.codes("tenant", "policy", "strict", "--refuse", "NONSENSE", status=2) == ["REQUEST_INVALID"]


def test_an_unsigned_version_passes_where_the_policy_says_so(world: ShellWorld, tmp_path: Path) -> None:
    world.operator.json("tenant", "create", "lax")
    scopes = [word for scope in SCOPES for word in ("--scope", scope)]
    token = world.operator.json("token", "create", "lax", *scopes)["token"]
    lax = world.acme.with_variables(ADAPTERD_TOKEN=token, ADAPTERD_TRUST=str(tmp_path / "trust.json"))
    world.operator.json("tenant", "policy", "lax", "--allow-unsigned", "--allow", "ZERO_DELTA")
    folder = write_package(tmp_path / "zero", scale=0.0).directory
    words = ["upload", folder, "lax/zero", "--base", PINNED, "--alias", "default"]
    body = lax.json(*words, "--allow", "ZERO_DELTA")
    assert body["version"]["publisher"] == "none"
    assert [(p["code"], p["severity"]) for p in body["problems"]] == [("ZERO_DELTA", "warn")]
    lax.json("trust", "init", "--from-server")
    lax.json("trust", "add-key", f"{world.key}.pub", "--tenant", "lax", "--allow-unsigned")
    lax.json("pull", "lax/zero", "--out", tmp_path / "out")
    assert not (tmp_path / "out/model.sig").exists()
    # `verify` on a REF is strict all the same, unless asked.
    assert "SIGNATURE_MISSING" in lax.codes("verify", "lax/zero", "--allow", "ZERO_DELTA", status=3)
    lax.json("verify", "lax/zero", "--allow", "ZERO_DELTA", "--policy", "permissive")


def test_no_token_a_wrong_token_no_server_no_address(world: ShellWorld, package: Path) -> None:
    for token in ("", "adru_wrong"):
        shell = world.acme.with_variables(ADAPTERD_TOKEN=token)
        for words in (["list", "acme"], ["show", "acme/x"], ["pull", "acme/x"]):
            assert shell.run(*words).exit_code == 4, words
    nobody = world.acme.with_variables(ADAPTERD_URL="http://127.0.0.1:9")
    assert nobody.codes("list", "acme", status=8) == ["SERVER_UNREACHABLE"]
    nowhere = world.acme.with_variables(ADAPTERD_URL="")
    assert nowhere.codes("list", "acme", status=1) == ["SETTINGS_INVALID"]
    assert nowhere.codes("verify", "acme/x", status=5) == ["PATH_NOT_FOUND"]
