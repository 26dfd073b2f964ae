"""The reader of `adapter_config.json`, and what is compiled from the config that it accepts."""

from __future__ import annotations

import json
import math

from adapterd.loader.errors import Refused
from adapterd.loader.formats.peft_config import PeftConfig, parse_config
from adapterd.loader.formats.targets import Scales, Targets
from adapterd.loader.limits import DEFAULT_LIMITS
from fakes.packages import peft_config, tiny_llama_spec
from fuzz.target import Defect, Target
from strategies.configs import FIELDS, config_files

MODULES = ("model.layers.0.self_attn.q_proj", "model.layers.11.mlp.experts.3.up_proj", "lm_head", "a" * 200)


def run(data: bytes) -> str:
    """A config or a refusal; a config must be usable without another one."""
    try:
        config, told = parse_config(data, DEFAULT_LIMITS)
    except Refused as refusal:
        if not all(p.where.isascii() and p.message.isprintable() for p in refusal.problems):
            raise Defect(f"a refusal that cannot be shown: {refusal!r}") from refusal
        return str(refusal.code)
    if any(p.severity != "warn" for p in told):
        raise Defect(f"accepted with {told}")
    if parse_config(data, DEFAULT_LIMITS) != (config, told):
        raise Defect("two readings differ")
    _must_be_usable(config)
    return "accepted with warnings" if told else "accepted"


def _must_be_usable(config: PeftConfig) -> None:
    """Refused here would be a rule that the reader forgot: it leaves as an error."""
    targets, scales = Targets(config), Scales(config)
    for module in MODULES:
        try:
            targets.covers(module)
            scale = scales.of(module)
        except Refused as refusal:
            raise Defect(f"accepted, but not usable: {refusal}") from refusal
        if not 1 <= scale.rank <= DEFAULT_LIMITS.max_rank or not math.isfinite(float(scale.alpha)):
            raise Defect(f"{scale} of {module}")
    if type(config.r) is not int or type(config.lora_alpha) is not float or not config.target_modules:
        raise Defect(f"loose types: {config}")


def seeds() -> dict[str, bytes]:
    """Small configs for atheris to start from."""
    plain = peft_config(tiny_llama_spec(), 4, 8, ["q_proj", "v_proj"])
    small = {k: plain[k] for k in ("peft_type", "base_model_name_or_path", "r", "lora_alpha", "target_modules")}
    changes = {
        "small": {},
        "regex": {"target_modules": r".*\.(q_proj|v_proj)"},
        "lookahead": {"target_modules": r"(?!.*mlp).*\.q_proj"},
        "patterns": {"rank_pattern": {r"layers\.0\..*q_proj": 2}, "alpha_pattern": {"v_proj": 4.5}},
        "layers": {"layers_to_transform": [0, 1], "layers_pattern": "layers"},
        "excluded": {"exclude_modules": ["lm_head"], "target_modules": "all-linear"},
        "dora": {"use_dora": True},
    }
    texts = {name: json.dumps(small | change).encode() for name, change in changes.items()}
    return {"plain": json.dumps(plain, indent=2).encode(), **texts}


TARGET = Target(
    "config",
    run,
    config_files(),
    ("adapterd.loader.formats",),
    (
        *(f'"{name}":'.encode() for name in FIELDS), b"(?!", b"(?:", b"{1,9}", b".*", b"\\\\.", b"[^a]", b"\\ud800",
        b"-0", b"1e400", b"null", b"true", b"NaN",
    ),
)  # fmt: skip
