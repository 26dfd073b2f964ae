"""Configs that are no JSON, contradict themselves or ask for what is not served."""

from __future__ import annotations

import json

from corpus.bad.building import BASE, PRE, T, case, config, files, lora, st


def c(**kw):
    return files(cfg=config(**kw))


def config_cases():
    json_cases()
    rank_and_alpha_cases()
    target_cases()
    switch_cases()
    base_cases()
    extension_cases()


def json_cases():
    case("cfg_missing", "MISSING_CONFIG", files(cfg=...))
    case("cfg_empty", "CONFIG_NOT_JSON", files(cfg=b""))
    case("cfg_trailing_comma", "CONFIG_NOT_JSON", files(cfg=config()[:-2] + b",}"))
    case("cfg_array", "CONFIG_NOT_JSON", files(cfg=b"[" + config() + b"]"), also=["CONFIG_BAD_TYPE"])
    case("cfg_lfs_pointer", "CONFIG_NOT_JSON", files(cfg=b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"cd" * 32 + b"\nsize 1049\n"), also=["LFS_POINTER"])
    case("cfg_utf16", "CONFIG_NOT_JSON", files(cfg=config().decode().encode("utf-16")), also=["CONFIG_ENCODING"])
    case("cfg_duplicate_key", "CONFIG_DUPLICATE_KEY", files(cfg=config().replace(b'"r": 4', b'"r": 64,\n  "r": 4')))
    case("cfg_duplicate_nested", "CONFIG_DUPLICATE_KEY", files(cfg=config().replace(b'"alpha_pattern": {}', b'"alpha_pattern": {"q_proj": 8, "q_proj": 800}')))
    case("cfg_deep", "CONFIG_TOO_DEEP", files(cfg=config()[:-2] + b',"x":' + b"[" * 100000 + b"]" * 100000 + b"}"), also=["CONFIG_NOT_JSON"], note="must not end in a recursion error")
    case("cfg_1200kb", "CONFIG_TOO_LARGE", files(cfg=config(note="x" * 1_200_000)), also=["QUOTA_EXCEEDED"])
    case("cfg_80k_targets", "CONFIG_TOO_LARGE", c(target_modules=["q_proj"] * 80000), also=["QUOTA_EXCEEDED", "CONFIG_BAD_VALUE"])
    case("cfg_nan_alpha", "CONFIG_BAD_VALUE", files(cfg=config().replace(b'"lora_alpha": 8', b'"lora_alpha": NaN')), also=["CONFIG_NOT_JSON"], note="Python's parser takes NaN; JSON does not have it")
    case("cfg_inf_alpha", "CONFIG_BAD_VALUE", files(cfg=config().replace(b'"lora_alpha": 8', b'"lora_alpha": 1e999')), also=["CONFIG_NOT_JSON"])
    case("cfg_bigint_r", "CONFIG_BAD_VALUE", files(cfg=config().replace(b'"r": 4', b'"r": ' + b"9" * 5000)), also=["CONFIG_NOT_JSON", "RANK_TOO_LARGE"])


def rank_and_alpha_cases():
    for tag, val in (("string", "4"), ("float", 4.0), ("fraction", 4.5), ("bool", True), ("null", None), ("list", [4])):
        case(f"cfg_r_{tag}", "CONFIG_BAD_TYPE", c(r=val), also=["CONFIG_BAD_VALUE", "CONFIG_MISSING_FIELD"])
    case("cfg_r_zero", "CONFIG_BAD_VALUE", c(r=0), also=["RANK_ZERO"])
    case("cfg_r_negative", "CONFIG_BAD_VALUE", c(r=-4))
    case("cfg_r_missing", "CONFIG_MISSING_FIELD", c(r=...), note="PEFT would silently take 8 here")
    case("cfg_alpha_missing", "CONFIG_MISSING_FIELD", c(lora_alpha=...), note="PEFT would silently take 8, whatever the rank")
    case("cfg_alpha_null", "CONFIG_BAD_TYPE", c(lora_alpha=None), also=["CONFIG_MISSING_FIELD"])
    case("cfg_alpha_string", "CONFIG_BAD_TYPE", c(lora_alpha="16"))
    case("cfg_alpha_zero", "ZERO_DELTA", c(lora_alpha=0), also=["CONFIG_BAD_VALUE", "SCALE_SUSPECT"], note="scale 0: no effect at all; a warning only where the uploader allows it by name")
    case("cfg_alpha_negative", "SCALE_SUSPECT", c(lora_alpha=-8), verdict="warn", also=["CONFIG_BAD_VALUE"], note="legal arithmetic, flips the sign; rejecting is fine too")
    case("cfg_alpha_1e5", "SCALE_SUSPECT", c(lora_alpha=400000), verdict="warn", also=["CONFIG_BAD_VALUE"], note="scale 1e5; seen in the wild as r=1000, alpha=100000")
    case("cfg_alpha_1e300", "CONFIG_BAD_VALUE", c(lora_alpha=1e300), also=["SCALE_SUSPECT"], note="not representable in float32")


