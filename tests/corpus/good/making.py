"""One case: trained, saved by PEFT, read back by PEFT, and what that computes."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from pathlib import Path

import corpus.good.quiet  # noqa: F401, I001 - before all that it keeps quiet
import peft
import safetensors
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from corpus.good.bases import DTYPES, base_revision, build_base, write_base
from corpus.good.edits import edit_config
from corpus.good.filling import fill_adapter, fill_cancelling
from corpus.good.references import fixed_ids, merged_difference, module_reference, run_model, stats


def write_legacy_mixtral(dst: Path, spec, seed):
    """The layout that older transformers gave: one pair per expert and projection."""
    base = build_base("mixtral")
    cfg, r = base.config, spec["cfg"]["r"]
    head_dim = getattr(cfg, "head_dim", None) or cfg.hidden_size // cfg.num_attention_heads
    gen = torch.Generator().manual_seed(seed)
    t = {}

    def pair(name, n_in, n_out):
        t[f"base_model.model.{name}.lora_A.weight"] = torch.randn(r, n_in, generator=gen) * 0.2
        t[f"base_model.model.{name}.lora_B.weight"] = torch.randn(n_out, r, generator=gen) * 0.2
    for i in range(cfg.num_hidden_layers):
        pair(f"model.layers.{i}.self_attn.q_proj", cfg.hidden_size, cfg.num_attention_heads * head_dim)
        for e in range(cfg.num_local_experts):
            p = f"model.layers.{i}.block_sparse_moe.experts.{e}"
            pair(f"{p}.w1", cfg.hidden_size, cfg.intermediate_size)
            pair(f"{p}.w3", cfg.hidden_size, cfg.intermediate_size)
            pair(f"{p}.w2", cfg.intermediate_size, cfg.hidden_size)
    dst.mkdir(parents=True, exist_ok=True)
    save_file(t, str(dst / "adapter_model.safetensors"), metadata={"format": "pt"})
    c = LoraConfig(**spec["cfg"], base_model_name_or_path="corpus/tiny-mixtral",
                   revision=base_revision("mixtral"), inference_mode=True).to_dict()
    c = {k: (sorted(v) if isinstance(v, set) else v) for k, v in c.items()}
    c["peft_type"], c["task_type"] = "LORA", "CAUSAL_LM"
    (dst / "adapter_config.json").write_text(json.dumps(c, indent=2, sort_keys=True))


def make_case(name, spec, root: Path):
    """Train, edit, load again with PEFT, and write down what came out."""
    write_base(spec["base"], root)
    d = root / "good" / name
    shutil.rmtree(d, ignore_errors=True)
    aname = spec.get("adapter_name", "default")
    trained_logits = train(spec, 1000 + sum(map(ord, spec.get("same_bytes_as", name))), d / "adapter", aname)
    load_dir = d / "adapter" / aname if aname != "default" else d / "adapter"
    edit(spec, load_dir)
    exp, tensors = expectation(name, spec, d, load_dir, aname)
    if trained_logits is not None and "other" not in spec:
        change = (tensors["logits.adapter"] - trained_logits).abs().max()
        exp["logits"]["reload_vs_training_max_abs"] = float(change)
    (d / "expected.json").write_text(json.dumps(exp, indent=1))
    save_file(tensors, str(d / "expected.safetensors"))
    return exp


def train(spec, seed, adapter_dir: Path, aname):
    """Write the adapter as PEFT does; its outputs in training, where they are to be compared."""
    if spec.get("legacy_mixtral"):
        write_legacy_mixtral(adapter_dir, spec, seed)
        return None
    model = build_base(spec["base"]).to(DTYPES[spec.get("base_dtype", "F32")])
    if "other" in spec:
        cls, kw = spec["other"]
        cfg = getattr(peft, cls)(**kw)
    else:
        cfg = LoraConfig(**spec["cfg"])
    pm = get_peft_model(model, cfg, adapter_name=aname, revision=base_revision(spec["base"])).eval()
    if spec.get("fill") == "cancelling":
        fill_cancelling(pm, seed)
    else:
        fill_adapter(pm, seed, **spec.get("fill", {}))
    if spec.get("dtype"):
        for n, p in pm.named_parameters():
            if "lora_" in n:
                p.data = p.data.to(DTYPES[spec["dtype"]])
    trained_logits = None
    if "other" not in spec and not spec.get("dtype"):
        trained_logits = run_model(pm)
    pm.save_pretrained(str(adapter_dir), safe_serialization=True)
    (adapter_dir / "README.md").unlink(missing_ok=True)
    sub = adapter_dir / aname
    if aname != "default" and sub.exists():
        (sub / "README.md").unlink(missing_ok=True)
    return trained_logits


def edit(spec, load_dir: Path):
    cfg_path = load_dir / "adapter_config.json"
    if spec.get("edit"):
        c = json.loads(cfg_path.read_text())
        cfg_path.write_text(json.dumps(edit_config(spec["edit"], c), indent=2))
    for extra, text in spec.get("files", {}).items():
        (load_dir / extra).write_text(text)


def expectation(name, spec, d: Path, load_dir: Path, aname):
    """What expected.json says, and the tensors beside it, by PEFT over a fresh base."""
    base_name, base_dtype = spec["base"], DTYPES[spec.get("base_dtype", "F32")]
    weights = load_file(str(load_dir / "adapter_model.safetensors"))
    fresh = build_base(base_name).to(base_dtype)
    base_logits = run_model(fresh)
    pm = PeftModel.from_pretrained(fresh, str(load_dir), adapter_name=aname).eval()
    logits = run_model(pm)
    tensors = {"input_ids": fixed_ids(), "logits.base": base_logits.contiguous(), "logits.adapter": logits.contiguous()}
    mods = [] if "other" in spec else module_reference(pm, aname, tensors)
    exp = {
        "case": name, "base": base_name, "base_model": f"corpus/tiny-{base_name}",
        "base_revision": base_revision(base_name), "base_dtype": spec.get("base_dtype", "F32"),
        "verdict": spec["verdict"], "warn_codes": spec.get("warn_codes", []),
        "features": spec["features"], "note": spec["note"],
        "peft_type": json.loads((load_dir / "adapter_config.json").read_text())["peft_type"],
        "adapter_path": str(load_dir.relative_to(d)),
        "versions": {"peft": peft.__version__, "transformers": transformers.__version__,
                     "torch": torch.__version__.split("+")[0], "safetensors": safetensors.__version__},
        "sha256": {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(load_dir.iterdir()) if p.is_file()},
        "tensor_index": {k: {"dtype": str(v.dtype).replace("torch.", ""), "shape": list(v.shape)}
                         for k, v in sorted(weights.items())},
        "non_lora_keys": sorted(k for k in weights if ".lora_" not in k),
        "modules": mods,
        "logits": {"base": stats(base_logits), "adapter": stats(logits),
                   "max_abs_change": float((logits - base_logits).abs().max()),
                   "tolerance": spec.get("tolerance", 2e-2 if spec.get("base_dtype") else 1e-4)},
    }
    if "same_bytes_as" in spec:
        exp["same_bytes_as"] = spec["same_bytes_as"]
    if "other" not in spec and base_dtype == torch.float32:
        exp["logits"]["plain_lora_max_abs"] = merged_difference(base_name, pm, aname, logits)
    return exp, tensors


def self_check(exp, spec):
    """Facts that must hold, so that a silent change in PEFT shows up here."""
    assert exp["logits"]["max_abs_change"] > 1e-3, "adapter has no effect"
    assert exp["logits"]["max_abs_change"] > 5 * exp["logits"]["tolerance"] or spec.get("base_dtype"), "tolerance hides the effect"
    assert math.isfinite(exp["logits"]["adapter"]["sum"])
    rl = exp["logits"].get("reload_vs_training_max_abs")
    if rl is not None and not spec.get("base_dtype") and "alora" not in spec["features"]:
        if spec.get("roundtrip_differs"):
            assert rl > 1e-3, "expected a different result after reload"
        else:
            assert rl < 1e-3, f"reload differs by {rl}"
    plain = exp["logits"].get("plain_lora_max_abs")
    if plain is not None:
        if spec["verdict"].startswith("accept"):
            assert plain < 2e-3, f"plain LoRA differs from PEFT by {plain}"
        elif not set(spec["features"]) & {"lm_head_lora"}:
            assert plain > 1e-3, "plain LoRA would be enough here"
    for m in exp["modules"]:
        want = m["alpha"] / (math.sqrt(m["r"]) if m["use_rslora"] else m["r"])
        assert abs(m["scale"] - want) < 1e-9, m
        if m["kind"] in ("linear", "conv1d") and spec["verdict"].startswith("accept"):
            assert m["plain_lora_matches_peft"], m["module"]
