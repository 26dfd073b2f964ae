"""What malformed packages are built of: tensors, headers, configs, archives; and the list of cases."""

from __future__ import annotations

import hashlib
import io
import json
import random
import stat
import struct
import tarfile
import warnings
import zipfile

BASE = {  # the same tiny llama that make_good.py builds
    "base_model": "corpus/tiny-llama", "revision": hashlib.sha1(b"tiny-llama-seed7").hexdigest(),
    "dtype": "F32", "num_layers": 2, "vocab_size": 96, "hidden_size": 32,
    "modules": {"self_attn.q_proj": [32, 32], "self_attn.k_proj": [16, 32], "self_attn.v_proj": [16, 32],
                "self_attn.o_proj": [32, 32], "mlp.gate_proj": [64, 32], "mlp.up_proj": [64, 32],
                "mlp.down_proj": [32, 64]},  # [out, in]
}
# Limits that the quota cases are written against; a service may be stricter.
LIMITS = {"max_rank": 512, "max_tensors": 20000, "max_header_bytes": 4 << 20, "max_config_bytes": 1 << 20,
          "max_json_depth": 64, "max_name_bytes": 512, "max_archive_entries": 1000,
          "max_unpacked_bytes": 32 << 20, "max_metadata_bytes": 65536}
PRE = "base_model.model."
SIZES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1}


def values(n, seed, std=0.2):
    rnd = random.Random(seed)
    return [rnd.gauss(0, std) for _ in range(n)]


def pack(vals, dtype):
    n = len(vals)
    if dtype == "F32":
        return struct.pack(f"<{n}f", *vals)
    if dtype == "F64":
        return struct.pack(f"<{n}d", *vals)
    if dtype == "F16":
        return struct.pack(f"<{n}e", *vals)
    if dtype == "BF16":
        return b"".join(struct.pack("<f", v)[2:] for v in vals)
    if dtype in ("I8", "U8", "BOOL", "F8_E4M3"):
        return bytes((int(abs(v) * 50) % (2 if dtype == "BOOL" else 100)) for v in vals)
    return struct.pack(f"<{n}{'q' if dtype == 'I64' else 'i'}", *[int(v * 10) for v in vals])


class T:
    """One tensor; offsets are filled in by st() unless given."""

    def __init__(self, shape, dtype="F32", seed=1, vals=None, raw=None, offsets=None, info=None):
        self.shape, self.dtype, self.offsets, self.info = list(shape), dtype, offsets, info
        n = 1
        for s in self.shape:
            n *= s
        self.raw = raw if raw is not None else pack(vals if vals is not None else values(n, seed), dtype)


