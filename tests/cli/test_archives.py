"""verify, inspect, sign and upload of a zip or a tar."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakes.archives import ZipEntry, files_of, gzipped, tar_of, zip_of, zipped
from fakes.commands import Commands
from fakes.packages import TINY_ID, TINY_REVISION, tiny_llama_spec, write_package
from fakes.server import running_registry

PACKERS = {"finance.zip": zipped, "finance.tar": tar_of, "finance.tar.gz": lambda files: gzipped(tar_of(files))}


def packed(folder: Path, name: str, target: Path, prefix: str = "finance/") -> Path:
    path = target / name
    path.write_bytes(PACKERS[name]({prefix + n: d for n, d in files_of(folder).items()}))
    return path


@pytest.mark.parametrize("name", PACKERS)
def test_an_archive_gets_the_folder_s_answer(
    shell: Commands, package: Path, base_file: Path, key: Path, tmp_path: Path, name: str
) -> None:
    assert shell.run("sign", package, "--key", key).exit_code == 0
    archive = packed(package, name, tmp_path)
    words = ["--base", base_file, "--key", f"{key}.pub"]
    folder_s, archive_s = shell.json("verify", package, *words), shell.json("verify", archive, *words)
    assert archive_s["signature"]["status"] == "valid"
    assert {**archive_s, "subject": ""} == {**folder_s, "subject": ""}
    assert shell.json("inspect", archive, "--base", base_file)["manifest"] == folder_s["manifest"]


def test_a_refused_archive_is_a_refusal_and_not_a_crash(
    shell: Commands, package: Path, base_file: Path, key: Path, tmp_path: Path
) -> None:
    entries = [ZipEntry(n.encode(), d) for n, d in files_of(package).items()]
    archive = tmp_path / "x.zip"
    archive.write_bytes(zip_of([*entries, ZipEntry(b"../x", b"1")]))
    assert shell.codes("verify", archive, "--base", base_file, status=6) == ["ARCHIVE_PATH"]
    archive.write_bytes(zip_of([*entries, ZipEntry(b"optimizer.pt", b"1")]))
    codes = shell.codes("verify", archive, "--base", base_file, "--key", f"{key}.pub", status=6)
    assert codes == ["FORBIDDEN_FILE", "SIGNATURE_MISSING"]
    archive.write_bytes(b"no archive")
    assert shell.codes("verify", archive, "--base", base_file, status=6) == ["UNKNOWN_FORMAT"]
    assert shell.codes("sign", archive, "--key", key, status=1) == ["REQUEST_INVALID"]


def test_an_archive_is_signed_on_its_way_and_stays_as_it_is(tmp_path: Path) -> None:
    folder = write_package(tmp_path / "package").directory
    archive = packed(folder, "finance.zip", tmp_path)
    before = archive.read_bytes()
    with running_registry(tmp_path / "registry") as registry:
        operator = Commands(tmp_path, {"ADAPTERD_URL": registry.url, "ADAPTERD_TOKEN": registry.operator_token})
        tiny_llama_spec().save(tmp_path / "base.json")
        operator.json("base", "add", tmp_path / "base.json")
        operator.json("tenant", "create", "acme")
        scopes = [w for s in ("adapters:read", "adapters:upload", "keys:admin") for w in ("--scope", s)]
        acme = operator.with_variables(ADAPTERD_TOKEN=operator.json("token", "create", "acme", *scopes)["token"])
        acme.json("keygen", tmp_path / "key")
        acme.json("key", "add", "acme", tmp_path / "key.pub", "--name", "release")
        body = acme.json("upload", archive, "acme/finance", "--sign", tmp_path / "key")
        again = acme.json(
            "upload", archive, "acme/other", "--base", f"{TINY_ID}@{TINY_REVISION}", "--sign", tmp_path / "key"
        )
    assert body["version_digest"] == again["version_digest"]
    assert body["version"]["publisher"] != "none"
    assert archive.read_bytes() == before
    assert sorted(p.name for p in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
