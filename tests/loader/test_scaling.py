"""Effective scaling per module, against PEFT's rules and numbers."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from adapterd.loader.errors import Code, Problem, Refused
from adapterd.loader.formats.peft_config import PeftConfig, parse_config
from adapterd.loader.limits import DEFAULT_LIMITS
from adapterd.loader.scaling import Scalings, effective, scaling_problems
from fakes.packages import peft_config, tiny_llama_spec

BASE = tiny_llama_spec()
Q0, Q1 = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"
V0 = "model.layers.0.self_attn.v_proj"


def config(rank: int = 4, alpha: float = 8, **over: Any) -> PeftConfig:
    fields = peft_config(BASE, rank, alpha, ["q_proj", "v_proj"], **over)
    return parse_config(json.dumps(fields).encode(), DEFAULT_LIMITS)[0]


def of(*modules: str, **over: Any) -> Scalings:
    return effective(config(**over), modules or (Q0, Q1, V0))


def problems(**over: Any) -> list[Problem]:
    return list(scaling_problems(of(**over)))


def test_alpha_over_rank_and_over_its_root() -> None:
    assert of(rank=4, alpha=8).by_module[Q0].scaling == 2.0
    assert of(rank=9, alpha=6, use_rslora=True).by_module[Q0].scaling == 2.0
    assert of(rank=2, alpha=3, use_rslora=True).by_module[Q0].scaling == 3 / math.sqrt(2)


def test_16_and_16_point_0_are_one_alpha() -> None:
    whole, real = of(alpha=16).by_module[Q0], of(alpha=16.0).by_module[Q0]
    assert whole == real
    assert isinstance(whole.alpha, float)


def test_the_first_pattern_in_stored_order_holds() -> None:
    both = {"self_attn.q_proj": 4, "layers.0.self_attn.q_proj": 64}
    found = of(alpha_pattern=both)
    assert found.by_module[Q0].scaling == 1.0
    assert found.unused == (("alpha_pattern", "layers.0.self_attn.q_proj"),)
    turned = of(alpha_pattern=dict(reversed(both.items())))
    assert turned.by_module[Q0].scaling == 16.0
    assert turned.by_module[Q1].scaling == 1.0
    assert turned.unused == ()


def test_patterns_match_whole_parts_or_as_regexes() -> None:
    ranks = {"_proj": 99, r"layers\.1\..*(q|k)_proj": 6, "^model.layers.0.self_attn.q_proj": 3}
    found = of(rank_pattern=ranks)
    assert {m: e.rank for m, e in found.by_module.items()} == {Q0: 3, Q1: 6, V0: 4}
    assert found.unused == (("rank_pattern", "_proj"),)


def test_an_unused_pattern_is_named() -> None:
    (found,) = problems(alpha_pattern={"qproj": 800})
    assert (found.code, found.severity) == (Code.CONFIG_TENSOR_DISAGREE, "warn")
    assert found.where == "alpha_pattern.qproj"


@pytest.mark.parametrize(("alpha", "word"), [(400_000, "scaling 100000"), (-8, "negative")])
def test_a_scaling_that_nobody_means_is_a_remark(alpha: float, word: str) -> None:
    (found,) = problems(alpha=alpha)
    assert (found.code, found.severity) == (Code.SCALE_SUSPECT, "warn")
    assert word in found.message
    assert "2 more modules" in found.message


def test_a_scaling_below_the_threshold_is_not_told() -> None:
    assert problems(alpha=256) == []


def test_a_scaling_always_fits_float32() -> None:
    top = 3.4e38
    assert abs(of(rank=1, alpha=-top).by_module[Q0].scaling) == top
    with pytest.raises(Refused) as caught:
        of(alpha=1e39)
    assert caught.value.code is Code.CONFIG_BAD_VALUE