def frame(header: bytes, data: bytes, length=None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def st(tensors, metadata={"format": "pt"}, tail=b"", pad=True):  # noqa: B006
    items = list(tensors.items()) if isinstance(tensors, dict) else list(tensors)
    parts, pos, blob = [], 0, b""
    if metadata is not None:
        parts.append('"__metadata__":' + json.dumps(metadata))
    for name, t in items:
        off = t.offsets or [pos, pos + len(t.raw)]
        info = t.info or {"dtype": t.dtype, "shape": t.shape, "data_offsets": off}
        parts.append(json.dumps(name, ensure_ascii=False) + ":" + json.dumps(info))
        pos += len(t.raw)
        blob += t.raw
    h = ("{" + ",".join(parts) + "}").encode()
    if pad:
        h += b" " * (-len(h) % 8)
    return frame(h, blob + tail)


def lora(targets=("self_attn.q_proj", "self_attn.v_proj"), layers=(0, 1), r=4, dtype="F32", prefix=PRE,
         a=".lora_A.weight", b=".lora_B.weight", root="model.layers."):
    out = {}
    for i in layers:
        for t in targets:
            o, n = BASE["modules"].get(t, [32, 32])
            k = f"{prefix}{root}{i}.{t}"
            s = i * 100 + sum(map(ord, t))
            out[k + a] = T([r, n], dtype, seed=s)
            out[k + b] = T([o, r], dtype, seed=s + 1)
    return out


def pairs(names, shape=(32, 32), r=4):
    """A/B pairs under full module names, for bases other than the tiny llama; shape is [out, in]."""
    out = {}
    for n in names:
        s = sum(map(ord, n))
        out[f"{PRE}{n}.lora_A.weight"] = T([r, shape[1]], seed=s)
        out[f"{PRE}{n}.lora_B.weight"] = T([shape[0], r], seed=s + 1)
    return out


def on(base):
    """Config fields that name another base of make_good.py."""
    return {"base_model_name_or_path": f"corpus/tiny-{base}", "revision": hashlib.sha1(f"tiny-{base}-seed7".encode()).hexdigest()}


def config(**over):
    c = {"alpha_pattern": {}, "auto_mapping": None, "base_model_name_or_path": BASE["base_model"], "bias": "none",
         "fan_in_fan_out": False, "inference_mode": True, "init_lora_weights": True, "layers_pattern": None,
         "layers_to_transform": None, "lora_alpha": 8, "lora_bias": False, "lora_dropout": 0.0,
         "modules_to_save": None, "peft_type": "LORA", "peft_version": "0.21.2", "r": 4, "rank_pattern": {},
         "revision": BASE["revision"], "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM",
         "use_dora": False, "use_rslora": False}
    for k, v in over.items():
        if v is ...:
            c.pop(k, None)
        else:
            c[k] = v
    return json.dumps(c, indent=2, sort_keys=True).encode()


def files(cfg=None, weights=None, **more):
    f = {"adapter_config.json": cfg if cfg is not None else config(),
         "adapter_model.safetensors": weights if weights is not None else st(lora())}
    f.update(more)
    return {k: v for k, v in f.items() if v is not ...}


class Canary:
    """Unpickling this sets ADAPTER_CORPUS_CANARY; a loader that does so has failed."""

    def __reduce__(self):
        return (exec, ("import os; os.environ['ADAPTER_CORPUS_CANARY'] = 'unpickled'",))


def evil_pickle():
    import pickle
    return pickle.dumps({PRE + "model.layers.0.self_attn.q_proj.lora_A.weight": Canary()}, protocol=2)


def zip_bytes(entries, compress=zipfile.ZIP_DEFLATED):
    """entries: (name, data, unix mode or None)"""
    buf = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with zipfile.ZipFile(buf, "w", compress) as z:
            for name, data, *mode in entries:
                zi = zipfile.ZipInfo("x", (2020, 1, 1, 0, 0, 0))
                zi.filename, zi.compress_type, zi.create_system = name, compress, 3
                zi.external_attr = (mode[0] if mode and mode[0] else stat.S_IFREG | 0o644) << 16
                z.writestr(zi, data)
    return buf.getvalue()


def tar_bytes(members, gz=False):
    buf = io.BytesIO()
    with tarfile.open(fileobj=buf, mode="w", format=tarfile.PAX_FORMAT) as t:
        for m in members:
            name, data = m[0], m[1]
            ti = tarfile.TarInfo(name)
            ti.mtime = 1577836800
            for k, v in (m[2] if len(m) > 2 else {}).items():
                setattr(ti, k, v)
            ti.size = len(data) if data is not None else 0
            t.addfile(ti, io.BytesIO(data) if data is not None else None)
    raw = buf.getvalue()
    if gz:
        import gzip
        g = io.BytesIO()
        with gzip.GzipFile(fileobj=g, mode="wb", mtime=0) as f:
            f.write(raw)
        return g.getvalue()
    return raw


CASES = []


def case(cid, code, content, verdict="reject", stage=None, form="dir", note="", also=(), **extra):
    stage = stage or {"st": "tensor_file", "cfg": "config", "sem": "semantic", "pkg": "package",
                      "zip": "archive", "tar": "archive"}[cid.split("_")[0]]
    CASES.append(dict(id=cid, code=code, content=content, verdict=verdict, stage=stage, form=form, note=note,
                      also=list(also), **extra))


def w(raw, **kw):
    return files(weights=raw, **kw)


Q0 = PRE + "model.layers.0.self_attn.q_proj"
