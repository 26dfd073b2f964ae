"""What the reference library and PEFT do with each case; information only, never the verdict."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path

from corpus.bad.building import BASE


def forked(fn, seconds=8):
    """Run fn in a child process with a time limit; returns its one-line answer."""
    r, wfd = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(r)
        signal.alarm(seconds)
        try:
            msg = fn()
        except BaseException as e:  # noqa: BLE001
            msg = f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
        os.write(wfd, msg[:300].encode())
        os._exit(0)
    os.close(wfd)
    out = b""
    while chunk := os.read(r, 4096):
        out += chunk
    os.close(r)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return f"killed by signal {os.WTERMSIG(status)} (time limit or crash)"
    return out.decode(errors="replace")


def probe(index, root: Path):
    """What the reference library and PEFT do; information only, never the verdict."""
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    import torch
    from peft import PeftModel
    from safetensors import safe_open
    from transformers import LlamaConfig, LlamaForCausalLM
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)            # a forked child must not wait for threads it does not have
    torch.set_num_interop_threads(1)
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
                                        tie_word_embeddings=False)).eval()
    ids = torch.arange(8).reshape(1, 8)
    before = {k: v.clone() for k, v in base.state_dict().items()}
    with torch.no_grad():
        ref = base(ids).logits

    def run_st(p):
        with safe_open(str(p), framework="pt") as f:
            n = len([f.get_tensor(k).shape for k in f.keys()])
        return f"loads {n} tensors"

    def run_peft(d):
        with warnings.catch_warnings(record=True) as ws:
            warnings.simplefilter("always")
            m = PeftModel.from_pretrained(base, str(d))
            with torch.no_grad():
                out = m(ids).logits
        eff = "no effect" if torch.equal(out, ref) else ("non-finite output" if not torch.isfinite(out).all() else "changes output")
        ws = [x for x in ws if "is_gradient_checkpointing" not in str(x.message)]
        state = m.base_model.model.state_dict()
        for k, v in before.items():
            k2 = k if k in state else k.replace(".weight", ".base_layer.weight")
            if k2 in state and not torch.equal(v, state[k2]):
                eff += f", OVERWRITES BASE {k}"
        note = "; warns: " + str(ws[0].message).splitlines()[0][:80] if ws else "; silent"
        return f"loads, {eff}{note}"
    for e in index:
        if e["form"] != "dir" or e.get("no_probe") or e["base"] != BASE["base_model"]:
            continue
        d = root / e["id"]
        sf = d / "adapter_model.safetensors"
        if e["stage"] == "tensor_file" and sf.is_file():
            e["safetensors_lib"] = forked(lambda: run_st(sf))
        if e["stage"] in ("config", "semantic"):
            e["peft"] = forked(lambda: run_peft(d))
