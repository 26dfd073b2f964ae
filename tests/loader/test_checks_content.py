"""Verdicts on values: no effect, no numbers, numbers that are out of all proportion."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from adapterd.loader.errors import Code
from fakes.packages import PREFIX, WrittenPackage, tensors_of, write_package
from fakes.verdicts import accepted, codes, verdict

Q0 = "model.layers.0.self_attn.q_proj"
F32 = np.dtype("<f4")


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
