"""Verdicts on small packages: what passes, what is refused or remarked on, and with which words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapterd.loader.base_model import BaseModule, BaseSpec, ModuleKind
from adapterd.loader.checks import MAX_PROBLEMS, Verdict, examine, examine_path
from adapterd.loader.errors import Code, NotFound
from adapterd.loader.formats.files import DirectoryPackage, file_entries
from adapterd.loader.limits import DEFAULT_LIMITS, Limits
from adapterd.loader.manifest import Manifest
from fakes.packages import PREFIX, WrittenPackage, tensors_of, tiny_llama_spec, write_package

BASE = tiny_llama_spec()
Q0 = "model.layers.0.self_attn.q_proj"
F32 = np.dtype("<f4")


def verdict(folder: Path, base: BaseSpec = BASE, **options: Any) -> Verdict:
    """The verdict on a fresh package made from `options`, some of which are `examine`'s."""
    asked = {k: options.pop(k) for k in ("limits", "allow", "content", "declared_sha256") if k in options}
    options.setdefault("base", base)
    return examine_path(write_package(folder, **options).directory, base, **asked)


def codes(found: Verdict, severity: str = "reject") -> list[Code]:
    return [p.code for p in found.problems if p.severity == severity]


def accepted(found: Verdict) -> Manifest:
    assert found.ok, found.problems
    assert found.manifest is not None
    return found.manifest


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


# ------------------------------------------------------------------ tensors and modules


def with_tensors(folder: Path, change: Any, **options: Any) -> Verdict:
    """A package whose tensors went through `change`, a function of the whole name → array table."""
    written = write_package(folder / "plain", **options)
    tensors = change(tensors_of(written.factors))
    write_package(folder / "changed", modules=(), tensors=tensors)
    config = json.dumps(written.config)
    (folder / "changed" / "adapter_config.json").write_text(config)
    return examine_path(folder / "changed", BASE)


def test_a_renamed_module_gets_the_near_ones_as_a_hint(tmp_path: Path) -> None:
    found = with_tensors(
        tmp_path,
        lambda t: {k.replace("q_proj", "query").replace("v_proj", "value"): v for k, v in t.items()},
        target_modules=["query", "value"],
    )
    assert codes(found) == [Code.UNKNOWN_MODULE] * 2
    assert [p.where.rpartition(".")[2] for p in found.problems] == ["query", "value"]
    assert "q_proj" in found.problems[0].hint
    assert "v_proj" in found.problems[1].hint
    assert "2 such modules" in found.problems[0].message


def test_a_lost_level_of_the_path_is_hinted_at(tmp_path: Path) -> None:
    found = with_tensors(tmp_path, lambda t: {k.replace("model.model.", "model."): v for k, v in t.items()})
    assert codes(found) == [Code.UNKNOWN_MODULE] * 2
    assert Q0 in found.problems[0].hint


def test_every_broken_pair_is_named(tmp_path: Path) -> None:
    gone = f"{PREFIX}{Q0}.lora_B.weight"
    found = with_tensors(tmp_path, lambda t: {k: v for k, v in t.items() if k != gone})
    assert [(p.code, p.where) for p in found.problems] == [(Code.MISSING_TENSOR, gone)]


def test_stray_tensors_are_refused_one_problem_a_kind(tmp_path: Path) -> None:
    whole = np.zeros((32, 32), F32)
    strays = {f"{PREFIX}model.layers.{i}.self_attn.q_proj.weight": whole for i in range(2)}
    strays |= {f"{PREFIX}model.layers.{i}.self_attn.q_proj.bias": whole[0] for i in range(2)}
    found = with_tensors(tmp_path, lambda t: t | strays)
    assert sorted(codes(found)) == [Code.UNKNOWN_KEY, Code.UNSUPPORTED_FEATURE]
    assert all("2 such tensors" in p.message for p in found.problems)


def test_two_spellings_of_one_tensor_are_refused(tmp_path: Path) -> None:
    extra = {f"{PREFIX}{Q0}.lora_A.default.weight": np.ones((4, 32), F32)}
    assert codes(with_tensors(tmp_path, lambda t: t | extra)) == [Code.DUPLICATE_LOGICAL_KEY]


