"""Tiny base models of many architectures, with weights that are the same in every run."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import corpus.good.quiet  # noqa: F401, I001 - before all that it keeps quiet
import torch
import transformers
from safetensors.torch import load_file

VOCAB = 96
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _cfg(name, **kw):
    return getattr(transformers, name)(**kw)


_DECODER = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
                pad_token_id=0, bos_token_id=1, eos_token_id=2)


def base_specs():
    """name -> (config, model class name); dims are small and all different where it matters."""
    return {
        "llama": (_cfg("LlamaConfig", **_DECODER, tie_word_embeddings=False), "LlamaForCausalLM"),
        "llama4l": (_cfg("LlamaConfig", **{**_DECODER, "num_hidden_layers": 4}, tie_word_embeddings=False),
                    "LlamaForCausalLM"),
        "mistral": (_cfg("MistralConfig", **_DECODER, sliding_window=None), "MistralForCausalLM"),
        "qwen2": (_cfg("Qwen2Config", **_DECODER, tie_word_embeddings=True), "Qwen2ForCausalLM"),
        "qwen3": (_cfg("Qwen3Config", **_DECODER, head_dim=16), "Qwen3ForCausalLM"),
        "gemma2": (_cfg("Gemma2Config", **_DECODER, head_dim=8, query_pre_attn_scalar=8, sliding_window=16),
                   "Gemma2ForCausalLM"),
        "gemma3": (_cfg("Gemma3TextConfig", **_DECODER, head_dim=8, query_pre_attn_scalar=8, sliding_window=16),
                   "Gemma3ForCausalLM"),
        "phi3": (_cfg("Phi3Config", **_DECODER, original_max_position_embeddings=64), "Phi3ForCausalLM"),
        "gpt2": (_cfg("GPT2Config", vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64,
                      bos_token_id=1, eos_token_id=2), "GPT2LMHeadModel"),
        "opt": (_cfg("OPTConfig", vocab_size=VOCAB, hidden_size=32, ffn_dim=64, num_hidden_layers=2,
                     num_attention_heads=4, max_position_embeddings=64, word_embed_proj_dim=32,
                     pad_token_id=0, bos_token_id=1, eos_token_id=2), "OPTForCausalLM"),
        "falcon": (_cfg("FalconConfig", vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2,
                        num_attention_heads=4, bos_token_id=1, eos_token_id=2), "FalconForCausalLM"),
        "bert": (_cfg("BertConfig", vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                      num_attention_heads=4, max_position_embeddings=64, num_labels=3, pad_token_id=0),
                 "BertForSequenceClassification"),
        "qwen3moe": (_cfg("Qwen3MoeConfig", **_DECODER, head_dim=8, moe_intermediate_size=24, num_experts=4,
                          num_experts_per_tok=2, decoder_sparse_step=1, mlp_only_layers=[]),
                     "Qwen3MoeForCausalLM"),
        "mixtral": (_cfg("MixtralConfig", **{**_DECODER, "intermediate_size": 24}, num_local_experts=4,
                         num_experts_per_tok=2, sliding_window=None), "MixtralForCausalLM"),
        "t5": (_cfg("T5Config", vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=2,
                    num_heads=4, feed_forward_proj="gated-gelu", pad_token_id=0, eos_token_id=2,
                    decoder_start_token_id=0), "T5ForConditionalGeneration"),
        "distilbert": (_cfg("DistilBertConfig", vocab_size=VOCAB, dim=32, hidden_dim=64, n_layers=2, n_heads=4,
                            max_position_embeddings=64, num_labels=3, pad_token_id=0),
                       "DistilBertForSequenceClassification"),
        "bertbare": (_cfg("BertConfig", vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                          num_attention_heads=4, max_position_embeddings=64, pad_token_id=0), "BertModel"),
        "gpt2cls": (_cfg("GPT2Config", vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, num_labels=3,
                         pad_token_id=0, bos_token_id=1, eos_token_id=2), "GPT2ForSequenceClassification"),
    }


def build_base(name, seed=7):
    """A freshly initialised tiny model; weights are large enough for the adapter to matter."""
    config, cls = base_specs()[name]
    torch.manual_seed(seed)
    model = getattr(transformers, cls)(config).eval()
    gen = torch.Generator().manual_seed(seed + sum(map(ord, name)))
    with torch.no_grad():
        for _, p in model.named_parameters():
            if p.dim() >= 2:
                p.copy_(torch.randn(p.shape, generator=gen) * 0.15)
            elif p.abs().sum() == 0:
                p.copy_(torch.randn(p.shape, generator=gen) * 0.05)
    model.__dict__["name_or_path"] = f"corpus/tiny-{name}"
    return model


def base_revision(name):
    return hashlib.sha1(f"tiny-{name}-seed7".encode()).hexdigest()


def write_base(name, root: Path):
    d = root / "bases" / name
    if (d / "modules.json").exists():
        return
    d.mkdir(parents=True, exist_ok=True)
    model = build_base(name)
    model.save_pretrained(d)
    mods, params = {}, {}
    for n, m in model.named_modules():
        kind = type(m).__name__
        if isinstance(m, torch.nn.Linear):
            mods[n] = {"kind": "linear", "in": m.in_features, "out": m.out_features, "bias": m.bias is not None}
        elif kind == "Conv1D":
            mods[n] = {"kind": "conv1d", "in": m.weight.shape[0], "out": m.weight.shape[1], "bias": True}
        elif isinstance(m, torch.nn.Embedding):
            mods[n] = {"kind": "embedding", "num_embeddings": m.num_embeddings, "dim": m.embedding_dim}
    for n, p in model.named_parameters():
        if p.dim() == 3:
            params[n] = list(p.shape)
    weights = load_file(str(d / "model.safetensors"))
    info = {
        "base_model": f"corpus/tiny-{name}", "revision": base_revision(name), "dtype": "F32",
        "architecture": type(model).__name__, "model_type": model.config.model_type, "vocab_size": VOCAB,
        "tied_embeddings": bool(getattr(model.config, "tie_word_embeddings", False)),
        "modules": mods, "expert_parameters": params,
        "checkpoint_keys": sorted(weights),
        "sha256": hashlib.sha256((d / "model.safetensors").read_bytes()).hexdigest(),
    }
    (d / "modules.json").write_text(json.dumps(info, indent=1, sort_keys=True))
