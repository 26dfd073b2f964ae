"""Adapters whose config, tensors and base do not fit together, or that do nothing."""

from __future__ import annotations

from corpus.bad.building import PRE, Q0, T, case, config, files, lora, on, pack, pairs, st, values

A, B = ".lora_A.weight", ".lora_B.weight"


def s(t, **kw):
    return files(cfg=config(**kw), weights=st(t))


def semantic_cases():
    base_cases()
    shape_and_rank_cases()
    missing_and_foreign_cases()
    empty_and_odd_shape_cases()
    value_cases()
    dtype_cases()
    name_cases()
    smuggled_cases()
    no_effect_cases()
    other_base_cases()


def base_cases():
    case("sem_wrong_base_name", "BASE_MISMATCH", files(cfg=config(base_model_name_or_path="corpus/tiny-mistral")))
    case("sem_wrong_revision", "BASE_REVISION_MISMATCH", files(cfg=config(revision="0" * 40)), also=["BASE_MISMATCH"])
    case("sem_revision_is_branch", "BASE_REVISION_MISMATCH", files(cfg=config(revision="main")), verdict="warn", also=["BASE_MISMATCH"], note="a moving name; cannot be checked")


def shape_and_rank_cases():
    t = lora()
    t[Q0 + A] = T([4, 64], seed=1)
    case("sem_wrong_in_width", "SHAPE_MISMATCH", s(t))
    t = lora()
    t[Q0 + B] = T([64, 4], seed=1)
    case("sem_wrong_out_width", "SHAPE_MISMATCH", s(t))
    t = {k: T(v.shape[::-1], seed=2) for k, v in lora().items()}
    case("sem_transposed", "SHAPE_MISMATCH", s(t), also=["RANK_MISMATCH"], note="MLX orientation under PEFT names")
    t = lora(targets=("self_attn.q_proj", "self_attn.o_proj"), r=32)
    t = {k: T([32, 32], seed=2) for k in t}
    case("sem_square_ambiguous", "RANK_MISMATCH", s(t, target_modules=["q_proj", "o_proj"]), also=["SHAPE_MISMATCH"], note="all matrices 32x32, config says r=4: orientation cannot be seen from shapes")
    case("sem_config_rank_differs", "RANK_MISMATCH", s(lora(r=8)), note="config r=4, tensors 8: wrong scale by 2 if the config is believed")
    t = lora()
    t[Q0 + B] = T([32, 2], seed=1)
    case("sem_a_b_rank_differ", "RANK_MISMATCH", s(t), also=["SHAPE_MISMATCH"])
    case("sem_rank_pattern_disagree", "RANK_MISMATCH", s(lora(), rank_pattern={"v_proj": 8}))
    case("sem_rank_pattern_unused", "CONFIG_TENSOR_DISAGREE", s(lora(), alpha_pattern={"qproj": 800}), verdict="warn", also=["CONFIG_BAD_VALUE"], note="a pattern that matches no module; PEFT says nothing")
    big = lora(targets=("self_attn.q_proj",), layers=(0,), r=4096, dtype="F16")
    case("sem_rank_too_large", "RANK_TOO_LARGE", s(big, r=4096, target_modules=["q_proj"], layers_to_transform=[0]), also=["QUOTA_EXCEEDED"])


def missing_and_foreign_cases():
    t = lora()
    t.pop(Q0 + B)
    case("sem_missing_b", "MISSING_TENSOR", s(t))
    t = lora()
    t.pop(Q0 + A)
    case("sem_missing_a", "MISSING_TENSOR", s(t))
    case("sem_missing_layer", "MISSING_TENSOR", s(lora(layers=(0,))), also=["CONFIG_TENSOR_DISAGREE"], note="config covers two layers, the file has one; PEFT only warns")
    case("sem_missing_target", "MISSING_TENSOR", s(lora(targets=("self_attn.q_proj",))), also=["CONFIG_TENSOR_DISAGREE"])
    case("sem_untargeted_tensors", "CONFIG_TENSOR_DISAGREE", s(lora(targets=("self_attn.q_proj", "self_attn.v_proj", "self_attn.k_proj"))), also=["UNKNOWN_KEY"], note="k_proj tensors, k_proj not in the config: PEFT drops them")
    case("sem_unknown_module", "UNKNOWN_MODULE", s(lora(targets=("self_attn.q_proj", "self_attn.x_proj")), target_modules=["q_proj", "x_proj"]))
    case("sem_layer_out_of_range", "UNKNOWN_MODULE", s(lora(layers=(0, 1, 7))), also=["CONFIG_TENSOR_DISAGREE"])
    case("sem_layer_leading_zero", "UNKNOWN_MODULE", s({k.replace("layers.1", "layers.01"): v for k, v in lora().items()}), also=["UNKNOWN_KEY", "MISSING_TENSOR"], note="int('01') is 1")
    case("sem_layer_unicode_digit", "ST_BAD_NAME", s({k.replace("layers.1", "layers.\u0661"): v for k, v in lora().items()}), also=["UNKNOWN_KEY", "UNKNOWN_MODULE", "MISSING_TENSOR"], note="Arabic-Indic digit: \\d and int() take it")


