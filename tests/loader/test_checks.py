"""Verdicts on small packages: what passes, whose base it is, and what bounds a verdict."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapterd.loader.checks import MAX_PROBLEMS, examine, examine_path
from adapterd.loader.errors import Code, NotFound
from adapterd.loader.formats.files import DirectoryPackage, file_entries
from adapterd.loader.limits import DEFAULT_LIMITS
from fakes.packages import tiny_llama_spec, write_package
from fakes.verdicts import BASE, accepted, codes, verdict

# ------------------------------------------------------------------ what passes


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_a_plain_adapter_passes_and_the_manifest_says_it_all(tmp_path: Path, dtype: str) -> None:
    written = write_package(tmp_path, rank=4, alpha=8, dtype=dtype, seed=3)
    found = examine_path(tmp_path, BASE)
    manifest = accepted(found)
    assert found.problems == ()
    assert manifest.base == BASE.pin
    assert [m.name for m in manifest.modules] == sorted(written.factors)
    for module in manifest.modules:
        a, b = written.factors[module.name]
        data = (tmp_path / "adapter_model.safetensors").read_bytes()
        assert data[module.a.begin : module.a.end] == a.tobytes()
        assert data[module.b.begin : module.b.end] == b.tobytes()
        assert (module.rank, module.alpha, module.scaling, module.dtype) == (4, 8.0, 2.0, dtype)
        assert (module.in_features, module.out_features) == (a.shape[1], b.shape[0])
        naive = 2.0 * float(np.linalg.norm(b.astype(np.float64) @ a.astype(np.float64)))
        assert module.delta_norm == pytest.approx(naive, rel=1e-6)
    assert [f.path for f in manifest.files] == ["adapter_config.json", "adapter_model.safetensors"]


def test_the_same_input_gives_the_same_verdict(tmp_path: Path) -> None:
    write_package(tmp_path, modules=("q_proj", "down_proj"), revision=None, target_modules=["q_proj", "down_proj", "x"])
    first, second = (examine_path(tmp_path, BASE) for _ in range(2))
    assert first == second
    assert accepted(first).digest == accepted(second).digest
    assert [p.code for p in first.problems] == [Code.BASE_REVISION_MISMATCH, Code.CONFIG_TENSOR_DISAGREE]


def test_without_content_the_digest_is_the_same_and_norms_are_absent(tmp_path: Path) -> None:
    write_package(tmp_path)
    full = accepted(examine_path(tmp_path, BASE))
    structural = accepted(examine_path(tmp_path, BASE, content=False))
    assert structural.digest == full.digest
    assert {m.delta_norm for m in structural.modules} == {None}


def test_files_hashed_before_are_taken_and_the_signature_is_not_content(tmp_path: Path) -> None:
    write_package(tmp_path, files={"model.sig": b"{}", "README.md": b"# x\n", "trainer_state.json": b"{}"})
    seen: list[int] = []
    with DirectoryPackage.open_dir(tmp_path, DEFAULT_LIMITS) as package:
        entries = file_entries(package)
        given = examine(package, BASE, files=entries)
        fresh = examine(package, BASE, progress=seen.append)
    assert given == fresh
    assert [p.where for p in given.problems] == ["trainer_state.json"]
    paths = [f.path for f in accepted(given).files]
    assert paths == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    assert sum(seen) == accepted(given).total_bytes + len("{}")


def test_hashes_of_other_bytes_are_refused(tmp_path: Path) -> None:
    write_package(tmp_path / "one")
    write_package(tmp_path / "two", rank=8)
    with DirectoryPackage.open_dir(tmp_path / "two", DEFAULT_LIMITS) as two:
        entries = file_entries(two)
    with DirectoryPackage.open_dir(tmp_path / "one", DEFAULT_LIMITS) as one:
        assert codes(examine(one, BASE, files=entries))[0] is Code.HASH_MISMATCH
        assert codes(examine(one, BASE, files=entries[:1])) == [Code.HASH_MISMATCH]


@pytest.mark.parametrize(
    ("declared", "fine"),
    [
        ({}, True),
        ({"README.md": "5e8f1b6b0c1e0f3b8e6f"}, False),
        ({"adapter_config.json": "00" * 32}, False),
        ({"absent": "00" * 32}, False),
    ],
)
def test_declared_hashes_must_hold(tmp_path: Path, declared: Mapping[str, str], fine: bool) -> None:
    found = verdict(tmp_path, files={"README.md": b"x"}, declared_sha256=declared)
    assert found.ok is fine
    assert codes(found) == ([] if fine else [Code.HASH_MISMATCH])
    assert all(p.where in declared for p in found.problems)


def test_a_declared_hash_in_capitals_or_of_a_file_left_out_holds(tmp_path: Path) -> None:
    import hashlib

    digest = hashlib.sha256(b"{}").hexdigest().upper()
    assert verdict(tmp_path, files={"trainer_state.json": b"{}"}, declared_sha256={"trainer_state.json": digest}).ok


def test_a_missing_folder_is_not_found_and_a_file_is_no_package(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        examine_path(tmp_path / "nowhere", BASE)
    (tmp_path / "file").write_bytes(b"")
    assert codes(examine_path(tmp_path / "file", BASE)) == [Code.UNKNOWN_FORMAT]


# ------------------------------------------------------------------ the base's name and revision


@pytest.mark.parametrize(
    "name",
    [
        "tiny-llama",
        "/data/models/tiny-llama/",
        "./tiny-llama",
        "D:\\モデル\\tiny-llama",
        "/root/.cache/huggingface/hub/models--tests--tiny-llama/snapshots/0123",
        "~/tiny-llama-GPTQ-Int4",
        "someone/tiny-llama-bnb-4bit",
        "unsloth/tiny-llama-unsloth-bnb-4bit",
        "someone/tiny-llama.Q4_K_M.gguf",
        "tiny-llama-AWQ",
    ],
)
def test_other_spellings_of_the_base_are_remarked(tmp_path: Path, name: str) -> None:
    found = verdict(tmp_path, base_model_name_or_path=name)
    assert found.ok
    assert codes(found, "warn") == [Code.BASE_MISMATCH]
    assert found.problems[0].message.isascii()


@pytest.mark.parametrize(
    "name",
    [
        "tests/tiny-mistral",
        "someone/tiny-llama",
        "tests/tiny-llama-instruct",
        "tests/tiny-llama-2",
        "tests/tiny-llama2-4bit",
        "Tests/Tiny-Llama",
        "https://models.example/tests/tiny-llama",
        "../../srv/private",
        "/models/tiny-llama-chat",
        "tests/tiny-llama\x1b[2J",
        "/data/\x00/tiny-llama",
        "models--someone--tiny-llama",
    ],
)
def test_another_base_is_refused_and_never_printed_raw(tmp_path: Path, name: str) -> None:
    found = verdict(tmp_path, base_model_name_or_path=name)
    assert codes(found) == [Code.BASE_MISMATCH]
    assert found.problems[0].message.isprintable()
    assert found.problems[0].where == "base_model_name_or_path"


def test_an_uploader_may_name_the_base_that_the_config_calls_otherwise(tmp_path: Path) -> None:
    allow = frozenset({Code.BASE_MISMATCH})
    found = verdict(tmp_path, base_model_name_or_path="someone/else", allow=allow)
    assert found.ok
    assert codes(found, "warn") == [Code.BASE_MISMATCH]


@pytest.mark.parametrize(
    ("revision", "severity"),
    [
        (BASE.revision, None),
        (..., None),
        (None, "warn"),
        ("main", "warn"),
        ("7" * 12, "warn"),
        ("0" * 40, "reject"),
    ],
)
def test_revisions(tmp_path: Path, revision: Any, severity: str | None) -> None:
    found = verdict(tmp_path, revision=revision)
    assert [p.severity for p in found.problems] == ([severity] if severity else [])
    assert {p.code for p in found.problems} <= {Code.BASE_REVISION_MISMATCH}


def test_a_commit_cannot_be_compared_with_a_digest_of_files(tmp_path: Path) -> None:
    base = tiny_llama_spec(revision="sha256:" + "a" * 64)
    assert codes(verdict(tmp_path, base, revision="0" * 40), "warn") == [Code.BASE_REVISION_MISMATCH]


# ------------------------------------------------------------------ bounds


def test_a_verdict_lists_a_bounded_number_of_problems(tmp_path: Path) -> None:
    base = tiny_llama_spec(layers=40)
    found = verdict(tmp_path, base, rank=8, r=4)
    assert len(found.problems) == MAX_PROBLEMS
    assert "31 more problems" in found.problems[-1].message


def test_refusals_come_before_remarks(tmp_path: Path) -> None:
    found = verdict(tmp_path, revision=None, rank=8, r=4)
    assert [p.severity for p in found.problems] == ["reject"] * 4 + ["warn"]


def test_structure_is_judged_with_the_config_s_own_warnings(tmp_path: Path) -> None:
    found = verdict(tmp_path, some_new_field=None)
    assert found.ok
    assert codes(found, "warn") == [Code.CONFIG_IGNORED_FIELD]


def test_unsafe_things_in_a_folder_are_a_verdict_and_no_exception(tmp_path: Path) -> None:
    written = write_package(tmp_path / "p")
    (written.directory / "README.md").symlink_to("/nonexistent")
    assert codes(examine_path(written.directory, BASE)) == [Code.UNSAFE_LINK]
    (written.directory / "README.md").unlink()
    (written.directory / "adapter_model.bin").write_bytes(b"\x80\x02")
    assert codes(examine_path(written.directory, BASE)) == [Code.FORBIDDEN_FILE]
