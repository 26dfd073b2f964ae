"""PEFT's tensor names: what each is, and what to say about the others."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapterd.loader.errors import Code
from adapterd.loader.formats.tensor_names import (
    PREFIX,
    FeatureKey,
    LoraKey,
    PrefixKey,
    UnknownKey,
    classify,
    key_problem,
)

Q = PREFIX + "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize("side", ["A", "B"])
@pytest.mark.parametrize("module", ["q", "model.layers.0.self_attn.q_proj", "encoder.block.0.layer.0.SelfAttention.q"])
def test_the_two_factors(module: str, side: str) -> None:
    name = f"{PREFIX}{module}.lora_{side}.weight"
    assert classify(name) == LoraKey(name, module, side)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("suffix", "feature"),
    [
        (".lora_B.bias", "lora_bias"),
        (".lora_magnitude_vector", "use_dora"),
        (".lora_magnitude_vector.weight", "use_dora"),
        (".lora_embedding_A", "embedding"),
        (".lora_embedding_B", "embedding"),
        (".token_adapter.trainable_tokens_delta", "trainable_token_indices"),
        (".modules_to_save.weight", "modules_to_save"),
        (".original_module.bias", "modules_to_save"),
        (".base_layer.weight", "save_embedding_layers"),
        (".base_layer.bias", "bias"),
        (".bias", "bias"),
    ],
)
def test_more_than_plain_lora(suffix: str, feature: str) -> None:
    key = classify(Q + suffix)
    assert key == FeatureKey(Q + suffix, Q.removeprefix(PREFIX), feature)
    assert key_problem(key).code is Code.UNSUPPORTED_FEATURE


@pytest.mark.parametrize("head", ["score", "classifier", "pre_classifier", "lm_head", "model.embed_tokens"])
def test_heads_and_embeddings_saved_whole(head: str) -> None:
    assert classify(f"{PREFIX}{head}.weight") == FeatureKey(f"{PREFIX}{head}.weight", head, "modules_to_save")


def test_a_factor_below_a_base_layer_belongs_to_target_parameters() -> None:
    key = classify(PREFIX + "model.layers.0.mlp.experts.base_layer.lora_A.weight")
    assert isinstance(key, FeatureKey)
    assert key.feature == "target_parameters"


@pytest.mark.parametrize(
    "name",
    [
        "model.q.lora_A.weight",
        "_orig_mod." + Q + ".lora_A.weight",
        "module." + Q + ".lora_A.weight",
        PREFIX + Q + ".lora_A.weight",
        PREFIX + "_orig_mod.model.q.lora_A.weight",
        PREFIX + "model._fsdp_wrapped_module.q.lora_B.weight",
    ],
)
def test_wrappers_and_missing_prefixes(name: str) -> None:
    key = classify(name)
    assert isinstance(key, PrefixKey)
    assert key_problem(key).code is Code.KEY_PREFIX


@pytest.mark.parametrize(
    "name",
    [
        Q + ".lora_A",
        Q + ".lora_down.weight",
        Q + ".alpha",
        Q + ".weight",
        PREFIX + "model.norm.weight",
        PREFIX + "lora_A.weight",
        Q + ".lora_A.lora_B.weight",
        Q + ".hada_w1_a",
        Q + ".Lora_A.weight",
        "t0",
        "lora_te_text_model_encoder_layers_0_self_attn_q_proj.lora_down.weight",
        PREFIX,
    ],
)
def test_what_peft_does_not_load(name: str) -> None:
    key = classify(name)
    assert isinstance(key, UnknownKey)
    assert key.logical is None
    problem = key_problem(key)
    assert (problem.code, problem.severity, problem.where) == (Code.UNKNOWN_KEY, "reject", name)


def test_an_adapters_name_in_the_key_tells_which_key_is_meant() -> None:
    key = classify(Q + ".lora_A.default.weight")
    assert isinstance(key, UnknownKey)
    assert key.logical == LoraKey(key.name, Q.removeprefix(PREFIX), "A")


parts = st.sampled_from(
    [
        "base_model",
        "model",
        "layers",
        "0",
        "q_proj",
        "lora_A",
        "lora_B",
        "weight",
        "bias",
        "base_layer",
        "default",
        "_orig_mod",
        "module",
        "lora_embedding_A",
        "lora_magnitude_vector",
        "modules_to_save",
        "lm_head",
    ]
)


@settings(deadline=None)  # the machine may be busy
@given(st.lists(parts, min_size=1, max_size=9).map(".".join))
def test_every_name_is_something_and_only_a_plain_module_is_lora(name: str) -> None:
    key = classify(name)
    assert key.name == name
    if isinstance(key, LoraKey):
        assert name == f"{PREFIX}{key.module}.lora_{key.side}.weight"
        assert not {"lora_A", "lora_B", "base_layer", "_orig_mod"} & set(key.module.split("."))
    else:
        assert key_problem(key).severity == "reject"