def empty_and_odd_shape_cases():
    case("sem_empty_state_dict", "EMPTY_ADAPTER", files(weights=st({})), also=["MISSING_TENSOR"], note="40-byte file, as written under ZeRO-3")
    case("sem_zero3_empty_tensors", "EMPTY_TENSOR", s({k: T([0], raw=b"") for k in lora()}), also=["SHAPE_MISMATCH"])
    case("sem_zero_rank_tensors", "RANK_ZERO", s({k: (T([0, v.shape[1]], raw=b"") if "lora_A" in k else T([v.shape[0], 0], raw=b"")) for k, v in lora().items()}), also=["EMPTY_TENSOR", "RANK_MISMATCH", "SHAPE_MISMATCH"])
    case("sem_1d_tensors", "SHAPE_MISMATCH", s({k: T([v.shape[0] * v.shape[1]], seed=2) for k, v in lora().items()}))
    case("sem_3d_tensors", "SHAPE_MISMATCH", s({k: T([1] + v.shape, seed=2) for k, v in lora().items()}))
    case("sem_scalar_tensor", "SHAPE_MISMATCH", s({**lora(), Q0 + A: T([], seed=2)}), also=["RANK_MISMATCH"])


def value_cases():
    case("sem_all_zero_b", "ZERO_DELTA", s({k: (T(v.shape, vals=[0.0] * (v.shape[0] * v.shape[1])) if "lora_B" in k else v) for k, v in lora().items()}), also=["EMPTY_ADAPTER"], note="never trained, or saved from the wrong object; a warning only where the uploader allows it by name")
    t = lora()
    t[Q0 + B] = T([32, 4], vals=[0.0] * 128)
    case("sem_one_zero_b", "ZERO_DELTA", s(t), verdict="warn")
    t = lora()
    t[Q0 + B] = T([32, 4], vals=[-0.0] * 128)
    case("sem_negative_zero_b", "ZERO_DELTA", s(t), verdict="warn", note="byte test for zero misses it")
    for tag, bad in (("nan", float("nan")), ("inf", float("inf")), ("neg_inf", float("-inf"))):
        t = lora()
        v = values(128, 6)
        v[77] = bad
        t[Q0 + B] = T([32, 4], vals=v)
        case(f"sem_{tag}", "NONFINITE", s(t))
    t = lora(dtype="BF16")
    t[Q0 + B] = T([32, 4], "BF16", raw=b"\xc0\x7f" + T([32, 4], "BF16", seed=1).raw[2:])
    case("sem_nan_bf16", "NONFINITE", s(t), note="one NaN in the first element, bf16")
    t = lora(dtype="F16")
    t[Q0 + A] = T([4, 32], "F16", raw=T([4, 32], "F16", seed=1).raw[:-2] + b"\x00\x7c")
    case("sem_inf_f16", "NONFINITE", s(t), note="last element")
    t = lora()
    t[Q0 + B] = T([32, 4], vals=[1e30] * 128)
    case("sem_overflows_f16", "SCALE_SUSPECT", s(t), verdict="warn", also=["NONFINITE", "DTYPE_RANGE"], note="finite in float32, infinite once cast to the serving dtype")
    t = {k: T(v.shape, raw=b"".join(v.raw[i:i + 4][::-1] for i in range(0, len(v.raw), 4))) for k, v in lora().items()}
    case("sem_byteswapped", "SCALE_SUSPECT", s(t), verdict="warn", also=["NONFINITE", "DTYPE_RANGE"], note="big-endian data")


def dtype_cases():
    for dt in ("I8", "F8_E4M3", "BOOL", "I64"):
        case(f"sem_dtype_{dt.lower()}", "DTYPE_UNSUPPORTED", s(lora(dtype=dt)))
    case("sem_dtype_f64", "DTYPE_UNSUPPORTED", s(lora(dtype="F64")), verdict="warn", note="may be cast down; say so. Rejecting is fine too")
    t = lora()
    t.update({k: T(v.shape, "BF16", seed=3) for k, v in t.items() if "lora_B" in k})
    case("sem_mixed_dtypes", "DTYPE_MIXED", s(t), verdict="warn")