def test_an_empty_file_is_an_empty_adapter(tmp_path: Path) -> None:
    assert codes(with_tensors(tmp_path, lambda _: {})) == [Code.EMPTY_ADAPTER]


def test_shapes_are_compared_and_turned_ones_recognised(tmp_path: Path) -> None:
    found = with_tensors(tmp_path, lambda t: {k: np.ascontiguousarray(v.T) for k, v in t.items()})
    assert set(codes(found)) == {Code.SHAPE_MISMATCH}
    assert "[r, 32]" in found.problems[0].message
    assert "transposed" in found.problems[0].hint


def test_ranks_of_file_and_config_must_agree(tmp_path: Path) -> None:
    assert set(codes(verdict(tmp_path / "a", rank=8, r=4))) == {Code.RANK_MISMATCH}
    found = verdict(tmp_path / "b", ranks={Q0: 2}, rank_pattern={"layers.0.self_attn.q_proj": 2})
    assert {m.name: (m.rank, m.scaling) for m in accepted(found).modules}[Q0] == (2, 4.0)
    assert codes(verdict(tmp_path / "c", ranks={Q0: 2})) == [Code.RANK_MISMATCH]


def test_a_rank_above_the_module_is_remarked(tmp_path: Path) -> None:
    found = verdict(tmp_path, rank=48)
    assert found.ok
    assert codes(found, "warn") == [Code.RANK_TOO_LARGE]


def test_mixed_dtypes_are_taken_as_the_wider_one(tmp_path: Path) -> None:
    import ml_dtypes

    found = with_tensors(
        tmp_path, lambda t: {k: v.astype(ml_dtypes.bfloat16) if "lora_B" in k else v for k, v in t.items()}
    )
    assert {m.dtype for m in accepted(found).modules} == {"F32"}
    assert {(m.a.dtype, m.b.dtype) for m in accepted(found).modules} == {("F32", "BF16")}
    assert codes(found, "warn") == [Code.DTYPE_MIXED]


@pytest.mark.parametrize("dtype", ["F64", "I64", "I8"])
def test_other_dtypes_are_refused(tmp_path: Path, dtype: str) -> None:
    assert codes(verdict(tmp_path, dtype=dtype)) == [Code.DTYPE_UNSUPPORTED]


def test_output_heads_embeddings_and_experts_are_not_served(tmp_path: Path) -> None:
    assert codes(verdict(tmp_path / "head", modules=("q_proj", "lm_head"))) == [Code.UNSUPPORTED_FEATURE]
    experts = BaseSpec.of(
        [*BASE.modules, BaseModule("model.layers.0.mlp.experts", ModuleKind.EXPERTS, 0, 0)],
        id=BASE.id,
        revision=BASE.revision,
    )
    for inside in ("mlp.experts.3.w1", "block_sparse_moe.experts.0.w2"):
        name = f"{PREFIX}model.layers.0.{inside}"
        pair = {
            f"{name}.lora_A.weight": np.ones((4, 32), F32),
            f"{name}.lora_B.weight": np.ones((64, 4), F32),
        }
        found = verdict(tmp_path / inside, experts, tensors=pair)
        assert codes(found) == [Code.UNSUPPORTED_FEATURE]
        assert "experts" in found.problems[0].message


def test_a_policy_may_name_the_modules_that_may_be_adapted(tmp_path: Path) -> None:
    limits = Limits(allowed_target_modules=("q_proj",))
    found = verdict(tmp_path, limits=limits)
    assert codes(found) == [Code.TARGET_NOT_ALLOWED]
    assert "v_proj" in found.problems[0].where


