"""`merge`: from a folder and from a registry, and every way to be refused with nothing left behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from adapterd.loader.base_weights import weights_digest
from fakes.commands import Commands
from fakes.disk import file_size_limit
from fakes.merging import WEIGHTS, base_tensors, read_tensors, write_base
from fakes.packages import TINY_ID, TINY_REVISION, safetensors_bytes, tiny_llama_spec, write_package
from fakes.server import running_registry

NAMED = ("--base-id", TINY_ID, "--base-revision", TINY_REVISION)
PINNED = f"{TINY_ID}@{TINY_REVISION}"
RENAMED = f"tests/renamed@{TINY_REVISION}"


@dataclass(frozen=True)
class World:
    """A registry whose base has a digest of its weights, a publisher with `acme/finance`, and the base's folder.

    `acme/old` is the same under the names of another table of `RENAMED`. `rival` is another tenant.
    """

    acme: Commands
    rival: Commands
    base: Path
    package: Path
    data: Path


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("merging")
    base = write_base(root / "base")
    with running_registry(root / "registry") as registry:
        operator = _shell(root, "operator", registry.url, registry.operator_token)
        operator.json("base", "add", base, "--id", TINY_ID, "--revision", TINY_REVISION, "--weights-digest")
        named = ("--id", "tests/renamed", "--revision", TINY_REVISION, "--alternative", f"old={_old_names(root)}")
        operator.json("base", "add", base, *named)
        operator.json("tenant", "create", "acme")
        operator.json("tenant", "create", "rival")
        scopes = ("adapters:read", "adapters:upload", "aliases:promote", "keys:admin")
        words = [word for scope in scopes for word in ("--scope", scope)]
        acme, rival = (
            _shell(root, name, registry.url, operator.json("token", "create", name, *words)["token"])
            for name in ("acme", "rival")
        )
        rival.json("trust", "init", "--from-server")
        key = root / "acme.pem"
        acme.json("keygen", key)
        acme.json("key", "add", "acme", f"{key}.pub")
        acme.json("trust", "init", "--from-server")
        acme.json("trust", "add-key", f"{key}.pub", "--tenant", "acme")
        package = write_package(root / "package", seed=3).directory
        acme.json("upload", package, "acme/finance", "--base", PINNED, "--sign", key, "--alias", "prod")
        old = _under_old_names(package, root / "old")
        acme.json("upload", old, "acme/old", "--base", RENAMED, "--sign", key, "--alias", "default")
        yield World(acme, rival, base, package, registry.settings.data_dir)


def _old_names(root: Path) -> Path:
    (root / "old.json").write_text(json.dumps({"parts": {"query": "q_proj", "value": "v_proj"}}))
    return root / "old.json"


def _under_old_names(package: Path, folder: Path) -> Path:
    shutil.copytree(package, folder)
    data = (package / WEIGHTS).read_bytes()
    assert b"q_proj" in data
    (folder / WEIGHTS).write_bytes(safetensors_bytes({_old(n): t for n, t in read_tensors(package).items()}))
    config = _old((package / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(config.replace(TINY_ID, RENAMED.partition("@")[0]))
    return folder


def _old(text: str) -> str:
    return text.replace("q_proj", "query").replace("v_proj", "value")


def _shell(root: Path, name: str, url: str, token: str) -> Commands:
    home = root / f"home-{name}"
    home.mkdir()
    return Commands(home, {"ADAPTERD_URL": url, "ADAPTERD_TOKEN": token})


def refused(shell: Commands, out: Path, *words: object, status: int) -> list[str]:
    codes = shell.codes("merge", *words, "--out", out, status=status)
    assert not out.exists()
    assert not list(out.parent.glob("*merge*/"))
    return codes


def test_a_folder_and_a_reference_give_the_same_model(world: World, tmp_path: Path) -> None:
    here = world.acme.json("merge", world.package, "--base", world.base, *NAMED, "--out", tmp_path / "here")
    there = world.acme.json("merge", "acme/finance:prod", "--base", world.base, "--out", tmp_path / "there")
    one, two = ({p.name: p.read_bytes() for p in (tmp_path / n).iterdir()} for n in ("here", "there"))
    assert one == two
    assert there["subject"] == f"acme/finance@sha256:{there['version_digest']}"
    assert {k: v for k, v in here.items() if k not in ("subject", "directory")} == {
        k: v for k, v in there.items() if k not in ("subject", "directory")
    }
    assert (here["mode"], here["quantization"], here["vanished"], here["problems"]) == ("plain", None, [], [])
    assert here["total_bytes"] == sum(map(len, one.values()))
    module = here["modules"][0]
    assert module["name"] == "model.layers.0.self_attn.q_proj"
    assert (module["tensor"], module["dtype"], module["values"]) == (f"{module['name']}.weight", "BF16", 1024)
    assert 0 < module["lost_share"] < 0.1
    assert 0 < module["lost_max"] < module["delta_max"]
    shown = world.acme.run("merge", world.package, "--base", world.base, *NAMED, "--out", tmp_path / "again")
    assert module["name"] in shown.stdout
    quiet = world.acme.run("merge", world.package, "--base", world.base, *NAMED, "--out", tmp_path / "q", "-q")
    assert quiet.stdout.split() == [str(tmp_path / "q")]


def test_a_reference_is_for_one_base_its_table_and_its_weights(world: World, tmp_path: Path) -> None:
    words = ("acme/finance:prod", "--base")
    out = tmp_path / "out"
    tensors = base_tensors()
    tensors["model.layers.0.mlp.up_proj.weight"] = np.concatenate([tensors["model.layers.0.mlp.up_proj.weight"]] * 2)
    wider = write_base(tmp_path / "wider", tensors=tensors)
    assert refused(world.acme, out, *words, wider, status=6) == ["BASE_MISMATCH"]
    tuned = write_base(tmp_path / "tuned", tensors=base_tensors(seed=6))
    assert refused(world.acme, out, *words, tuned, status=6) == ["HASH_MISMATCH"]
    assert refused(world.acme, out, *words, world.base, "--base-id", "x/y", status=6) == ["BASE_MISMATCH"]
    other = ("--base-revision", "8" * 40)
    assert refused(world.acme, out, *words, world.base, *other, status=6) == ["BASE_REVISION_MISMATCH"]
    assert refused(world.acme, out, "acme/nothing", "--base", world.base, status=5) == ["NOT_FOUND"]


def test_another_tenants_adapter_is_as_one_that_is_not_there(world: World, tmp_path: Path) -> None:
    words = ("--base", world.base, "--out", tmp_path / "out")
    for alias in ("", ":prod"):
        there, nowhere = (world.rival.run("merge", f"acme/{n}{alias}", *words) for n in ("finance", "nothing"))
        assert (there.exit_code, nowhere.exit_code) == (5, 5)
        assert there.stderr.replace("acme/finance", "") == nowhere.stderr.replace("acme/nothing", "")
        assert not (tmp_path / "out").exists()


def test_a_base_with_other_names_is_merged_into_under_its_own(world: World, tmp_path: Path) -> None:
    here = world.acme.json("merge", "acme/old", "--base", world.base, "--out", tmp_path / "old")
    world.acme.json("merge", "acme/finance:prod", "--base", world.base, "--out", tmp_path / "new")
    assert here["modules"][0]["name"] == "model.layers.0.self_attn.q_proj"
    old, new = (read_tensors(tmp_path / name) for name in ("old", "new"))
    assert all((old[name] == new[name]).all() for name in (*old, *new))


def test_bytes_that_are_not_the_signed_ones_are_not_merged(world: World, tmp_path: Path) -> None:
    untrusting = tmp_path / "home"
    untrusting.mkdir()
    shell = Commands(untrusting, world.acme.variables)
    words = ("acme/finance:prod", "--base", world.base)
    shell.json("trust", "init", "--from-server")
    assert refused(shell, tmp_path / "out", *words, status=3) == ["KEY_UNKNOWN"]
    files = [
        p for p in world.data.rglob("*") if p.is_file() and p.stat().st_size > 2000 and b"lora_A" in p.read_bytes()
    ]
    assert files
    kept = {p: p.read_bytes() for p in files}
    for path, data in kept.items():
        path.chmod(0o600)
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    try:
        assert refused(world.acme, tmp_path / "out", *words, status=6) == ["HASH_MISMATCH"]
    finally:
        for path, data in kept.items():
            path.write_bytes(data)


def test_a_folder_is_judged_as_verify_judges_it(shell: Commands, tmp_path: Path, package: Path, key: Path) -> None:
    base, out = write_base(tmp_path / "base"), tmp_path / "out"
    words = ("--base", base, *NAMED)
    assert refused(shell, out, package, *words, "--key", f"{key}.pub", status=3) == ["SIGNATURE_MISSING"]
    shell.json("sign", package, "--key", key)
    shell.json("merge", package, *words, "--key", f"{key}.pub", "--out", tmp_path / "signed")
    data = bytearray((package / WEIGHTS).read_bytes())
    data[-1] ^= 1
    (package / WEIGHTS).write_bytes(data)
    (code,) = refused(shell, out, package, *words, "--key", f"{key}.pub", status=3)
    assert code == "MANIFEST_NOT_EXACT"
    zero = write_package(tmp_path / "zero", scale=0.0).directory
    assert refused(shell, out, zero, *words, status=6) == ["ZERO_DELTA"]
    deeper = write_package(tmp_path / "deeper", base=tiny_llama_spec(layers=4)).directory
    assert set(refused(shell, out, deeper, *words, status=6)) == {"UNKNOWN_MODULE"}
    elsewhere = ("--base", base, "--base-id", TINY_ID, "--base-revision", "8" * 40)
    assert refused(shell, out, package, *elsewhere, status=6) == ["BASE_REVISION_MISMATCH"]
    assert refused(shell, out, tmp_path / "nope", *words, status=5) == ["PATH_NOT_FOUND"]
    assert refused(shell, out, package, "--base", tmp_path / "nope", *NAMED, status=5) == ["PATH_NOT_FOUND"]
    assert shell.run("merge", package, "--base", base, "--out", out).exit_code == 2  # which revision?


def test_a_delta_that_rounding_takes_whole_is_a_warning(shell: Commands, tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    package = write_package(tmp_path / "small", scale=1e-7).directory
    body = shell.json("merge", package, "--base", base, *NAMED, "--out", tmp_path / "out")
    assert len(body["vanished"]) == 4
    (problem,) = body["problems"]
    assert (problem["code"], problem["severity"]) == ("ZERO_DELTA", "warn")
    assert "4 of 4 modules" in problem["message"]
    assert "BF16" in problem["message"]
    wide = write_base(tmp_path / "wide", dtype="F32")
    body = shell.json("merge", package, "--base", wide, *NAMED, "--out", tmp_path / "wide-out")
    assert (body["vanished"], body["problems"]) == ([], [])


def test_wishes_that_mean_nothing(shell: Commands, tmp_path: Path, package: Path) -> None:
    base, out = write_base(tmp_path / "base"), tmp_path / "out"
    words = ("merge", package, "--base", base, *NAMED, "--out", out)
    assert shell.run(*words, "--dequantize", "int4").exit_code == 2
    assert shell.run(*words, "--dequantize", "bf16", "--requantize").exit_code == 2
    assert shell.codes(*words, "--dequantize", "bf16", status=1) == ["REQUEST_INVALID"]
    out.mkdir()
    assert shell.codes(*words, status=7) == ["ALREADY_EXISTS"]
    assert read_tensors(base).keys() == base_tensors().keys()


def test_the_base_is_never_touched(shell: Commands, tmp_path: Path, package: Path) -> None:
    base = write_base(tmp_path / "base")
    shutil.copytree(base, tmp_path / "copy")
    before = weights_digest(base)
    shell.json("merge", package, "--base", base, *NAMED, "--out", tmp_path / "out")
    assert weights_digest(base) == before != weights_digest(tmp_path / "out")
    assert {p.name: p.read_bytes() for p in base.iterdir()} == {
        p.name: p.read_bytes() for p in (tmp_path / "copy").iterdir()
    }
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == "llama"


def test_a_full_disk_is_told_and_leaves_nothing(shell: Commands, tmp_path: Path, package: Path) -> None:
    base = write_base(tmp_path / "base")
    before = sorted(tmp_path.iterdir())
    with file_size_limit(20_000):
        codes = shell.codes("merge", package, "--base", base, *NAMED, "--out", tmp_path / "out", status=8)
    assert codes == ["STORAGE_FULL"]
    assert sorted(tmp_path.iterdir()) == before