def target_cases():
    case("cfg_targets_null", "CONFIG_BAD_VALUE", c(target_modules=None), also=["CONFIG_MISSING_FIELD", "CONFIG_BAD_TYPE"], note="PEFT would guess from the architecture")
    case("cfg_targets_empty", "CONFIG_BAD_VALUE", c(target_modules=[]), also=["CONFIG_TENSOR_DISAGREE", "CONFIG_MISSING_FIELD"])
    case("cfg_targets_int", "CONFIG_BAD_TYPE", c(target_modules=[1, 2]))
    case("cfg_targets_dict", "CONFIG_BAD_TYPE", c(target_modules={"q_proj": 4}))
    case("cfg_targets_bad_regex", "CONFIG_BAD_VALUE", c(target_modules="(q_proj|v_proj"), also=["CONFIG_UNSAFE_REGEX", "CONFIG_BAD_REGEX"])
    case("cfg_targets_plain_string", "CONFIG_TENSOR_DISAGREE", c(target_modules="q_proj"), also=["CONFIG_BAD_VALUE"], note="a string is a regex with full match, so it matches no module")
    case("cfg_targets_redos", "CONFIG_UNSAFE_REGEX", c(target_modules=r"^(([a-z0-9_.])+)+!$"), also=["CONFIG_BAD_VALUE", "CONFIG_TENSOR_DISAGREE"], no_probe=True, note="exponential back-tracking; must be decided within a second")
    case("cfg_rank_pattern_redos", "CONFIG_UNSAFE_REGEX", c(rank_pattern={r"(([a-z0-9_.])+)+!": 8}), also=["CONFIG_BAD_VALUE"], no_probe=True)
    case("cfg_rank_pattern_zero", "CONFIG_BAD_VALUE", c(rank_pattern={"q_proj": 0}), also=["RANK_MISMATCH"])
    case("cfg_rank_pattern_list", "CONFIG_BAD_TYPE", c(rank_pattern=["q_proj"]))
    case("cfg_alpha_pattern_string", "CONFIG_BAD_TYPE", c(alpha_pattern={"q_proj": "16"}))


