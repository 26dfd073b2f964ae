"""What PEFT computes for fixed inputs: per module, and for the whole model."""

from __future__ import annotations

import corpus.good.quiet  # noqa: F401, I001 - before all that it keeps quiet
import torch
from peft.tuners.lora.layer import LoraLayer, ParamWrapper

from corpus.good.bases import VOCAB, build_base


def fixed_ids(batch=2, length=8):
    i = torch.arange(batch * length)
    return ((i * 7 + 3) % (VOCAB - 4) + 3).reshape(batch, length)


def fixed_x(n, rows=3):
    """x[i][j] = 0.5*sin(1 + i*n + j); can be rebuilt without a random generator."""
    k = torch.arange(rows * n, dtype=torch.float64)
    return (0.5 * torch.sin(1.0 + k)).reshape(rows, n).to(torch.float32)


def run_model(model):
    ids = fixed_ids()
    more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        out = model(input_ids=ids, attention_mask=torch.ones_like(ids), **more)
    logits = (out.logits if "logits" in out else out.last_hidden_state).float()   # a bare model has no head
    return logits[:, -ids.shape[1]:] if logits.dim() == 3 else logits   # drop virtual tokens


def stats(t):
    t = t.double()
    return {"shape": list(t.shape), "sum": float(t.sum()), "l2": float(t.norm()), "absmax": float(t.abs().max()),
            "first": [round(float(v), 7) for v in t.flatten()[:6]]}


def module_reference(pm, adapter, tensors):
    """One entry per adapted module, from PEFT's own layer objects."""
    out = []
    for full, m in pm.named_modules():
        if not isinstance(m, LoraLayer) or adapter not in m.r:
            continue
        name = full.removeprefix("base_model.model.")
        e = {"module": name, "layer_class": type(m).__name__, "r": m.r[adapter],
             "alpha": m.lora_alpha[adapter], "scale": m.scaling[adapter],
             "use_rslora": bool(m.use_rslora[adapter]), "use_dora": bool(m.use_dora[adapter])}
        with torch.no_grad():
            if isinstance(m, ParamWrapper):
                e["kind"], e["parameter"] = "expert_parameter", m.parameter_name
                e["num_experts"] = m.num_experts
                ref = m.get_delta_weight(adapter)
                a, b = m.lora_A[adapter].weight, m.lora_B[adapter].weight
            elif adapter in getattr(m, "lora_embedding_A", {}):
                e["kind"] = "embedding"
                a, b = m.lora_embedding_A[adapter], m.lora_embedding_B[adapter]
                idx = torch.arange(4)
                ref = m(idx) - m.get_base_layer()(idx)
            else:
                e["kind"] = "conv1d" if type(m.get_base_layer()).__name__ == "Conv1D" else "linear"
                a, b = m.lora_A[adapter].weight, m.lora_B[adapter].weight
                x = fixed_x(a.shape[1]).to(m.get_base_layer().weight.dtype)
                ref = m(x).float() - m.get_base_layer()(x).float()
                tol = 1e-4 if x.dtype == torch.float32 else 3e-2
                plain = m.scaling[adapter] * (x.double() @ a.double().T @ b.double().T)
                e["plain_lora_matches_peft"] = bool(torch.allclose(ref.double(), plain, atol=tol, rtol=tol))
                e["plain_delta"] = stats(plain)
        e["a_shape"], e["b_shape"] = list(a.shape), list(b.shape)
        e["reference"] = stats(ref)
        e["reference_tensor"] = f"module.{name}" + (f".{m.parameter_name}" if isinstance(m, ParamWrapper) else "")
        tensors[e["reference_tensor"]] = ref.float().contiguous().clone()
        out.append(e)
    return out


def merged_difference(base_name, pm, adapter, logits):
    """Largest logit difference between PEFT and `W + scale*B@A` on the untouched base.

    Small means that the A/B pairs of linear layers are all there is to the adapter.
    """
    fresh = build_base(base_name)
    with torch.no_grad():
        for full, m in pm.named_modules():
            if not isinstance(m, LoraLayer) or isinstance(m, ParamWrapper) or adapter not in m.lora_A:
                continue
            try:
                target = fresh.get_submodule(full.removeprefix("base_model.model."))
            except AttributeError:
                return None
            delta = m.scaling[adapter] * m.lora_B[adapter].weight.float() @ m.lora_A[adapter].weight.float()
            target.weight.data = target.weight.data + (delta.T if type(target).__name__ == "Conv1D" else delta)
    return float((run_model(fresh) - logits).abs().max())
