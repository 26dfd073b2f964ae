"""The sentences for the commonest troubles of public adapters: what is wrong, where, and what to do about it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from adapterd.loader.checks import Verdict, examine
from adapterd.loader.checks.share import Kind, share_of
from adapterd.loader.errors import Code, Problem
from adapterd.loader.formats.files import DirectoryPackage
from adapterd.loader.limits import DEFAULT_LIMITS
from adapterd.loader.scaling import SUSPECT_SCALING
from fakes.packages import PREFIX, TINY_REVISION, WrittenPackage, tensors_of, tiny_llama_spec, write_package

BASE = tiny_llama_spec(layers=3)
Q0 = "model.layers.0.self_attn.q_proj"


def verdict(folder: Path, allow: frozenset[Code] = frozenset(), **package: object) -> Verdict:
    written = write_package(folder, base=BASE, **package)  # type: ignore[arg-type]
    with DirectoryPackage.open_dir(written.directory, DEFAULT_LIMITS) as opened:
        return examine(opened, BASE, allow=allow)


def only(found: Verdict) -> Problem:
    (problem,) = found.problems
    return problem


def test_an_adapter_saved_before_training(tmp_path: Path) -> None:
    problem = only(verdict(tmp_path, scale=0.0))
    assert (problem.code, problem.severity) == (Code.ZERO_DELTA, "reject")
    assert "lora_B is zero" in problem.message
    assert "6 adapted modules" in problem.message
    assert "saved before training" in problem.hint
    assert "--allow ZERO_DELTA" in problem.hint


def test_a_scaling_of_zero_is_another_story(tmp_path: Path) -> None:
    problem = only(verdict(tmp_path, alpha=0))
    assert "the scaling is zero" in problem.message
    assert "lora_alpha" in problem.hint


def silenced(written: WrittenPackage, part: str) -> dict[str, np.ndarray]:
    return {n: np.zeros_like(v) for n, v in tensors_of(written.factors).items() if part in n and "lora_B" in n}


@pytest.mark.parametrize(
    ("part", "where", "words"),
    [
        ("layers.1.", "model.layers.1.self_attn", "all 2 adapted modules of model.layers.1.self_attn"),
        ("v_proj", "*.v_proj", "all 3 adapted modules called v_proj"),
        ("layers.2.self_attn.q_proj", "model.layers.2.self_attn.q_proj", "model.layers.2.self_attn.q_proj"),
    ],
)
def test_a_group_without_effect_has_a_name(tmp_path: Path, part: str, where: str, words: str) -> None:
    written = write_package(tmp_path / "model", base=BASE)
    problem = only(verdict(tmp_path / "p", tensors=silenced(written, part)))
    assert (problem.code, problem.severity, problem.where) == (Code.ZERO_DELTA, "warn", where)
    assert words in problem.message


@pytest.mark.parametrize(
    ("scale", "alpha", "words"),
    [
        (1e4, 8.0, "a base's own modules give about 1"),
        (4e3, 400.0, "float16 does not hold"),
        (5e4, 3e38, "float32 does not hold"),
    ],
)
def test_a_product_that_overflows_though_its_factors_do_not(
    tmp_path: Path, scale: float, alpha: float, words: str
) -> None:
    found = verdict(tmp_path, scale=scale, alpha=alpha)
    assert found.ok
    assert {(p.code, p.severity) for p in found.problems} == {(Code.SCALE_SUSPECT, "warn")}
    (loud,) = [p for p in found.problems if p.where.startswith("model.layers")]
    assert words in loud.message
    assert "(and 5 more modules)" in loud.message


def test_a_huge_alpha_is_suspect_whatever_it_gives(tmp_path: Path) -> None:
    found = verdict(tmp_path, alpha=1e6, scale=1e-7)
    assert [(p.code, p.where) for p in found.problems] == [(Code.SCALE_SUSPECT, "lora_alpha")]
    assert SUSPECT_SCALING < 1e6 / 4


def test_both_factors_are_scanned_for_values_that_are_no_numbers(tmp_path: Path) -> None:
    broken = {
        f"{PREFIX}{Q0}.lora_A.weight": np.full((4, 32), np.nan, np.float32),
        f"{PREFIX}{Q0}.lora_B.weight": np.full((32, 4), np.inf, np.float32),
    }
    found = verdict(tmp_path, tensors=broken)
    assert [(p.code, p.where) for p in found.problems] == [(Code.NONFINITE, name) for name in sorted(broken)]


@pytest.mark.parametrize(
    ("names", "words", "way"),
    [
        (("score.weight",), "a whole head or embedding", "modules_to_save=None"),
        (("lm_head.weight", "model.embed_tokens.weight"), "a whole head or embedding", "save_embedding_layers=False"),
        ((f"{Q0}.base_layer.bias", "model.norm.bias"), "a bias of the base", "bias='none'"),
        ((f"{Q0}.lora_magnitude_vector",), "a magnitude of DoRA", "use_dora=False"),
    ],
)
def test_heads_and_biases_that_the_config_does_not_mention(
    tmp_path: Path, names: tuple[str, ...], words: str, way: str
) -> None:
    problem = only(verdict(tmp_path, tensors={PREFIX + name: np.ones(32, np.float32) for name in names}))
    assert problem.code is Code.UNSUPPORTED_FEATURE
    assert words in problem.message
    assert "does not mention" in problem.message
    assert way in problem.hint
    assert all(name in problem.message + problem.where for name in names)


def test_targets_that_match_nothing_have_near_names(tmp_path: Path) -> None:
    problem = only(verdict(tmp_path, target_modules=["q_proj", "v_proj", "O_Proj", "gate_projs", "xyzzy"]))
    assert problem.code is Code.CONFIG_TENSOR_DISAGREE
    assert "O_Proj, gate_projs, xyzzy" in problem.message
    assert problem.hint.startswith("Did you mean o_proj")
    assert "gate_proj" in problem.hint


def test_a_revision_that_nobody_stated_can_be_stated(tmp_path: Path) -> None:
    problem = only(verdict(tmp_path, revision=None))
    assert (problem.code, problem.severity) == (Code.BASE_REVISION_MISMATCH, "warn")
    assert "--base ID@REV" in problem.hint
    assert f'"revision": "{TINY_REVISION}"' in problem.hint


def test_the_part_of_the_base_that_is_adapted() -> None:
    share = share_of([f"model.layers.{i}.self_attn.q_proj" for i in range(2)] + [Q0, "lm_head"], BASE)
    assert (share.adapted, share.linears) == (2, 21)
    assert Kind("q_proj", 2, 3) in share.kinds
    assert [k.name for k in share.kinds] == sorted(k.name for k in share.kinds)
    assert "lm_head" not in {k.name for k in share.kinds}
    weights = sum(m.in_features * m.out_features for m in BASE.modules if "layers" in m.path)
    assert share.weights == pytest.approx(2 * 32 * 32 / weights)
    assert share_of((m.path for m in BASE.modules), BASE).weights == 1.0
