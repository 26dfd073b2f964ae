"""Quantised bases: which schemes are understood, and their weights as floats (I20).

What is understood is what was compared with another implementation: GPTQ of 4 and 8 bits and AWQ's GEMM layout
of 4 bits, by their own reference code; FP8 with block or tensor scales, by transformers. The rest is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from adapterd.loader.errors import AdapterdError, Code, error
from adapterd.loader.formats.text import shown
from adapterd.loader.merge.fp8 import Fp8
from adapterd.loader.merge.grouped import Grouped
from adapterd.loader.merge.matrices import Stored
from adapterd.loader.merge.packing import AWQ_ORDER, in_order

_LEADING = {"gptq": "qweight", "awq": "qweight", "fp8": "weight"}
_NEEDED = {
    "gptq": ("qweight", "qzeros", "scales"), "awq": ("qweight", "qzeros", "scales"),
    "fp8": ("weight", "weight_scale_inv"),
}  # fmt: skip
_OPTIONAL = {"gptq": ("g_idx",), "awq": (), "fp8": ()}
_PACKED_DTYPES = frozenset({"I32", "U32", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0"})
_KEYS = ("quantization_config", "compression_config")

Packed = Grouped | Fp8


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a base is quantised: the method's name, and what its config says."""

    method: str
    settings: Mapping[str, Any]

    @property
    def words(self) -> str:
        bits = self.settings.get("bits")
        return f"{self.method}, {bits} bits" if isinstance(bits, int) else self.method


def scheme_of(config: Mapping[str, Any]) -> Scheme | None:
    """What `config.json` says, or None for a base that is not quantised. Nothing is judged yet."""
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, dict) else {}):
        for key in _KEYS:
            if isinstance(settings := part.get(key), dict):
                method = str(settings.get("quant_method", "unknown")).lower()
                return Scheme(method if part is config and key == _KEYS[0] else f"{method} in {key}", settings)
    return None


def packed_weights(scheme: Scheme, tensors: Mapping[str, Stored]) -> dict[str, Packed]:
    """Every quantised weight of the base, by its module's path in the files.

    Raises:
        Refused: UNSUPPORTED_FEATURE for a scheme, or for tensors, that are not understood; SHAPE_MISMATCH.
    """
    if (why := not_understood(scheme)) is not None:
        raise unsupported(scheme, why)
    found = {}
    used: set[str] = set()
    for path in _paths(scheme.method, tensors):
        if _LEADING[scheme.method] != "weight" and f"{path}.weight" in tensors:
            raise unsupported(scheme, f"{shown(path)} with a second weight beside the packed one")
        parts = _parts(scheme, path, tensors)
        used |= {t.entry.name for t in parts.values()}
        found[path] = _weight(scheme, path, parts)
    for name, tensor in tensors.items():
        if name not in used and tensor.entry.dtype in _PACKED_DTYPES and tensor.entry.shape[1:]:
            raise unsupported(scheme, f"{shown(name)} is {tensor.entry.dtype} and no part of a weight that is known")
        if name not in used and name.rpartition(".")[2] in {"scales", "qzeros", "g_idx", "weight_scale_inv"}:
            raise unsupported(scheme, f"{shown(name)} belongs to no weight that is known")
    return found


def not_understood(scheme: Scheme) -> str | None:
    """The first thing about the scheme that is not understood here, or None."""
    s = scheme.settings
    if scheme.method == "gptq":
        layout = s.get("checkpoint_format", "gptq")
        return _first(
            (s.get("bits") not in (4, 8), f"{shown(s.get('bits'), 40)} bits"),
            (layout not in ("gptq", "gptq_v2"), f"the layout {shown(str(layout), 40)}"),
            (bool(s.get("is_marlin_format")), "the Marlin layout"),
            (s.get("pack_dtype", "int32") != "int32", "words that are not int32"),
            (bool(s.get("dynamic")), "settings that differ from module to module"),
        )
    if scheme.method == "awq":
        version = str(s.get("version", s.get("format", "gemm"))).lower()
        return _first(
            (s.get("bits", s.get("w_bit")) != 4, f"{shown(s.get('bits', s.get('w_bit')), 40)} bits"),
            (version != "gemm", f"the layout {shown(version, 40)}"),
            (s.get("backend", "autoawq") != "autoawq", f"the backend {shown(str(s.get('backend')), 40)}"),
            (s.get("zero_point", True) is not True, "weights without zero points"),
        )
    if scheme.method == "fp8":
        return _first(
            (s.get("activation_scheme", "dynamic") != "dynamic", "static scales of activations"),
            (s.get("fmt", "e4m3") != "e4m3", f"the format {shown(str(s.get('fmt')), 40)}"),
        )
    return "this method"


def _first(*rules: tuple[bool, str]) -> str | None:
    return next((words for broken, words in rules if broken), None)


def unsupported(scheme: Scheme, why: str) -> AdapterdError:
    """UNSUPPORTED_FEATURE, naming the scheme."""
    return error(
        Code.UNSUPPORTED_FEATURE, "config.json.quantization_config",
        f"the base is quantised ({shown(scheme.words, 60)}), and {why} is not understood here",
        "Merge into the model that it was quantised from, in bfloat16 or float32, and quantise that with its own tool.",
    )  # fmt: skip


def _paths(method: str, tensors: Mapping[str, Stored]) -> Iterator[str]:
    leading = _LEADING[method]
    for name, tensor in tensors.items():
        path, _, last = name.rpartition(".")
        if last == leading and tensor.entry.dtype in _PACKED_DTYPES:
            yield path


def _parts(scheme: Scheme, path: str, tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    parts = {}
    for part in (*_NEEDED[scheme.method], *_OPTIONAL[scheme.method]):
        tensor = tensors.get(f"{path}.{part}")
        if tensor is not None:
            parts[part] = tensor
        elif part in _NEEDED[scheme.method]:
            raise unsupported(scheme, f"{shown(path)} without {part}")
    return parts


def _weight(scheme: Scheme, path: str, parts: Mapping[str, Stored]) -> Packed:
    s = scheme.settings
    if scheme.method == "fp8":
        return Fp8.of(path, parts["weight"], parts["weight_scale_inv"], s.get("weight_block_size"))
    offset = 1 if scheme.method == "gptq" and s.get("checkpoint_format", "gptq") == "gptq" else 0
    order = in_order(int(s["bits"])) if scheme.method == "gptq" else AWQ_ORDER
    return Grouped.of(
        path, parts, order, _group_size(s), by_rows=scheme.method == "gptq", zero_offset=offset,
        symmetric=scheme.method == "gptq" and bool(s.get("sym", False)),
    )  # fmt: skip


def _group_size(settings: Mapping[str, Any]) -> int:
    size = settings.get("group_size", settings.get("q_group_size"))
    if type(size) is not int or size == 0:
        raise error(Code.UNSUPPORTED_FEATURE, "config.json.quantization_config.group_size", "is no size")
    return size
