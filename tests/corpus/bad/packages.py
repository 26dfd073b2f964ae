"""Folders with more, less or other files than an adapter's two."""

from __future__ import annotations

import json

from corpus.bad.building import BASE, T, case, config, evil_pickle, files, lora, st


def package_cases():
    ok = files()
    mlx = {f"model.layers.{i}.self_attn.q_proj.{x}": T([32, 4] if x == "lora_a" else [4, 32], seed=i) for i in (0, 1) for x in ("lora_a", "lora_b")}
    case("pkg_mlx", "UNKNOWN_FORMAT", {"adapter_config.json": json.dumps({"fine_tune_type": "lora", "num_layers": 2, "model": BASE["base_model"],
         "lora_parameters": {"rank": 4, "scale": 20.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]}}).encode(), "adapters.safetensors": st(mlx)},
         also=["CONFIG_MISSING_FIELD", "MISSING_WEIGHTS"], note="both factors transposed, scale is not alpha/r")
    ko = {}
    for i in (0, 1):
        k = f"lora_te_text_model_encoder_layers_{i}_self_attn_q_proj"
        ko.update({k + ".lora_down.weight": T([4, 32], "F16", seed=i), k + ".lora_up.weight": T([32, 4], "F16", seed=i + 3), k + ".alpha": T([], "F16", vals=[2.0])})
    case("pkg_kohya", "UNKNOWN_FORMAT", {"my_style.safetensors": st(ko, metadata={"ss_network_dim": "4", "ss_network_alpha": "2"})}, also=["MISSING_CONFIG", "MISSING_WEIGHTS"])
    case("pkg_pickle_only", "FORBIDDEN_FILE", {"adapter_config.json": config(), "adapter_model.bin": evil_pickle()}, also=["MISSING_WEIGHTS"], no_probe=True, note="ADAPTER_CORPUS_CANARY must stay unset")
    case("pkg_pickle_and_safetensors", "FORBIDDEN_FILE", {**ok, "adapter_model.bin": evil_pickle()}, also=["AMBIGUOUS_WEIGHTS"])
    case("pkg_training_args_bin", "FORBIDDEN_FILE", {**ok, "training_args.bin": evil_pickle()}, also=["UNEXPECTED_FILE"], note="common in trainer output; dropping it with a warning is fine if it is never opened")
    case("pkg_python_file", "FORBIDDEN_FILE", {**ok, "modeling_custom.py": b"raise SystemExit('imported')\n"}, also=["UNEXPECTED_FILE"])
    case("pkg_no_weights", "MISSING_WEIGHTS", files(weights=...))
    case("pkg_empty", "MISSING_CONFIG", {}, also=["MISSING_WEIGHTS"])
    case("pkg_sharded", "SHARDED_UNSUPPORTED", {"adapter_config.json": config(), "adapter_model-00001-of-00002.safetensors": st(lora(layers=(0,))),
         "adapter_model-00002-of-00002.safetensors": st(lora(layers=(1,))), "adapter_model.safetensors.index.json": b"{}"}, also=["MISSING_WEIGHTS"])
    case("pkg_sharded_partial", "SHARDED_UNSUPPORTED", {"adapter_config.json": config(), "adapter_model-00001-of-00002.safetensors": st(lora(layers=(0,)))}, also=["MISSING_WEIGHTS"])
    case("pkg_two_adapters", "AMBIGUOUS_WEIGHTS", {**ok, "other/adapter_config.json": config(r=8), "other/adapter_model.safetensors": st(lora(r=8))}, also=["UNEXPECTED_FILE"])
    case("pkg_weights_is_directory", "MISSING_WEIGHTS", {"adapter_config.json": config(), "adapter_model.safetensors/x": b"1"}, also=["UNEXPECTED_FILE"])
    case("pkg_symlink_weights", "UNSAFE_LINK", {"adapter_config.json": config(), "adapter_model.safetensors": ("link", "/nonexistent/secret.safetensors")}, also=["MISSING_WEIGHTS"])
    case("pkg_symlink_inside", "UNSAFE_LINK", {"adapter_config.json": config(), "real.safetensors": st(lora()), "adapter_model.safetensors": ("link", "real.safetensors")}, note="links are refused even when they stay inside")
    case("pkg_wrong_case_name", "MISSING_CONFIG", {"Adapter_Config.json": config(), "ADAPTER_MODEL.safetensors": st(lora())}, also=["MISSING_WEIGHTS", "UNEXPECTED_FILE"])


    # what trainers and browsers leave in a folder
    text = {"README.md": b"# An adapter\n", "tokenizer.json": b"{}\n", "tokenizer_config.json": b"{}\n", "special_tokens_map.json": b"{}\n"}
    log = json.dumps({"global_step": 500, "epoch": 1.0, "log_history": [{"step": 500, "loss": 1.5}]}).encode()
    case("pkg_trainer_folder", "FORBIDDEN_FILE", {**ok, **text, "trainer_state.json": log, "optimizer.pt": evil_pickle(), "scheduler.pt": evil_pickle(), "rng_state.pth": evil_pickle(),
         "training_args.bin": evil_pickle()}, also=["UNEXPECTED_FILE"], note="a whole checkpoint folder: the pickles are named, and the hint says which two files to upload")
    case("pkg_trainer_state", "UNEXPECTED_FILE", {**ok, **text, "trainer_state.json": log, "chat_template.jinja": b"{{ messages }}\n", "all_results.json": b"{}\n"}, verdict="warn",
         note="nothing dangerous, nothing needed: keep it out and say so; rejecting is fine too")
    case("pkg_copy_of_weights", "AMBIGUOUS_WEIGHTS", {**ok, "Copy of adapter_model.safetensors": ok["adapter_model.safetensors"]}, also=["UNEXPECTED_FILE"], note="the same bytes under a name that a web drive gives; the message names the stray file")
    case("pkg_browser_copy_only", "MISSING_WEIGHTS", {"adapter_config.json": config(), "adapter_model (1).safetensors": st(lora())}, also=["UNEXPECTED_FILE", "AMBIGUOUS_WEIGHTS"], note="a second download of one name; say which name is expected")
    case("pkg_nested_checkpoint", "AMBIGUOUS_WEIGHTS", {**ok, "checkpoint-500/adapter_config.json": config(target_modules=["o_proj"]),
         "checkpoint-500/adapter_model.safetensors": st(lora(targets=("self_attn.o_proj",))), "checkpoint-500/trainer_state.json": log}, also=["UNEXPECTED_FILE"], note="an earlier checkpoint inside, of another run with other targets")
    old = {}
    for i in (1, 2):
        for n in ("to_q", "to_k", "to_v", "to_out"):
            k = f"down_blocks.0.attentions.0.transformer_blocks.0.attn{i}.processor.{n}_lora"
            old.update({k + ".down.weight": T([4, 32], seed=i), k + ".up.weight": T([32, 4], seed=i + 5)})
    case("pkg_old_diffusers", "UNKNOWN_FORMAT", {"pytorch_lora_weights.safetensors": st(old)}, also=["MISSING_CONFIG", "MISSING_WEIGHTS"], note="key names of an early image library, no config, alpha unknown")
