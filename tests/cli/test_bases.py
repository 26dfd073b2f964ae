"""base table, add, list, show and export: with alternative tables, with the weights' digest, and without."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from adapterd.loader.base_model import BaseSpec
from adapterd.loader.base_weights import weights_digest
from fakes.commands import Commands
from fakes.packages import TINY_ID, TINY_LINEARS, TINY_REVISION, safetensors_bytes, tiny_llama_spec, write_package
from fakes.server import RunningRegistry, running_registry

NAMED = ("--id", TINY_ID, "--revision", TINY_REVISION)
PINNED = f"{TINY_ID}@{TINY_REVISION}"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model directory of the tiny llama."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    tensors = {"lm_head.weight": np.zeros((96, 32), "<f4"), "model.embed_tokens.weight": np.zeros((96, 32), "<f4")}
    for layer in range(2):
        for name, (n_in, n_out) in TINY_LINEARS.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = np.zeros((n_out, n_in), "<f4")
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    return folder


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "old.json"
    path.write_text(json.dumps({"parts": {"query": "q_proj", "value": "v_proj"}}))
    return path


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[RunningRegistry]:
    with running_registry(tmp_path / "registry") as running:
        yield running


def test_a_table_says_what_was_asked_for(shell: Commands, model: Path, rules: Path, tmp_path: Path) -> None:
    plain = shell.json("base", "table", model, *NAMED, "--out", tmp_path / "plain.json")
    assert BaseSpec.load(tmp_path / "plain.json") == tiny_llama_spec()
    assert (plain["alternatives"], plain["weights_digest"]) == ([], None)
    more = ("--alternative", f"old={rules}", "--weights-digest")
    full = shell.json("base", "table", model, *NAMED, "--out", tmp_path / "full.json", *more)
    spec = BaseSpec.load(tmp_path / "full.json")
    assert full["weights_digest"] == spec.weights_digest == weights_digest(model)
    assert full["alternatives"] == ["old"]
    assert full["module_table_digest"] == spec.table_digest != plain["module_table_digest"]


def test_what_cannot_be_asked_for(shell: Commands, model: Path, rules: Path, tmp_path: Path) -> None:
    words = ("base", "table", model, *NAMED, "--out", tmp_path / "out.json", "--alternative")
    assert shell.run(*words, "old").exit_code == 2
    assert shell.codes(*words, f"primary={rules}", status=1) == ["BASE_TABLE_INVALID"]
    assert shell.codes(*words, f"old={tmp_path / 'nowhere'}", status=5) == ["PATH_NOT_FOUND"]
    tiny_llama_spec().save(tmp_path / "table.json")
    assert shell.run("base", "add", tmp_path / "table.json", "--weights-digest").exit_code == 2
    assert not (tmp_path / "out.json").exists()


def test_an_adapter_with_old_names_from_upload_to_manifest(
    registry: RunningRegistry, model: Path, rules: Path, tmp_path: Path
) -> None:
    operator = Commands(tmp_path / "home", {"ADAPTERD_URL": registry.url, "ADAPTERD_TOKEN": registry.operator_token})
    added = operator.json("base", "add", model, *NAMED, "--alternative", f"old={rules}", "--weights-digest")
    (listed,) = operator.json("base", "list")["bases"]
    assert (listed["alternatives"], listed["weights_digest"]) == (["old"], added["weights_digest"])
    assert "name in 'old'" in operator.run("base", "show", PINNED).stdout
    operator.json("base", "export", PINNED, "--out", tmp_path / "table.json")
    base = BaseSpec.load(tmp_path / "table.json")
    assert operator.json("base", "show", PINNED)["base"] == base.as_json()
    operator.json("tenant", "create", "acme")
    operator.json("tenant", "policy", "acme", "--allow-unsigned")
    package = write_package(tmp_path / "adapter", base=base.named("old"), modules=("query", "value")).directory
    here = operator.json("verify", package, "--base", tmp_path / "table.json")["manifest"]
    assert here["naming"] == "old"
    assert {m["name"].rpartition(".")[2] for m in here["modules"]} == {"q_proj", "v_proj"}
    scopes = [w for s in ("adapters:read", "adapters:upload") for w in ("--scope", s)]
    token = operator.json("token", "create", "--tenant", "acme", *scopes)["token"]
    acme = operator.with_variables(ADAPTERD_TOKEN=token)
    uploaded = acme.json("upload", package, "acme/old-one", "--base", PINNED)
    there = acme.json("inspect", f"acme/old-one@sha256:{uploaded['version_digest']}")["manifest"]
    assert there == here


def test_other_weights_under_the_same_revision_are_a_conflict(
    registry: RunningRegistry, model: Path, tmp_path: Path
) -> None:
    operator = Commands(tmp_path / "home", {"ADAPTERD_URL": registry.url, "ADAPTERD_TOKEN": registry.operator_token})
    operator.json("base", "add", model, *NAMED)
    operator.json("base", "add", model, *NAMED, "--weights-digest")
    data = bytearray((model / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (model / "model.safetensors").write_bytes(data)
    assert operator.codes("base", "add", model, *NAMED, "--weights-digest", status=7) == ["ALREADY_EXISTS"]