def test_more_tensors_than_two_a_module_are_refused_by_their_number(tmp_path: Path) -> None:
    strays = {f"stray{i}": np.ones((1,), np.float32) for i in range(9)}
    write_package(tmp_path, tensors=strays)  # and eight that belong there
    assert codes(examine_path(tmp_path, BASE, limits=Limits(max_modules=8))) == [Code.QUOTA_EXCEEDED]
    assert codes(examine_path(tmp_path, BASE, limits=Limits(max_modules=9))) == [Code.UNKNOWN_KEY]


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        (Limits(max_rank=3), Code.RANK_TOO_LARGE),
        (Limits(max_modules=3), Code.QUOTA_EXCEEDED),
        (Limits(max_tensors=7), Code.QUOTA_EXCEEDED),
        (Limits(max_dim=31), Code.QUOTA_EXCEEDED),
        (Limits(max_header_bytes=100), Code.ST_HEADER_TOO_LARGE),
        (Limits(max_config_bytes=100), Code.CONFIG_TOO_LARGE),
        (Limits(max_total_bytes=4000), Code.QUOTA_EXCEEDED),
        (Limits(max_files=1), Code.QUOTA_EXCEEDED),
    ],
)
def test_caps_are_checked_before_any_value_is_read(tmp_path: Path, limits: Limits, code: Code) -> None:
    write_package(tmp_path, files={})
    damaged = bytearray((tmp_path / "adapter_model.safetensors").read_bytes())
    damaged[-4:] = b"\xff\xff\xff\x7f"  # a NaN that only the content check would see
    (tmp_path / "adapter_model.safetensors").write_bytes(damaged)
    assert code in codes(examine_path(tmp_path, BASE, limits=limits))
    assert Code.NONFINITE not in codes(examine_path(tmp_path, BASE, limits=limits))
    assert codes(examine_path(tmp_path, BASE)) == [Code.NONFINITE]


# ------------------------------------------------------------------ config against tensors


def test_tensors_that_the_config_does_not_cover_are_refused(tmp_path: Path) -> None:
    found = verdict(tmp_path, modules=("q_proj", "k_proj"), target_modules=["q_proj"])
    assert codes(found) == [Code.CONFIG_TENSOR_DISAGREE]
    assert "k_proj" in found.problems[0].where


def test_covered_modules_without_tensors_are_refused(tmp_path: Path) -> None:
    found = verdict(tmp_path, modules=("q_proj",), target_modules=["q_proj", "up_proj"])
    assert codes(found) == [Code.MISSING_TENSOR]
    assert "up_proj" in found.problems[0].where


def test_names_are_compared_with_their_case(tmp_path: Path) -> None:
    found = verdict(tmp_path, target_modules=["q_proj", "V_proj"])
    assert codes(found) == [Code.CONFIG_TENSOR_DISAGREE]
    assert codes(found, "warn") == [Code.CONFIG_TENSOR_DISAGREE]
    assert found.problems[1].where == "target_modules.V_proj"


def test_a_target_that_matches_nothing_is_a_remark_that_names_it(tmp_path: Path) -> None:
    found = verdict(tmp_path, target_modules=["q_proj", "v_proj", "c_attn"])
    assert found.ok
    assert [(p.code, p.where) for p in found.problems] == [(Code.CONFIG_TENSOR_DISAGREE, "target_modules.c_attn")]


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": r".*\.self_attn\.(q|v)_proj"},
        {"target_modules": r"^(?!.*mlp).*(?:q_proj|v_proj)$"},
        {"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["mlp.up_proj"]},
        {"target_modules": ["self_attn.q_proj", "self_attn.v_proj"]},
        {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [0, 1]},
    ],
)
def test_targets_that_cover_the_same_modules_pass(tmp_path: Path, config: dict[str, Any]) -> None:
    assert verdict(tmp_path, **config).problems == ()


def test_all_linear_leaves_out_the_head(tmp_path: Path) -> None:
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert verdict(tmp_path, modules=names, target_modules="all-linear").problems == ()


def test_a_string_is_a_pattern_for_the_whole_name(tmp_path: Path) -> None:
    found = verdict(tmp_path, target_modules="q_proj")
    assert codes(found) == [Code.CONFIG_TENSOR_DISAGREE]
    assert "whole module name" in found.problems[0].hint