def switch_cases():
    case("cfg_peft_type_missing", "CONFIG_MISSING_FIELD", c(peft_type=...), also=["UNKNOWN_FORMAT"])
    case("cfg_peft_type_unknown", "UNSUPPORTED_PEFT_TYPE", c(peft_type="LORA_XL"))
    case("cfg_peft_type_lower", "UNSUPPORTED_PEFT_TYPE", c(peft_type="lora"), also=["CONFIG_BAD_VALUE"], note="PEFT refuses it; at least one server lower-cases")
    case("cfg_task_type_unknown", "CONFIG_BAD_VALUE", c(task_type="TEXT_TO_FISH"))
    case("cfg_bias_unknown", "CONFIG_BAD_VALUE", c(bias="some"), also=["UNSUPPORTED_FEATURE"])
    case("cfg_use_dora_string", "CONFIG_BAD_TYPE", c(use_dora="false"), note="a non-empty string is true in Python")
    case("cfg_use_rslora_string", "CONFIG_BAD_TYPE", c(use_rslora="false"), note="would change the scale from 2 to 4")
    case("cfg_use_rslora_int", "CONFIG_BAD_TYPE", c(use_rslora=1))
    case("cfg_dora_without_vectors", "UNSUPPORTED_FEATURE", c(use_dora=True), also=["CONFIG_TENSOR_DISAGREE"])
    t = lora()
    for i in (0, 1):
        t[f"{PRE}model.layers.{i}.self_attn.q_proj.lora_magnitude_vector"] = T([32], seed=4)
    case("cfg_vectors_without_dora", "CONFIG_TENSOR_DISAGREE", files(weights=st(t)), also=["UNSUPPORTED_FEATURE", "UNKNOWN_KEY"])
    case("cfg_modules_to_save_no_tensors", "UNSUPPORTED_FEATURE", c(modules_to_save=["lm_head"]), also=["CONFIG_TENSOR_DISAGREE"])
    case("cfg_layers_disagree", "CONFIG_TENSOR_DISAGREE", c(layers_to_transform=[0]), note="the file holds layer 1 too")
    case("cfg_layers_with_regex", "CONFIG_BAD_VALUE", c(target_modules=r".*\.(q|v)_proj", layers_to_transform=[0]), also=["CONFIG_TENSOR_DISAGREE"], note="PEFT refuses this pair of fields")
    case("cfg_fan_in_fan_out_on_linear", "CONFIG_BAD_VALUE", c(fan_in_fan_out=True), verdict="warn", also=["CONFIG_IGNORED_FIELD"], note="no effect on an nn.Linear base; PEFT resets it")
    case("cfg_runtime_config", "CONFIG_IGNORED_FIELD", c(runtime_config={"ephemeral_gpu_offload": True}), verdict="warn")
    case("cfg_auto_mapping_module", "CONFIG_IGNORED_FIELD", c(auto_mapping={"base_model_class": "system", "parent_library": "os"}), verdict="warn", also=["CONFIG_BAD_VALUE", "UNSUPPORTED_FEATURE"],
         note="must never be imported or looked up; rejecting is fine too")
    case("cfg_megatron_core_module", "UNSUPPORTED_FEATURE", c(megatron_config={"tensor_model_parallel_size": 1}, megatron_core="corpus_must_not_be_imported"), also=["CONFIG_BAD_VALUE"],
         note="older PEFT imported the module that this field names, newer PEFT keeps an allow-list; refuse unless null / megatron.core")


def base_cases():
    case("cfg_base_traversal", "BASE_MISMATCH", c(base_model_name_or_path="../../../../srv/models/private"), also=["CONFIG_BAD_VALUE"], note="must not be opened")
    case("cfg_base_url", "BASE_MISMATCH", c(base_model_name_or_path="http://127.0.0.1:9/model"), also=["CONFIG_BAD_VALUE"], note="must not be fetched")
    case("cfg_base_missing", "CONFIG_MISSING_FIELD", c(base_model_name_or_path=...), also=["BASE_MISMATCH"], note="or accept when the uploader names the base")
    case("cfg_base_null", "CONFIG_MISSING_FIELD", c(base_model_name_or_path=None, revision=None), also=["BASE_MISMATCH", "CONFIG_BAD_TYPE"], note="or accept when the uploader names the base")
    case("cfg_stub", "CONFIG_MISSING_FIELD", files(cfg=b'{"base_model": "corpus/tiny-llama"}'), also=["UNKNOWN_FORMAT"])
    case("cfg_not_peft_at_all", "CONFIG_MISSING_FIELD", files(cfg=json.dumps({"adapter_type": "controller", "base_model_name_or_path": BASE["base_model"], "n_heads": 8}).encode()), also=["UNKNOWN_FORMAT"])


def extension_cases():
    case("cfg_alora", "UNSUPPORTED_FEATURE", c(alora_invocation_tokens=[5, 6]))
    case("cfg_bdlora", "UNSUPPORTED_FEATURE", c(use_bdlora={"target_modules_bd_a": ["o_proj"], "target_modules_bd_b": ["q_proj"], "nblocks": 2, "match_strict": True}))
    case("cfg_qalora", "UNSUPPORTED_FEATURE", c(use_qalora=True))
    case("cfg_unknown_truthy_field", "UNSUPPORTED_FEATURE", c(use_hyper_lora=True), also=["CONFIG_UNKNOWN_FIELD"], note="an unknown switch that is ON may change the arithmetic")
