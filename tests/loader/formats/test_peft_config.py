"""adapter_config.json: every field of the installed PEFT is known, and nothing passes in silence."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, TaskType

from adapterd.loader.errors import Code, Refused
from adapterd.loader.formats.config_fields import IGNORABLE, REFUSED_UNLESS, SUPPORTED
from adapterd.loader.formats.config_values import TASK_TYPES
from adapterd.loader.formats.peft_config import PeftConfig, parse_config
from adapterd.loader.limits import DEFAULT_LIMITS, Limits

BASE = {
    "peft_type": "LORA",
    "base_model_name_or_path": "corpus/tiny",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "v_proj"],
}


def parse(**fields: Any) -> PeftConfig:
    return parse_config(json.dumps(BASE | fields).encode(), DEFAULT_LIMITS)[0]


def warnings(**fields: Any) -> list[tuple[Code, str]]:
    return [(p.code, p.where) for p in parse_config(json.dumps(BASE | fields).encode(), DEFAULT_LIMITS)[1]]


def refusals(data: bytes | None = None, without: str = "", **fields: Any) -> list[tuple[Code, str]]:
    body = json.dumps({k: v for k, v in (BASE | fields).items() if k != without}).encode() if data is None else data
    with pytest.raises(Refused) as caught:
        parse_config(body, DEFAULT_LIMITS)
    return [(p.code, p.where) for p in caught.value.problems]


def test_every_field_of_pefts_lora_config_is_known_and_stands_in_one_table() -> None:
    tables = [SUPPORTED, set(IGNORABLE), set(REFUSED_UNLESS)]
    assert set().union(*tables) == {f.name for f in dataclasses.fields(LoraConfig)}
    assert sum(map(len, tables)) == len(set().union(*tables))
    assert set(TASK_TYPES) == {t.value for t in TaskType}


def test_what_peft_writes_by_default_says_nothing_that_is_worth_a_warning() -> None:
    theirs = LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj"], base_model_name_or_path="x", task_type="CAUSAL_LM"
    )
    fields = {k: sorted(v) if isinstance(v, set) else v for k, v in theirs.to_dict().items()}
    config, problems = parse_config(json.dumps(fields, default=str).encode(), DEFAULT_LIMITS)
    assert problems == ()
    assert (config.r, config.lora_alpha, config.target_modules) == (4, 8.0, ("q_proj",))


def test_a_minimal_config_has_pefts_defaults() -> None:
    assert parse() == PeftConfig(
        peft_type="LORA",
        base_model_name="corpus/tiny",
        revision=None,
        task_type=None,
        target_modules=("q_proj", "v_proj"),
        exclude_modules=(),
        layers_to_transform=None,
        layers_pattern=(),
        r=4,
        lora_alpha=8.0,
        use_rslora=False,
        rank_pattern=(),
        alpha_pattern=(),
        fan_in_fan_out=False,
        bias="none",
        modules_to_save=(),
        init_lora_weights=True,
    )


def test_a_full_config_keeps_the_order_of_patterns() -> None:
    config = parse(
        revision="main",
        task_type="SEQ_CLS",
        target_modules=["b", "a", "b"],
        exclude_modules=".*x",
        lora_alpha=2.5,
        layers_to_transform=[3, 1, 3],
        layers_pattern="h",
        use_rslora=True,
        rank_pattern={"z": 1, "a.b": 2},
        alpha_pattern={"z": 1, "^a$": 0.5},
        fan_in_fan_out=True,
        init_lora_weights="gaussian",
        modules_to_save=[],
    )
    assert config.target_modules == ("b", "a")
    assert config.layers_to_transform == (3, 1)
    assert config.layers_pattern == ("h",)
    assert config.rank_pattern == (("z", 1), ("a.b", 2))
    assert config.alpha_pattern == (("z", 1.0), ("^a$", 0.5))
    assert (config.exclude_modules, config.lora_alpha, config.use_rslora) == (".*x", 2.5, True)
    assert (config.revision, config.task_type, config.fan_in_fan_out) == ("main", "SEQ_CLS", True)
    assert config.init_lora_weights == "gaussian"


@pytest.mark.parametrize("field", sorted(BASE))
def test_a_missing_field_is_not_guessed(field: str) -> None:
    assert refusals(without=field) == [(Code.CONFIG_MISSING_FIELD, field)]


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("r", "4", Code.CONFIG_BAD_TYPE),
        ("r", 4.0, Code.CONFIG_BAD_TYPE),
        ("r", True, Code.CONFIG_BAD_TYPE),
        ("r", None, Code.CONFIG_BAD_TYPE),
        ("r", [4], Code.CONFIG_BAD_TYPE),
        ("r", 0, Code.CONFIG_BAD_VALUE),
        ("r", -4, Code.CONFIG_BAD_VALUE),
        ("r", 513, Code.RANK_TOO_LARGE),
        ("lora_alpha", None, Code.CONFIG_BAD_TYPE),
        ("lora_alpha", "16", Code.CONFIG_BAD_TYPE),
        ("lora_alpha", False, Code.CONFIG_BAD_TYPE),
        ("lora_alpha", 1e300, Code.CONFIG_BAD_VALUE),
        ("target_modules", None, Code.CONFIG_BAD_VALUE),
        ("target_modules", [], Code.CONFIG_BAD_VALUE),
        ("target_modules", "", Code.CONFIG_BAD_VALUE),
        ("target_modules", [1, 2], Code.CONFIG_BAD_TYPE),
        ("target_modules", {"q": 1}, Code.CONFIG_BAD_TYPE),
        ("target_modules", ["q", ""], Code.CONFIG_BAD_VALUE),
        ("target_modules", ["q" * 513], Code.CONFIG_BAD_VALUE),
        ("target_modules", "(q", Code.CONFIG_BAD_VALUE),
        ("target_modules", "((a)+)+!", Code.CONFIG_UNSAFE_REGEX),
        ("exclude_modules", "((a)+)+!", Code.CONFIG_UNSAFE_REGEX),
        ("exclude_modules", 3, Code.CONFIG_BAD_TYPE),
        ("rank_pattern", ["q"], Code.CONFIG_BAD_TYPE),
        ("rank_pattern", "q", Code.CONFIG_BAD_TYPE),
        ("layers_to_transform", "1", Code.CONFIG_BAD_TYPE),
        ("layers_to_transform", [True], Code.CONFIG_BAD_TYPE),
        ("layers_to_transform", [-1], Code.CONFIG_BAD_VALUE),
        ("use_rslora", "false", Code.CONFIG_BAD_TYPE),
        ("use_rslora", 1, Code.CONFIG_BAD_TYPE),
        ("use_rslora", None, Code.CONFIG_BAD_TYPE),
        ("use_dora", "false", Code.CONFIG_BAD_TYPE),
        ("use_dora", 0, Code.CONFIG_BAD_TYPE),
        ("fan_in_fan_out", "no", Code.CONFIG_BAD_TYPE),
        ("lora_dropout", "0.1", Code.CONFIG_BAD_TYPE),
        ("inference_mode", "true", Code.CONFIG_BAD_TYPE),
        ("revision", 7, Code.CONFIG_BAD_TYPE),
        ("base_model_name_or_path", None, Code.CONFIG_MISSING_FIELD),
        ("base_model_name_or_path", "", Code.CONFIG_MISSING_FIELD),
        ("base_model_name_or_path", ["x"], Code.CONFIG_BAD_TYPE),
        ("task_type", "TEXT_TO_FISH", Code.CONFIG_BAD_VALUE),
        ("bias", "some", Code.CONFIG_BAD_VALUE),
        ("bias", "all", Code.UNSUPPORTED_FEATURE),
        ("bias", "lora_only", Code.UNSUPPORTED_FEATURE),
        ("bias", None, Code.CONFIG_MISSING_FIELD),
        ("modules_to_save", ["lm_head"], Code.UNSUPPORTED_FEATURE),
        ("modules_to_save", "lm_head", Code.CONFIG_BAD_TYPE),
        ("init_lora_weights", "pissa", Code.UNSUPPORTED_FEATURE),
        ("init_lora_weights", "pissa_niter_16", Code.UNSUPPORTED_FEATURE),
        ("init_lora_weights", "OLoRA", Code.UNSUPPORTED_FEATURE),
        ("init_lora_weights", "loftq", Code.UNSUPPORTED_FEATURE),
        ("init_lora_weights", "magic", Code.CONFIG_BAD_VALUE),
        ("init_lora_weights", None, Code.CONFIG_BAD_TYPE),
        ("use_dora", True, Code.UNSUPPORTED_FEATURE),
        ("use_qalora", True, Code.UNSUPPORTED_FEATURE),
        ("lora_bias", True, Code.UNSUPPORTED_FEATURE),
        ("alora_invocation_tokens", [5], Code.UNSUPPORTED_FEATURE),
        ("alora_invocation_tokens", [], Code.UNSUPPORTED_FEATURE),
        ("trainable_token_indices", {"embed_tokens": [3]}, Code.UNSUPPORTED_FEATURE),
        ("layer_replication", [[0, 2]], Code.UNSUPPORTED_FEATURE),
        ("target_parameters", ["w"], Code.UNSUPPORTED_FEATURE),
        ("use_bdlora", {"nblocks": 2}, Code.UNSUPPORTED_FEATURE),
        ("kasa_config", {}, Code.UNSUPPORTED_FEATURE),
        ("megatron_config", {"a": 1}, Code.UNSUPPORTED_FEATURE),
        ("megatron_core", "os", Code.UNSUPPORTED_FEATURE),
        ("use_hyper_lora", True, Code.UNSUPPORTED_FEATURE),
        ("hyper_scale", 0, Code.UNSUPPORTED_FEATURE),
        ("note", "hello", Code.UNSUPPORTED_FEATURE),
        ("peft_type", "ADALORA", Code.UNSUPPORTED_PEFT_TYPE),
        ("peft_type", "lora", Code.UNSUPPORTED_PEFT_TYPE),
        ("peft_type", 1, Code.CONFIG_BAD_TYPE),
    ],
)
def test_each_field_is_strict(field: str, value: object, code: Code) -> None:
    assert refusals(**{field: value}) == [(code, field)]


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"rank_pattern": {"q": 0}}, (Code.CONFIG_BAD_VALUE, "rank_pattern.q")),
        ({"rank_pattern": {"q": 999}}, (Code.RANK_TOO_LARGE, "rank_pattern.q")),
        ({"alpha_pattern": {"q": "16"}}, (Code.CONFIG_BAD_TYPE, "alpha_pattern.q")),
        ({"rank_pattern": {"((a)+)+!": 8}}, (Code.CONFIG_UNSAFE_REGEX, "rank_pattern.((a)+)+!")),
        (
            {"target_modules": ".*q", "layers_to_transform": [0]},
            (Code.CONFIG_BAD_VALUE, "layers_to_transform"),
        ),
        ({"layers_pattern": "h"}, (Code.CONFIG_BAD_VALUE, "layers_pattern")),
        (
            {"layers_to_transform": [0], "layers_pattern": ["(?P<idx>h)"]},
            (Code.CONFIG_UNSAFE_REGEX, "layers_pattern"),
        ),
    ],
)
def test_what_fields_say_together(fields: dict[str, Any], found: tuple[Code, str]) -> None:
    assert refusals(**fields) == [found]


def test_all_that_is_wrong_is_told_at_once() -> None:
    codes = {where: code for code, where in refusals(r="4", lora_alpha="8", use_dora=True, mystery=[1])}
    assert codes == {
        "r": Code.CONFIG_BAD_TYPE,
        "lora_alpha": Code.CONFIG_BAD_TYPE,
        "use_dora": Code.UNSUPPORTED_FEATURE,
        "mystery": Code.UNSUPPORTED_FEATURE,
    }


@pytest.mark.parametrize(
    "fields",
    [
        {"enable_lora": None, "merge_weights": False, "tile_pattern": {}, "hyper": [], "word": ""},
        {"runtime_config": {"ephemeral_gpu_offload": True}},
        {"eva_config": {"rho": 2.0}},
        {"auto_mapping": {"base_model_class": "system", "parent_library": "os"}},
    ],
)
def test_what_is_ignored_is_told(fields: dict[str, Any]) -> None:
    assert warnings(**fields) == [(Code.CONFIG_IGNORED_FIELD, name) for name in sorted(fields)]


@pytest.mark.parametrize(
    "fields",
    [
        {"runtime_config": {"ephemeral_gpu_offload": False}},
        {"loftq_config": {}, "eva_config": None},
        {
            "auto_mapping": {
                "base_model_class": "L",
                "parent_library": "transformers.models.llama.modeling_llama",
            }
        },
        {"megatron_core": "megatron.core", "megatron_config": None},
        {"use_dora": None, "trainable_token_indices": [], "layer_replication": None, "use_bdlora": None},
        {"peft_version": "9.1.0", "inference_mode": True, "lora_dropout": 0, "qalora_group_size": 16},
    ],
)
def test_neutral_values_need_no_word(fields: dict[str, Any]) -> None:
    assert warnings(**fields) == []


def test_sizes_are_capped() -> None:
    assert refusals(json.dumps(BASE | {f"x{i}": None for i in range(600)}).encode()) == [
        (Code.CONFIG_TOO_LARGE, "adapter_config.json")
    ]
    with pytest.raises(Refused) as caught:
        parse_config(json.dumps(BASE).encode(), Limits(max_config_bytes=20))
    assert caught.value.code is Code.CONFIG_TOO_LARGE
    assert refusals(rank_pattern={f"m{i}": 4 for i in range(5000)}) == [(Code.CONFIG_BAD_VALUE, "rank_pattern")]


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 600)
    | st.floats(-1e40, 1e40)
    | st.text(st.characters(codec="utf-8"), max_size=6),
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=4, alphabet="ab.*("), v, max_size=3),
    max_leaves=6,
)


@settings(deadline=None)  # the machine may be busy
@given(
    st.dictionaries(st.sampled_from(sorted(SUPPORTED | IGNORABLE.keys() | REFUSED_UNLESS.keys())), anything, max_size=6)
)
def test_any_values_give_a_config_or_refusals_on_one_line_each(fields: dict[str, Any]) -> None:
    try:
        config, problems = parse_config(json.dumps(BASE | fields).encode(), DEFAULT_LIMITS)
    except Refused as refused:
        assert all(p.where and str(p).isprintable() for p in refused.problems)
    else:
        assert 1 <= config.r <= DEFAULT_LIMITS.max_rank
        assert all(p.severity == "warn" for p in problems)
