"""The good cases, by name."""

from __future__ import annotations

import json

# What trainers leave beside an adapter and nobody needs to fear.
HARMLESS = {
    "README.md": "---\nbase_model: corpus/tiny-llama\nlibrary_name: peft\n---\n\n# An adapter\n",
    "added_tokens.json": "{}\n",
    "merges.txt": "#version: 0.2\n",
    "special_tokens_map.json": json.dumps({"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}, indent=2) + "\n",
    "tokenizer.json": json.dumps({"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}, indent=2) + "\n",
    "tokenizer_config.json": json.dumps({"model_max_length": 64, "tokenizer_class": "PreTrainedTokenizerFast"}, indent=2) + "\n",
    "vocab.json": "{}\n",
}


QV = dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
ALL7 = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SEQ2SEQ = dict(r=4, lora_alpha=8, target_modules=["q", "v"], task_type="SEQ_2_SEQ_LM")
SEQCLS = dict(r=4, lora_alpha=8, target_modules=["q_lin", "v_lin"], task_type="SEQ_CLS")


def case_table():
    """name -> dict(base, cfg, verdict, features, note, ...).  `verdict` is what a
    LoRA-only serving registry is advised to say; see README.md.  Further keys: edit
    (config changed after PEFT wrote it), fill (arguments of fill_adapter, or "cancelling"),
    warn_codes, files (put beside the adapter), same_bytes_as, tolerance."""
    C = {}

    def add(name, base, cfg=None, verdict="accept", features=(), note="", **extra):
        C[name] = dict(base=base, cfg=cfg or {}, verdict=verdict, features=list(features), note=note, **extra)

    for group in (
        targets_and_scales,
        architectures,
        less_than_they_seem,
        unsupported_features,
        heads_and_experts,
        other_methods,
        edited_configs,
        packages,
    ):
        group(add)
    return C


def targets_and_scales(add):
    """What PEFT can say of modules, ranks and alphas."""
    add("llama_plain_qv", "llama", QV, note="the everyday case")
    add("llama_all7", "llama", {**QV, "target_modules": ALL7, "r": 8, "lora_alpha": 16})
    add("llama_all_linear", "llama", {**QV, "target_modules": "all-linear"},
        note="PEFT resolves the shorthand before saving; the saved config holds names, not the shorthand")
    add("llama4l_all_linear", "llama4l", {**QV, "target_modules": "all-linear", "r": 2},
        note="more than 20 targets: PEFT shortens the list to suffixes")
    add("llama_regex", "llama", {**QV, "target_modules": r"model\.layers\.[01]\.self_attn\.(q|k|v|o)_proj"},
        note="regex string, full match over the module name; stays a string on disk")
    add("llama_regex_lookahead", "llama", {**QV, "target_modules": r"^(?!.*mlp).*(?:q_proj|v_proj|o_proj)$"},
        note="negative look-ahead, as seen in vision-language training recipes")
    add("llama_full_names", "llama", {**QV, "target_modules": ["model.layers.0.self_attn.q_proj",
                                                               "model.layers.1.mlp.down_proj"]},
        note="full module names; different modules per layer, so most layers have no delta")
    add("llama_layers_to_transform", "llama", {**QV, "layers_to_transform": [1], "layers_pattern": "layers"},
        note="only layer 1 carries tensors")
    add("llama_exclude", "llama", {**QV, "target_modules": ALL7, "exclude_modules": ["model.layers.0.mlp.up_proj"]})
    add("llama_rslora", "llama", {**QV, "use_rslora": True}, features=["rslora"], note="scale = alpha/sqrt(r)")
    add("llama_patterns", "llama", {**QV, "target_modules": ALL7,
                                    "rank_pattern": {"k_proj": 2, r"layers\.1\.mlp\.(gate|up)_proj": 6},
                                    "alpha_pattern": {"^model.layers.0.self_attn.q_proj": 32, "down_proj": 1}},
        features=["rank_pattern", "alpha_pattern"], note="keys are regexes matched at the end of the name")
    add("llama_patterns_rslora", "llama", {**QV, "use_rslora": True, "rank_pattern": {"v_proj": 9},
                                           "alpha_pattern": {"v_proj": 6}},
        features=["rslora", "rank_pattern", "alpha_pattern"])
    add("llama_alpha_pattern_order", "llama", {**QV, "alpha_pattern": {"self_attn.q_proj": 4, "layers.0.self_attn.q_proj": 64}},
        features=["alpha_pattern"], roundtrip_differs=True,
        note="two overlapping keys: first match wins, and saving sorts the keys, so the scale after reload is "
             "not the scale at training time; the file means what it says after sorting")
    add("llama_float_alpha", "llama", {**QV, "lora_alpha": 12.5}, note="non-integer alpha is legal in practice")
    add("llama_rank_gt_dim", "llama", {**QV, "r": 48, "lora_alpha": 48}, verdict="accept_with_warning",
        note="rank above min(in,out): wasteful but well defined")
    add("llama_r1", "llama", {**QV, "r": 1, "lora_alpha": 1, "target_modules": ["down_proj"]})
    add("llama_dtype_bf16", "llama", QV, dtype="BF16")
    add("llama_dtype_f16", "llama", QV, dtype="F16")
    add("llama_f32_on_bf16_base", "llama", QV, base_dtype="BF16", verdict="accept",
        note="fp32 adapter, bf16 base: PEFT keeps the adapter in fp32 and casts the delta back")
    add("llama_name_not_default", "llama", QV, adapter_name="support_bot",
        note="a named adapter is saved in a sub-folder of that name; keys hold no adapter name")


def architectures(add):
    """Each base with what is peculiar about its linears."""
    add("mistral_gqa", "mistral", {**QV, "target_modules": ALL7}, note="k/v have fewer outputs than q")
    add("qwen2_all7", "qwen2", {**QV, "target_modules": ALL7}, note="q/k/v carry biases in the base; tied embeddings")
    add("qwen3_all_linear", "qwen3", {**QV, "target_modules": "all-linear"}, note="head_dim*heads != hidden size")
    add("gemma2_all7", "gemma2", {**QV, "target_modules": ALL7})
    add("gemma3_qkvo", "gemma3", {**QV, "target_modules": ALL7[:4]})
    add("phi3_fused", "phi3", {**QV, "target_modules": ["qkv_proj", "gate_up_proj", "o_proj", "down_proj"]},
        note="fused qkv and gate_up in the base itself: B is one tall matrix")
    add("gpt2_conv1d", "gpt2", {**QV, "target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},
        note="base weight is [in,out]; A and B keep the usual [r,in] and [out,r]")
    add("opt_attn_ffn", "opt", {**QV, "target_modules": ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]})
    add("falcon_qkv", "falcon", {**QV, "target_modules": ["query_key_value", "dense"]},
        note="multi-query fused projection; 'dense' does not match dense_h_to_4h")
    add("qwen3moe_attention_only", "qwen3moe", {**QV, "target_modules": ALL7[:4]})
    add("t5_qv", "t5", SEQ2SEQ, note="encoder.block.0.layer.0, decoder.block.0.layer.0 and .layer.1: two numbers in a name and none of "
        "them unique; only the whole path tells modules apart")
    add("t5_layers_to_transform", "t5", {**SEQ2SEQ, "layers_to_transform": [1], "layers_pattern": "block"},
        note="block 1 of the encoder and block 1 of the decoder")
    add("bertbare_qv", "bertbare", dict(r=4, lora_alpha=8, target_modules=["query", "value"], task_type="FEATURE_EXTRACTION"),
        note="the model without a head: names start at encoder., where the same encoder under a head has bert.encoder.")
    add("gpt2_dotted_targets", "gpt2", {**QV, "target_modules": ["attn.c_attn", "attn.c_proj"], "fan_in_fan_out": True},
        note="a target with a dot: attn.c_proj leaves out mlp.c_proj, which the short c_proj of gpt2_conv1d takes")
    add("gpt2_fan_in_fan_out_false", "gpt2", {**QV, "target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}, edit="fan_false",
        verdict="accept_with_warning", warn_codes=["CONFIG_BAD_VALUE", "CONFIG_IGNORED_FIELD"],
        note="the flag says Linear, the base has Conv1D: PEFT resets it; the delta must not come out transposed")
    add("llama_alpha_16_0", "llama", {**QV, "lora_alpha": 16.0}, note="alpha written as 16.0: as good as 16, in the scale and in any digest of the manifest")


def less_than_they_seem(add):
    """Adapters that reach less than they seem to."""
    add("t5_target_case_typo", "t5", {**SEQ2SEQ, "target_modules": ["q", "V"]}, verdict="accept_with_warning",
        warn_codes=["CONFIG_TENSOR_DISAGREE"], note="no module is called V, so only q was trained; names are matched with their case, and the warning names V")
    add("phi3_targets_mostly_dead", "phi3", {**QV, "target_modules": ALL7[:4]}, verdict="accept_with_warning",
        warn_codes=["CONFIG_TENSOR_DISAGREE"], note="three of four targets match nothing on a base with packed qkv: the warning says what is left, o_proj")
    add("t5_zero_encoder", "t5", SEQ2SEQ, fill=dict(zero_b=r"\.encoder\."), verdict="accept_with_warning", warn_codes=["ZERO_DELTA"],
        note="every B of the encoder is zero, the decoder is trained: one warning for the group, not one for each module")
    add("llama_near_zero_delta", "llama", QV, fill=dict(b_std=5e-5), tolerance=2e-5, warn_codes=["SCALE_SUSPECT", "ZERO_DELTA"],
        note="as after one step of training: the change has a norm of 1e-3; a remark is right, a refusal is not")
    add("llama_delta_cancels_f32", "llama", {**QV, "lora_alpha": 64}, fill="cancelling", tolerance=1e-3, warn_codes=["SCALE_SUSPECT"],
        note="norm of B@A is 5e-5 of the product of the norms, so trace((B'B)(AA')) in float32 is noise, here partly negative; the effect is "
             "real and must not be called zero; cast to half precision it would drown in rounding")


def unsupported_features(add):
    """Valid PEFT adapters that a plain grouped-LoRA engine cannot serve as they are."""
    add("llama_dora", "llama", {**QV, "use_dora": True}, verdict="reject:UNSUPPORTED_FEATURE", features=["dora"])
    add("llama_lora_bias", "llama", {**QV, "lora_bias": True}, verdict="reject:UNSUPPORTED_FEATURE",
        features=["lora_bias"], note="lora_B.bias tensors")
    add("qwen2_bias_lora_only", "qwen2", {**QV, "bias": "lora_only"}, verdict="reject:UNSUPPORTED_FEATURE",
        features=["bias"], note="base biases of the adapted modules are saved too")
    add("qwen2_bias_all", "qwen2", {**QV, "bias": "all"}, verdict="reject:UNSUPPORTED_FEATURE", features=["bias"])
    add("llama_embed_and_head", "llama", {**QV, "target_modules": ["q_proj", "embed_tokens", "lm_head"]},
        verdict="reject:UNSUPPORTED_FEATURE", features=["embedding_lora", "lm_head_lora"],
        note="lora_embedding_A is [r,vocab], lora_embedding_B is [dim,r]; the base embedding is saved as well")
    add("gemma2_tied_lm_head", "gemma2", {**QV, "target_modules": ["q_proj", "lm_head"]},
        verdict="reject:UNSUPPORTED_FEATURE", features=["lm_head_lora", "tied_embeddings"])
    add("llama_modules_to_save", "llama", {**QV, "modules_to_save": ["embed_tokens", "lm_head"]},
        verdict="reject:UNSUPPORTED_FEATURE", features=["modules_to_save"],
        note="full matrices under the plain module name, no lora_ in the key")
    add("llama_trainable_tokens", "llama", {**QV, "trainable_token_indices": [3, 5, 11]},
        verdict="reject:UNSUPPORTED_FEATURE", features=["trainable_tokens"])
    add("qwen2_trainable_tokens_tied", "qwen2", {**QV, "trainable_token_indices": {"embed_tokens": [2, 4]}},
        verdict="reject:UNSUPPORTED_FEATURE", features=["trainable_tokens", "tied_embeddings"])
    add("llama_alora", "llama", {**QV, "alora_invocation_tokens": [20, 27]}, verdict="reject:UNSUPPORTED_FEATURE",
        features=["alora"], note="tensors look like plain LoRA; only the config says that it acts from the invocation tokens on "
                 "(row 0 of the input holds them, row 1 does not)")
    add("llama_layer_replication", "llama", {**QV, "layer_replication": [[0, 2], [1, 2]]},
        verdict="reject:UNSUPPORTED_FEATURE", features=["layer_replication"],
        note="the adapter names a layer that the base does not have")
    add("llama_pissa", "llama", {**QV, "init_lora_weights": "pissa"}, verdict="reject:UNSUPPORTED_FEATURE",
        features=["mutated_base_init"], note="PEFT changes the base weights at load; A and B alone are not enough")
    add("llama_olora", "llama", {**QV, "init_lora_weights": "olora"}, verdict="reject:UNSUPPORTED_FEATURE",
        features=["mutated_base_init"])
    add("llama_init_gaussian", "llama", {**QV, "init_lora_weights": "gaussian"}, verdict="accept",
        note="harmless init string")


def heads_and_experts(add):
    """The same, for what a task or a mixture of experts brings."""
    add("llama_target_params_moe", "qwen3moe",
        {**QV, "lora_dropout": 0.0, "target_modules": ["q_proj"],
         "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
        verdict="reject:UNSUPPORTED_FEATURE", features=["target_parameters"],
        note="expert tensors: A is [E*r,in], B is [out,r*E], rank-major in B and expert-major in A; "
             "the second parameter nests under base_layer")
    add("bert_seqcls_head", "bert", dict(r=4, lora_alpha=8, target_modules=["query", "value"], task_type="SEQ_CLS"),
        verdict="reject:UNSUPPORTED_FEATURE", features=["modules_to_save"],
        note="a classification task adds the head by itself")
    add("distilbert_head_suffix", "distilbert", SEQCLS, verdict="reject:UNSUPPORTED_FEATURE", features=["modules_to_save"],
        note="modules_to_save lists classifier and score, the file holds pre_classifier.* too: PEFT matches these names as bare suffixes, without a dot; score does not exist")
    add("distilbert_modules_to_save_7x", "distilbert", SEQCLS, edit="modules_to_save_7x", verdict="reject:UNSUPPORTED_FEATURE",
        features=["modules_to_save"], note="classifier and score listed seven times each; the reason is the head, not the repetition")
    add("gpt2cls_head_by_task_type", "gpt2cls", dict(r=4, lora_alpha=8, target_modules=["c_attn"], task_type="SEQ_CLS", fan_in_fan_out=True),
        edit="no_modules_to_save", verdict="reject:UNSUPPORTED_FEATURE", features=["modules_to_save"],
        note="modules_to_save is null, yet score.weight is in the file: only the task type brings the head, and the tensor shows it")
    add("bert_bias_all_with_head", "bert", dict(r=4, lora_alpha=8, target_modules=["query", "value"], task_type="SEQ_CLS", bias="all"),
        verdict="reject:UNSUPPORTED_FEATURE", features=["bias", "modules_to_save"],
        note="every bias of the base, and that of the classifier in three spellings: plain, modules_to_save.bias, original_module.bias; "
             "a loader that takes them writes into a base that others share")
    add("mixtral_legacy_experts", "mixtral", dict(r=2, lora_alpha=4, target_modules=["q_proj", "w1", "w2", "w3"],
                                                  task_type="CAUSAL_LM"),
        verdict="reject:UNSUPPORTED_FEATURE", features=["per_expert_lora"], legacy_mixtral=True,
        note="older layout: one A/B pair per expert; PEFT fuses on load and doubles rank and alpha of gate_up")
    add("mixtral_legacy_experts_rslora", "mixtral",
        dict(r=2, lora_alpha=4, target_modules=["q_proj", "w1", "w2", "w3"], task_type="CAUSAL_LM", use_rslora=True),
        verdict="reject:UNSUPPORTED_FEATURE", features=["per_expert_lora", "rslora"], legacy_mixtral=True,
        note="same with rsLoRA: compare the recorded scale with alpha/sqrt(r)")


def other_methods(add):
    """Other PEFT methods."""
    add("other_adalora", "llama", verdict="reject:UNSUPPORTED_PEFT_TYPE", features=["adalora"],
        other=("AdaLoraConfig", dict(init_r=4, target_r=4, total_step=10, lora_alpha=8,
                                     target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")))
    add("other_loha", "llama", verdict="reject:UNSUPPORTED_PEFT_TYPE", features=["loha"],
        other=("LoHaConfig", dict(r=4, alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")))
    add("other_vera", "llama", verdict="reject:UNSUPPORTED_PEFT_TYPE", features=["vera"],
        other=("VeraConfig", dict(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")))
    add("other_ia3", "llama", verdict="reject:UNSUPPORTED_PEFT_TYPE", features=["ia3"],
        other=("IA3Config", dict(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"],
                                 task_type="CAUSAL_LM")))
    add("other_prompt_tuning", "llama", verdict="reject:UNSUPPORTED_PEFT_TYPE", features=["prompt_tuning"],
        other=("PromptTuningConfig", dict(num_virtual_tokens=4, task_type="CAUSAL_LM")))


def edited_configs(add):
    """The same tensors with hand-edited but legal configs."""
    add("cfg_minimal", "llama", QV, edit="minimal", note="only the fields that old tools write")
    add("cfg_legacy_fields", "llama", QV, edit="legacy", verdict="accept_with_warning",
        note="enable_lora and merge_weights from early PEFT")
    add("cfg_future_fields", "llama", QV, edit="future", verdict="accept_with_warning",
        note="unknown keys with null/false/empty values: PEFT drops them with a warning")
    add("cfg_revision_null", "llama", QV, edit="revision_null", verdict="accept_with_warning",
        note="revision null: the base revision must come from the uploader")
    add("cfg_local_path_base", "llama", QV, edit="local_path", verdict="accept_with_warning",
        note="base_model_name_or_path is a path on somebody's machine")
    add("cfg_quantized_base_name", "llama", QV, edit="bnb_name", verdict="accept_with_warning",
        note="base named by its 4-bit re-upload")
    add("cfg_duplicate_targets", "llama", QV, edit="dup_targets", verdict="accept",
        note="target_modules lists every name twice")
    add("cfg_target_superset", "llama", QV, edit="superset_targets", verdict="accept_with_warning",
        note="target_modules also names a module that the base does not have, and no tensor is there for it")
    add("cfg_auto_mapping", "llama", QV, edit="auto_mapping", verdict="accept",
        note="task_type null plus an auto_mapping block")
    add("cfg_modules_to_save_empty", "llama", QV, edit="modules_to_save_empty", note="[] means none, like null")
    add("cfg_base_windows_path", "llama", QV, edit="windows_path", verdict="accept_with_warning", warn_codes=["BASE_MISMATCH"],
        note="a path on a Windows drive, not all ASCII; never opened, never printed raw")
    add("cfg_base_without_owner", "llama", QV, edit="no_owner", verdict="accept_with_warning", warn_codes=["BASE_MISMATCH"],
        note="the bare folder name of a download")


def packages(add):
    """The package around the adapter."""
    add("files_harmless_extras", "llama", QV, files=HARMLESS, note="a model card and tokenizer files beside the two files that count")
    add("llama_same_bytes_twin", "llama", QV, same_bytes_as="llama_plain_qv",
        note="byte for byte llama_plain_qv under another name: stored once where one owner has both, listed twice")