def name_cases():
    t = {k.replace(PRE, PRE + PRE): v for k, v in lora().items()}
    case("sem_double_prefix", "KEY_PREFIX", s(t), also=["UNKNOWN_KEY", "UNKNOWN_MODULE"], note="PEFT matches nothing, warns only")
    case("sem_no_prefix", "KEY_PREFIX", s(lora(prefix="")), also=["UNKNOWN_KEY", "UNKNOWN_MODULE"])
    case("sem_orig_mod_prefix", "KEY_PREFIX", s(lora(prefix="_orig_mod." + PRE)), also=["UNKNOWN_KEY", "UNKNOWN_MODULE"], note="torch.compile wrapper")
    case("sem_ddp_prefix", "KEY_PREFIX", s(lora(prefix="module." + PRE)), also=["UNKNOWN_KEY", "UNKNOWN_MODULE"])
    case("sem_language_model_prefix", "UNKNOWN_MODULE", s(lora(root="model.language_model.layers.")), also=["KEY_PREFIX", "UNKNOWN_KEY"], note="trained on the multimodal wrapper")
    case("sem_missing_model_level", "UNKNOWN_MODULE", s(lora(root="layers.")), also=["KEY_PREFIX", "UNKNOWN_KEY"], note="trained on the headless model")
    case("sem_default_in_key", "UNKNOWN_KEY", s(lora(a=".lora_A.default.weight", b=".lora_B.default.weight")), also=["KEY_PREFIX"], note="raw state dict of the wrapped model; may be normalised with a warning")
    case("sem_no_weight_suffix", "UNKNOWN_KEY", s(lora(a=".lora_A", b=".lora_B")), note="AdaLoRA or hand-made")
    case("sem_up_down_names", "UNKNOWN_KEY", s(lora(a=".lora_down.weight", b=".lora_up.weight")), also=["UNKNOWN_FORMAT"])
    t = {**lora(a=".lora_A.one.weight", b=".lora_B.one.weight"), **lora(a=".lora_A.two.weight", b=".lora_B.two.weight")}
    case("sem_two_adapters_one_file", "UNKNOWN_KEY", s(t), also=["DUPLICATE_LOGICAL_KEY"])
    t = {**lora(), Q0 + ".lora_A.default.weight": T([4, 32], seed=99)}
    case("sem_duplicate_logical_key", "DUPLICATE_LOGICAL_KEY", s(t), also=["UNKNOWN_KEY"], note="two spellings of one tensor")
    t = {**lora(), Q0.replace("q_proj", "Q_Proj") + A: T([4, 32], seed=99), Q0.replace("q_proj", "Q_Proj") + B: T([32, 4], seed=98)}
    case("sem_case_variant", "UNKNOWN_MODULE", s(t), also=["UNKNOWN_KEY", "CONFIG_TENSOR_DISAGREE"])
    t = {**lora(), **{f"{PRE}model.layers.{i}.self_attn.q_proj.alpha": T([], vals=[1.0]) for i in (0, 1)}}
    case("sem_alpha_tensors", "UNKNOWN_KEY", s(t), also=["CONFIG_TENSOR_DISAGREE"], note="per-module alpha of 1 against lora_alpha 8")
    t = {}
    for i in (0, 1):
        t[f"{PRE}model.layers.{i}.self_attn.qkv_proj{A}"] = T([4, 32], seed=i)
        t[f"{PRE}model.layers.{i}.self_attn.qkv_proj{B}"] = T([64, 4], seed=i + 5)
    case("sem_fused_on_split_base", "UNKNOWN_MODULE", s(t, target_modules=["qkv_proj"]))


def smuggled_cases():
    t = {**lora(), f"{PRE}model.layers.0.self_attn.q_proj.weight": T([32, 32], seed=3)}
    case("sem_full_weight_smuggled", "UNKNOWN_KEY", s(t), also=["CONFIG_TENSOR_DISAGREE"], note="a whole base matrix rides along")
    t = {**lora(), f"{PRE}model.layers.0.self_attn.q_proj.base_layer.weight": T([32, 32], seed=3)}
    case("sem_base_layer_smuggled", "UNKNOWN_KEY", s(t), also=["CONFIG_TENSOR_DISAGREE", "UNSUPPORTED_FEATURE"], note="PEFT would overwrite the base weight with it")
    t = {**lora(), f"{PRE}model.norm.weight": T([32], seed=3)}
    case("sem_norm_weight_smuggled", "UNKNOWN_KEY", s(t), also=["CONFIG_TENSOR_DISAGREE"], note="PEFT loads it into the base without a word")
    t = {**lora(), f"{PRE}model.embed_tokens.lora_embedding_A": T([4, 128], seed=1), f"{PRE}model.embed_tokens.lora_embedding_B": T([32, 4], seed=2)}
    case("sem_vocab_mismatch", "SHAPE_MISMATCH", s(t, target_modules=["q_proj", "v_proj", "embed_tokens"]), also=["UNSUPPORTED_FEATURE"], note="trained with a resized vocabulary (128 against 96)")
    t = {**lora(), f"{PRE}lm_head.weight": T([104, 32], seed=1)}
    case("sem_resized_head_saved", "UNKNOWN_KEY", s(t), also=["UNSUPPORTED_FEATURE", "SHAPE_MISMATCH", "CONFIG_TENSOR_DISAGREE"], note="auto-saved because tokens were added; the config does not say so")