def test_fan_in_fan_out_is_told_where_the_base_differs(tmp_path: Path) -> None:
    assert codes(verdict(tmp_path / "a", fan_in_fan_out=True), "warn") == [Code.CONFIG_IGNORED_FIELD]
    conv = BaseSpec.of([BaseModule("h.0.attn.c_attn", ModuleKind.CONV1D, 32, 96)], id=BASE.id, revision=BASE.revision)
    found = verdict(tmp_path / "b", conv, modules=("c_attn",), fan_in_fan_out=False)
    assert codes(found, "warn") == [Code.CONFIG_IGNORED_FIELD]
    assert (accepted(found).modules[0].in_features, accepted(found).modules[0].out_features) == (32, 96)
    assert verdict(tmp_path / "c", conv, modules=("c_attn",), fan_in_fan_out=True).problems == ()


def test_a_classifier_whose_head_was_never_saved_is_remarked(tmp_path: Path) -> None:
    found = verdict(tmp_path, task_type="SEQ_CLS")
    assert found.ok
    assert [(p.code, p.where) for p in found.problems] == [(Code.CONFIG_TENSOR_DISAGREE, "task_type")]


# ------------------------------------------------------------------ content


def test_a_zero_effect_is_refused_unless_asked_for_by_name(tmp_path: Path) -> None:
    found = verdict(tmp_path, scale=0.0)
    assert codes(found) == [Code.ZERO_DELTA]
    allowed = verdict(tmp_path, scale=0.0, allow=frozenset({Code.ZERO_DELTA}))
    assert codes(allowed, "warn") == [Code.ZERO_DELTA]
    assert {m.delta_norm for m in accepted(allowed).modules} == {0.0}
    assert codes(verdict(tmp_path, alpha=0)) == [Code.ZERO_DELTA]
    assert verdict(tmp_path, scale=0.0, content=False).ok


def test_only_opinions_can_be_allowed(tmp_path: Path) -> None:
    found = verdict(tmp_path, modules=("q_proj", "k_proj"), target_modules=["q_proj"], allow=frozenset(Code))
    assert codes(found) == [Code.CONFIG_TENSOR_DISAGREE]


def silenced(written: WrittenPackage, part: str) -> dict[str, np.ndarray]:
    return {
        name: np.zeros_like(value) if part in name and "lora_B" in name else value
        for name, value in tensors_of(written.factors).items()
    }


@pytest.mark.parametrize(
    ("part", "where"), [("layers.0", "model.layers.0.self_attn"), ("layers.0.self_attn.q_proj", Q0)]
)
def test_a_group_without_effect_is_one_remark(tmp_path: Path, part: str, where: str) -> None:
    written = write_package(tmp_path)
    found = verdict(tmp_path, tensors=silenced(written, part))
    assert found.ok
    assert [(p.code, p.severity, p.where) for p in found.problems] == [(Code.ZERO_DELTA, "warn", where)]


def test_not_finite_values_are_refused_with_their_place(tmp_path: Path) -> None:
    name = f"{PREFIX}{Q0}.lora_B.weight"
    broken = np.ones((32, 4), F32)
    broken[19, 1], broken[20, 0] = np.nan, np.inf
    found = verdict(tmp_path, tensors={name: broken})
    assert [(p.code, p.where) for p in found.problems] == [(Code.NONFINITE, name)]
    assert "2" in found.problems[0].message
    assert "[19, 1]" in found.problems[0].message


def test_suspicious_values_are_remarked(tmp_path: Path) -> None:
    found = verdict(tmp_path / "large", scale=1e30)
    assert found.ok
    assert codes(found, "warn") == [Code.SCALE_SUSPECT]
    rng = np.random.default_rng(0)
    a, column = rng.normal(0, 1, (1, 32)).astype(F32), rng.normal(0, 1, (32, 1)).astype(F32)
    pair = {
        f"{PREFIX}{Q0}.lora_A.weight": np.repeat(a, 4, axis=0),
        f"{PREFIX}{Q0}.lora_B.weight": np.concatenate([column, -column, column, np.float32(-0.9999) * column], axis=1),
    }
    drowning = verdict(tmp_path / "cancel", tensors=pair)
    assert [(p.code, p.where) for p in drowning.problems] == [(Code.SCALE_SUSPECT, Q0)]


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
