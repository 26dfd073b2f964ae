"""keygen, sign, verify and inspect on a folder, without a server."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import numpy as np
import pytest

from adapterd.loader.base_model import BaseSpec
from adapterd.loader.formats.files import DirectoryPackage, file_entries
from adapterd.loader.identity import sha256_hex, version_digest
from adapterd.loader.limits import DEFAULT_LIMITS
from adapterd.loader.trust.keys import PrivateKey, PublicKey
from fakes.commands import Commands
from fakes.packages import tiny_llama_spec, write_package


def test_keygen_makes_a_private_pair_and_never_overwrites(shell: Commands, tmp_path: Path) -> None:
    body = shell.json("keygen", tmp_path / "k")
    private, public = tmp_path / "k", tmp_path / "k.pub"
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    assert PrivateKey.from_pem(private.read_bytes()).public == PublicKey.from_pem(public.read_bytes())
    assert body["key_id"] == PublicKey.from_pem(public.read_bytes()).key_id
    before = private.read_bytes()
    assert shell.codes("keygen", tmp_path / "k", status=7) == ["ALREADY_EXISTS"]
    private.unlink()
    assert shell.codes("keygen", tmp_path / "k", status=7) == ["ALREADY_EXISTS"]  # a public key is one, too
    assert not private.exists()
    assert before.startswith(b"-----BEGIN PRIVATE KEY-----")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["home", "k.pub"]


def test_verify_prints_the_surface(shell: Commands, package: Path, base_file: Path) -> None:
    body = shell.json("verify", package, "--base", base_file)
    assert list(body) == ["schema", "ok", "subject", "problems", "signature", "manifest"]
    assert (body["schema"], body["subject"], body["problems"]) == ("adapterctl.verify/1", str(package), [])
    assert body["signature"]["status"] == "not-checked"
    with DirectoryPackage.open_dir(package, DEFAULT_LIMITS) as opened:
        assert body["manifest"]["version_digest"] == version_digest(file_entries(opened))
    assert body["manifest"]["base"] == tiny_llama_spec().pin.as_json()
    first = body["manifest"]["modules"][0]
    assert (first["name"], first["rank"], first["alpha"], first["scaling"], first["dtype"]) == (
        "model.layers.0.self_attn.q_proj", 4, 8.0, 2.0, "F32",
    )  # fmt: skip
    assert first["delta_norm"] > 0
    assert shell.run("verify", package, "--base", base_file, "-q").stdout == body["manifest"]["version_digest"] + "\n"


def test_a_missing_folder_is_5_and_a_missing_base_is_2(shell: Commands, package: Path, tmp_path: Path) -> None:
    assert shell.codes("verify", tmp_path / "nope", status=5) == ["PATH_NOT_FOUND"]
    assert shell.codes("verify", package, "--base", tmp_path / "nope.json", status=5) == ["PATH_NOT_FOUND"]
    result = shell.run("verify", package)
    assert result.exit_code == 2
    assert "--base ID@REV" in result.stderr
    assert "adapterctl base table" in result.stderr


def test_a_refusal_is_6_with_everything_that_is_wrong(shell: Commands, tmp_path: Path, base_file: Path) -> None:
    spec = tiny_llama_spec()
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    bad = np.full((4, 32), np.nan, np.float32)
    folder = write_package(tmp_path / "nan", base=spec, tensors={name: bad}).directory
    body = shell.json("verify", folder, "--base", base_file, status=6)
    assert [p["code"] for p in body["problems"] if p["severity"] == "reject"] == ["NONFINITE"]
    assert body["manifest"] is None
    (folder / "run.py").write_text("print()")
    assert "FORBIDDEN_FILE" in shell.codes("inspect", folder, "--base", base_file, status=6)


def test_a_refusal_wins_over_a_bad_signature(shell: Commands, tmp_path: Path, base_file: Path, key: Path) -> None:
    folder = write_package(tmp_path / "zero", scale=0.0).directory
    body = shell.json("verify", folder, "--base", base_file, "--key", f"{key}.pub", status=6)
    assert {p["code"] for p in body["problems"]} == {"ZERO_DELTA", "SIGNATURE_MISSING"}
    assert body["signature"]["status"] == "missing"
    allowed = ["--allow", "ZERO_DELTA"]
    body = shell.json("verify", folder, "--base", base_file, *allowed)
    assert [(p["code"], p["severity"]) for p in body["problems"]] == [("ZERO_DELTA", "warn")]
    assert shell.codes("verify", folder, "--base", base_file, *allowed, "--key", f"{key}.pub", status=3) == [
        "ZERO_DELTA",
        "SIGNATURE_MISSING",
    ]


def test_a_declared_digest_must_hold(shell: Commands, package: Path, base_file: Path) -> None:
    right = sha256_hex((package / "adapter_model.safetensors").read_bytes())
    words = ["verify", package, "--base", base_file, "--sha256"]
    shell.json(*words, f"adapter_model.safetensors={right}")
    shell.json(*words, f"adapter_model.safetensors=sha256:{right.upper()}")
    assert shell.codes(*words, f"adapter_model.safetensors={'0' * 64}", status=6) == ["HASH_MISMATCH"]


def test_limits_come_from_a_file(shell: Commands, package: Path, base_file: Path, tmp_path: Path) -> None:
    limits = tmp_path / "limits.json"
    words = ["verify", package, "--base", base_file, "--limits", limits]
    limits.write_text(json.dumps({"max_rank": 2}))
    assert shell.codes(*words, status=6) == ["RANK_TOO_LARGE"]
    limits.write_text(json.dumps({"max_rnak": 2}))
    assert shell.codes(*words, status=1) == ["SETTINGS_INVALID"]
    limits.write_text("[")
    assert shell.codes(*words, status=1) == ["SETTINGS_INVALID"]


def test_signed_by_one_of_the_keys(shell: Commands, package: Path, base_file: Path, key: Path, tmp_path: Path) -> None:
    signed = shell.json("sign", package, "--key", key)
    other = tmp_path / "other.pem"
    shell.json("keygen", other)
    words = ["verify", package, "--base", base_file]
    body = shell.json(*words, "--key", f"{other}.pub", "--key", f"{key}.pub")
    assert body["signature"]["status"] == "valid"
    assert body["signature"]["key_id"] == signed["key_id"]
    assert body["signature"]["root_digest"] == signed["root_digest"]
    assert shell.codes(*words, "--key", f"{other}.pub", status=3) == ["KEY_UNKNOWN"]
    assert shell.codes(*words, "--policy", "strict", status=3) == ["TRUST_NOT_CONFIGURED"]  # no key, no trust


def test_what_a_broken_signature_means_is_the_policys(
    shell: Commands, package: Path, base_file: Path, key: Path
) -> None:
    shell.json("sign", package, "--key", key)
    (package / "README.md").write_text("added later")
    words = ["verify", package, "--base", base_file, "--key", f"{key}.pub"]
    body = shell.json(*words, status=3)
    assert (body["signature"]["status"], body["signature"]["code"]) == ("invalid", "MANIFEST_NOT_EXACT")
    assert body["manifest"] is not None
    body = shell.json(*words, "--policy", "warn")
    assert [(p["code"], p["severity"]) for p in body["problems"]] == [("MANIFEST_NOT_EXACT", "warn")]
    body = shell.json(*words, "--policy", "permissive")
    assert (body["problems"], body["signature"]["status"]) == ([], "invalid")
    assert shell.json("verify", package, "--base", base_file)["signature"]["status"] == "not-checked"


def test_signing_again_keeps_what_holds_and_replaces_what_does_not(shell: Commands, package: Path, key: Path) -> None:
    shell.json("sign", package, "--key", key)
    first = (package / "model.sig").read_bytes()
    shell.json("sign", package, "--key", key)
    assert (package / "model.sig").read_bytes() == first
    (package / "README.md").write_text("hello")
    shell.json("sign", package, "--key", key)
    assert (package / "model.sig").read_bytes() != first
    assert sorted(p.name for p in package.iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "model.sig",
    ]


def test_signing_needs_a_signing_key_and_a_flat_folder(
    shell: Commands, package: Path, key: Path, tmp_path: Path
) -> None:
    assert shell.codes("sign", package, "--key", f"{key}.pub", status=3) == ["KEY_UNSUPPORTED"]
    assert shell.codes("sign", package, "--key", tmp_path / "none", status=5) == ["PATH_NOT_FOUND"]
    (package / ".git").mkdir()
    assert shell.codes("sign", package, "--key", key, status=6) == ["UNEXPECTED_FILE"]
    assert not (package / "model.sig").exists()


@pytest.mark.parametrize("form", ["json", "table"])
def test_inspect_shows_every_module(shell: Commands, package: Path, base_file: Path, form: str) -> None:
    names = [f"model.layers.{i}.self_attn.{p}_proj" for i in (0, 1) for p in ("q", "v")]
    if form == "json":
        body = shell.json("inspect", package, "--base", base_file)
        assert [m["name"] for m in body["manifest"]["modules"]] == names
        assert "signature" not in body
    else:
        shown = shell.run("inspect", package, "--base", base_file).stdout
        assert all(name in shown for name in names)
        assert {"rank", "scaling", "dtype", "norm"} <= set(shown.split())


def test_the_base_may_be_a_model_directory(shell: Commands, package: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    result = shell.run("verify", package, "--base", folder)
    assert result.exit_code == 2
    assert "--base-id" in result.stderr
    words = [
        "verify",
        package,
        "--base",
        folder,
        "--base-id",
        "tests/tiny-llama",
        "--base-revision",
        "7" * 40,
    ]
    assert shell.run(*words).exit_code in (1, 5)  # an empty folder is no model


def test_a_table_file_must_be_of_the_named_base(shell: Commands, package: Path, base_file: Path) -> None:
    spec = BaseSpec.load(base_file)
    shell.json("verify", package, "--base", base_file, "--base-id", spec.id, "--base-revision", spec.revision)
    result = shell.run("verify", package, "--base", base_file, "--base-id", "another/one")
    assert result.exit_code == 2