def no_effect_cases():
    t = lora()
    for k, v in t.items():       # A lives in the first two ranks, B in the last two
        n = v.shape[1] if A in k else v.shape[0]
        x = values(2 * n, len(k) + n)
        v.raw = pack(x + [0.0] * (2 * n) if A in k else [c for i in range(n) for c in (0.0, 0.0, x[2 * i], x[2 * i + 1])], "F32")
    case("sem_product_zero", "ZERO_DELTA", s(t), also=["EMPTY_ADAPTER"], note="neither A nor B is zero, B*A is, exactly, in every module; a warning only where the uploader allows it by name")
    t = {k: T(v.shape, vals=[x * 1e-25 for x in values(v.shape[0] * v.shape[1], 4)]) for k, v in lora().items()}
    case("sem_product_underflows", "ZERO_DELTA", s(t), verdict="warn", also=["SCALE_SUSPECT", "DTYPE_RANGE"], note="both factors are ordinary float32, about 1e-26; their product is 0 in float32; rejecting is fine too")


def other_base_cases():
    case("sem_target_case_folded", "CONFIG_TENSOR_DISAGREE", s(lora(), target_modules=["q_proj", "V_proj"]), also=["UNKNOWN_KEY"], note="target V_proj, tensors v_proj: they agree only for a reader that folds case; PEFT drops v_proj")
    t = {k.replace("q_proj", "query").replace("v_proj", "value"): v for k, v in lora().items()}
    case("sem_renamed_modules", "UNKNOWN_MODULE", s(t, target_modules=["query", "value"]), note="another library version calls them so, shapes fit; name the near ones (q_proj, v_proj)")
    enc = [f"encoder.layer.{i}.attention.self.{n}" for i in (0, 1) for n in ("query", "value")]
    case("sem_bare_encoder_prefix", "UNKNOWN_MODULE", s(pairs(enc), target_modules=["query", "value"], task_type="FEATURE_EXTRACTION", **on("bert")),
         also=["KEY_PREFIX", "UNKNOWN_KEY"], base="corpus/tiny-bert", note="trained on the encoder alone; under this base's head the names start at bert.encoder.")
    case("sem_head_never_saved", "CONFIG_TENSOR_DISAGREE", s(pairs(["bert." + n for n in enc]), target_modules=["query", "value"], task_type="SEQ_CLS", **on("bert")), verdict="warn",
         also=["UNSUPPORTED_FEATURE", "MISSING_TENSOR"], base="corpus/tiny-bert", note="a classification task, modules_to_save null and no head in the file: the classifier that it was trained with is lost; rejecting is fine too")
    t = {**pairs([f"transformer.h.{i}.attn.c_attn" for i in (0, 1)], (96, 32)), f"{PRE}score.weight": T([3, 32], seed=5)}
    case("sem_head_base_lacks", "UNSUPPORTED_FEATURE", s(t, target_modules=["c_attn"], task_type="SEQ_CLS", fan_in_fan_out=True, **on("gpt2")),
         also=["UNKNOWN_KEY", "UNKNOWN_MODULE", "CONFIG_TENSOR_DISAGREE"], base="corpus/tiny-gpt2", note="score.weight of a classifier, config silent, and the base is the language model of the same name")
    case("sem_encoder_half_only", "MISSING_TENSOR", s(pairs([f"encoder.block.{i}.layer.0.SelfAttention.{n}" for i in (0, 1) for n in "qv"]),
         target_modules=["q", "v"], task_type="SEQ_2_SEQ_LM", **on("t5")), also=["CONFIG_TENSOR_DISAGREE"], base="corpus/tiny-t5", note="blocks 0 and 1 are there, but of the encoder; the decoder's are missing, and a count by layer number does not see it")
    case("sem_declared_hash_differs", "HASH_MISMATCH", files(), declared_sha256={"adapter_model.safetensors": "00" * 32})
