"""Which modules, ranks and alphas: the installed PEFT's own functions are the oracle."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key

from adapterd.loader.errors import Code, Refused
from adapterd.loader.formats.pattern_table import MAX_REGEX_KEYS, PatternTable, dotted_suffixes
from adapterd.loader.formats.peft_config import PeftConfig, parse_config
from adapterd.loader.formats.targets import Scales, Targets, scaling
from adapterd.loader.limits import DEFAULT_LIMITS

NAMES = [
    *(f"model.layers.{i}.self_attn.{p}_proj" for i in (0, 1, 11) for p in "qkvo"),
    *(f"model.layers.{i}.mlp.experts.{e}.w1" for i in (0, 1) for e in (0, 1, 2)),
    *(f"transformer.h.{i}.{m}.c_proj" for i in (0, 1) for m in ("attn", "mlp")),
    *(f"encoder.block.{i}.layer.0.SelfAttention.{p}" for i in (0, 1) for p in "qv"),
    "lm_head",
    "q_proj",
    "model.embed_tokens",
    "model_layers_0.q_proj",
]


def config(**fields: Any) -> PeftConfig:
    base = {
        "peft_type": "LORA",
        "base_model_name_or_path": "x",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj"],
    }
    return parse_config(json.dumps(base | fields).encode(), DEFAULT_LIMITS)[0]


def peft_covers(**fields: Any) -> list[str]:
    theirs = LoraConfig(**({"target_modules": ["q_proj"]} | fields))
    return [n for n in NAMES if check_target_module_exists(theirs, n)]


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": ["attn.c_proj"]},
        {"target_modules": ["c_proj"]},
        {"target_modules": ["proj", "Q_proj", "_proj"]},
        {"target_modules": ["q", "v"]},
        {"target_modules": ["model.layers.1.self_attn.q_proj", "lm_head"]},
        {"target_modules": r".*\.(q|v)_proj"},
        {"target_modules": "q_proj"},
        {"target_modules": r"^(?!.*layers\.1\.).*_proj"},
        {"target_modules": ["q_proj", "w1"], "layers_to_transform": [1]},
        {"target_modules": ["q_proj", "w1"], "layers_to_transform": 11},
        {"target_modules": ["q_proj", "w1"], "layers_to_transform": []},
        {"target_modules": ["q_proj", "c_proj"], "layers_to_transform": [0], "layers_pattern": "h"},
        {"target_modules": ["q_proj", "w1"], "layers_to_transform": [1], "layers_pattern": ["h", "layers"]},
        {"target_modules": ["w1"], "layers_to_transform": [1], "layers_pattern": ["experts"]},
        {"target_modules": ["q"], "layers_to_transform": [1], "layers_pattern": []},
        {"target_modules": ["model.layers.1.self_attn.q_proj", "q_proj"], "layers_to_transform": [0]},
        {
            "target_modules": ["q_proj", "v_proj"],
            "exclude_modules": ["layers.1.self_attn.q_proj", "model_layers_0.q_proj"],
        },
        {"target_modules": ["q_proj", "v_proj"], "exclude_modules": r".*\.1\..*"},
        {"target_modules": ["q_proj", "v_proj"], "exclude_modules": []},
    ],
)
def test_coverage_is_petfs(fields: dict[str, Any]) -> None:
    targets = Targets(config(**fields))
    assert [n for n in NAMES if targets.covers(n)] == peft_covers(**fields)


leaves = st.sampled_from(["q_proj", "self_attn.q_proj", "c_proj", "w1", "q", "layers.0.self_attn.v_proj", "lm_head"])


@settings(deadline=None)  # the machine may be busy
@given(
    st.lists(leaves, min_size=1, max_size=3),
    st.none() | st.lists(st.integers(0, 12), max_size=3),
    st.lists(leaves, max_size=2),
)
def test_coverage_of_any_lists_is_pefts(targets: list[str], layers: list[int] | None, excluded: list[str]) -> None:
    fields = {"target_modules": targets, "layers_to_transform": layers, "exclude_modules": excluded}
    ours = Targets(config(**fields))
    assert [n for n in NAMES if ours.covers(n)] == peft_covers(**fields)


def test_the_entries_that_take_a_module_are_told() -> None:
    targets = Targets(config(target_modules=["v_proj", "self_attn.v_proj", "V_proj"], layers_to_transform=[0]))
    assert targets.entries_for("model.layers.0.self_attn.v_proj") == {"v_proj", "self_attn.v_proj"}
    assert targets.entries_for("model.layers.1.self_attn.v_proj") == frozenset()
    assert targets.entries == {"v_proj", "self_attn.v_proj", "V_proj"}


def test_all_linear_leaves_the_kinds_to_the_caller() -> None:
    targets = Targets(config(target_modules="All-Linear", exclude_modules=["lm_head"]))
    assert targets.all_linear
    assert targets.covers("model.layers.0.self_attn.q_proj")
    assert not targets.covers("lm_head")


def test_dotted_suffixes() -> None:
    assert list(dotted_suffixes("a.b.c")) == ["a.b.c", "b.c", "c"]


# ------------------------------------------------------------------------------- patterns


def peft_first(keys: list[str], name: str) -> str | None:
    """PEFT gives the name itself where no key matches."""
    found = get_pattern_key(keys, name)
    return found if found in keys and re.match(rf"(.*\.)?({found})$", name) else None


@pytest.mark.parametrize(
    "keys",
    [
        ["q_proj", "self_attn.q_proj"],
        ["self_attn.q_proj", "q_proj"],
        ["model.layers.0", "layers.1.self_attn.q_proj", ".*"],
        ["^model.layers.0.self_attn.q_proj", "^q_proj", "q_proj$"],
        [r"layers\.1\.self_attn\.q_proj", r"layers.0.self_attn.q_proj"],
        ["self.attn.q_proj", "q.proj", "q_proj"],
        [r"layers\.\d+\.self_attn\.(q|v)_proj", "k_proj"],
        ["q_proj|v_proj", "q_proj"],
        ["proj", "_proj"],
        [".......", "model"],
        ["model.layers_0.q_proj", "model_layers.0.q_proj"],
    ],
)
def test_the_first_key_in_stored_order_is_pefts(keys: list[str]) -> None:
    table = PatternTable(keys, "rank_pattern")
    assert {n: table.first(n) for n in NAMES} == {n: peft_first(keys, n) for n in NAMES}


key_pieces = st.sampled_from(
    ["q_proj", "attn", "layers", ".", r"\.", "0", "1", "^", "$", ".*", r"\d+", "(q|v)", "_", "self", "model"]
)


@settings(deadline=None)  # the machine may be busy
@given(
    st.lists(st.lists(key_pieces, min_size=1, max_size=6).map("".join), min_size=1, max_size=5, unique=True),
    st.lists(st.sampled_from(["q_proj", "attn", "layers", "0", "1", "self_attn", "model"]), min_size=1, max_size=4).map(
        ".".join
    ),
)
def test_the_first_of_any_keys_is_pefts(keys: list[str], name: str) -> None:
    try:
        table = PatternTable(keys, "alpha_pattern")
    except Refused:
        return
    for one in (name, name.replace(".", "_", 1), *NAMES[:3]):
        assert table.first(one) == peft_first(keys, one)


def test_thousands_of_full_names_take_no_time() -> None:
    names = [f"model.layers.{i}.mlp.experts.{e}.{p}" for i in range(24) for e in range(56) for p in ("w1", "w2", "w3")]
    table = PatternTable(names, "rank_pattern")
    before = time.process_time()
    assert [table.first(n) for n in names] == names
    assert time.process_time() - before < 1.0


def test_keys_that_would_take_for_ever_are_refused() -> None:
    many = [f"^layers.{i}.*" for i in range(MAX_REGEX_KEYS + 1)]
    with pytest.raises(Refused) as caught:
        PatternTable(many, "rank_pattern")
    assert (caught.value.code, caught.value.problem.where) == (Code.CONFIG_BAD_VALUE, "rank_pattern")
    dots = PatternTable(["." * i + "x" * (30 - i) for i in range(2, 30)] + ["." * 32] * 5000, "rank_pattern")
    with pytest.raises(Refused) as caught:
        for i in range(10, 99):
            dots.first(f"model.layers.{i}.self_attn.q_proj")
    assert caught.value.code is Code.CONFIG_BAD_VALUE


def test_rank_alpha_and_scaling() -> None:
    scales = Scales(config(rank_pattern={"v_proj": 16}, alpha_pattern={"layers.0.self_attn.v_proj": 4, "v_proj": 32}))
    first, second = scales.of("model.layers.0.self_attn.v_proj"), scales.of("model.layers.1.self_attn.v_proj")
    assert (first.rank, first.alpha, first.rank_key, first.alpha_key) == (
        16,
        4.0,
        "v_proj",
        "layers.0.self_attn.v_proj",
    )
    assert (second.rank, second.alpha) == (16, 32.0)
    other = scales.of("model.layers.0.self_attn.q_proj")
    assert dataclasses.astuple(other) == (4, 8.0, None, None)
    assert scaling(8.0, 4, use_rslora=False) == 2.0
    assert scaling(8.0, 4, use_rslora=True) == 4.0
