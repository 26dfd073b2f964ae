"""Verdicts on tensors and modules, and on a config that says something else than they do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapterd.loader.base_model import BaseModule, BaseSpec, ModuleKind
from adapterd.loader.checks import Verdict, examine_path
from adapterd.loader.errors import Code
from adapterd.loader.limits import Limits
from fakes.packages import PREFIX, tensors_of, write_package
from fakes.verdicts import BASE, accepted, codes, verdict

Q0 = "model.layers.0.self_attn.q_proj"
F32 = np.dtype("<f4")


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
