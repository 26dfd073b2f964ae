"""Configs that were changed after PEFT wrote them."""

from __future__ import annotations


def edit_config(kind, cfg):
    c = dict(cfg)
    if kind == "minimal":
        c = {k: c[k] for k in ("base_model_name_or_path", "peft_type", "r", "lora_alpha", "target_modules", "task_type")}
    elif kind == "legacy":
        c = {k: c[k] for k in ("base_model_name_or_path", "bias", "fan_in_fan_out", "inference_mode", "lora_alpha",
                               "lora_dropout", "modules_to_save", "peft_type", "r", "target_modules", "task_type")}
        c.update(enable_lora=None, merge_weights=False)
    elif kind == "future":
        c.update(peft_version="9.1.0", hyper_lora_config=None, use_next_lora=False, tile_pattern={})
    elif kind == "revision_null":
        c["revision"] = None
    elif kind == "local_path":
        c.update(base_model_name_or_path="/data/models/tiny-llama/", revision=None)
    elif kind == "bnb_name":
        c.update(base_model_name_or_path="someone/tiny-llama-bnb-4bit", revision=None)
    elif kind == "dup_targets":
        c["target_modules"] = c["target_modules"] * 2
    elif kind == "fan_false":
        c["fan_in_fan_out"] = False
    elif kind == "no_modules_to_save":
        c["modules_to_save"] = None
    elif kind == "modules_to_save_7x":
        c["modules_to_save"] = c["modules_to_save"] * 7
    elif kind == "modules_to_save_empty":
        c["modules_to_save"] = []
    elif kind == "windows_path":
        c.update(base_model_name_or_path="D:\\\u30e2\u30c7\u30eb\\tiny-llama", revision=None)
    elif kind == "no_owner":
        c["base_model_name_or_path"] = c["base_model_name_or_path"].split("/")[-1]
    elif kind == "superset_targets":
        c["target_modules"] = c["target_modules"] + ["c_attn"]
    elif kind == "auto_mapping":
        c.update(task_type=None, auto_mapping={"base_model_class": "LlamaForCausalLM",
                                               "parent_library": "transformers.models.llama.modeling_llama"})
    return c
