"""Linears that are really quantised, as torch itself and libraries compute them, with the weights they stand for.

Each is made of a plain `nn.Linear`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

N_IN, N_OUT = 128, 64
GROUP = 32
INNER_TILES = 8
"""Tiles of K that a thread unpacks at once."""


@dataclass(frozen=True)
class Quantised:
    """Attributes:
    layer: the quantised module.
    weight: float64 [out, in], what it means.
    dtype: of activations.
    kept: bytes of the packed weight, to be compared afterwards.
    """

    layer: nn.Module
    weight: Tensor
    dtype: torch.dtype
    kept: Callable[[], bytes]


def _bytes(*tensors: Tensor) -> bytes:
    return b"".join(bytes(t.detach().contiguous().view(torch.uint8).flatten().tolist()) for t in tensors)


class _Packed(nn.Module):
    """Derives from nothing that is known, and knows its widths."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        bias = torch.zeros(self.out_features) if linear.bias is None else linear.bias.detach().clone()
        self.bias = nn.Parameter(bias, requires_grad=False)


def _rows_int8(values: Tensor) -> tuple[Tensor, Tensor]:
    scale = values.abs().amax(dim=1, keepdim=True).clamp(min=1e-6) / 127
    return (values / scale).round().to(torch.int8), scale


class Int8WeightOnly(_Packed):
    """`torch._weight_int8pack_mm`: int8 weights with a scale an output, bf16 activations."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        packed, scale = _rows_int8(linear.weight)
        self.register_buffer("weight", packed)
        self.register_buffer("scale", scale[:, 0].bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, self.in_features)
        y = torch._weight_int8pack_mm(flat, self.weight, self.scale) + self.bias.to(x.dtype)
        return y.reshape(*x.shape[:-1], self.out_features)


class Int8Dynamic(_Packed):
    """`torch._int_mm`: int8 by int8 with a scale a row of activations."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        packed, scale = _rows_int8(linear.weight)
        self.register_buffer("weight", packed)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        a, a_scale = _rows_int8(x.reshape(-1, self.in_features).float())
        y = torch._int_mm(a, self.weight.t()).float() * a_scale * self.scale.T + self.bias
        return y.to(x.dtype).reshape(*x.shape[:-1], self.out_features)


class Int4WeightOnly(_Packed):
    """`torch._weight_int4pack_mm_for_cpu`: int4 weights in groups, packed two to a byte in tiles, bf16 activations."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        groups = linear.weight.detach().reshape(self.out_features, -1, GROUP)
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        scale = ((high - low) / 15).bfloat16()
        zero = (low + 8 * scale.float()).bfloat16()
        codes = ((groups - low) / scale.float()).round().clamp(0, 15)
        self.meant = ((codes.double() - 8) * scale.double() + zero.double()).reshape(linear.weight.shape)
        self.register_buffer("weight", self.packed(codes.reshape(linear.weight.shape).to(torch.int32)))
        pairs = torch.cat([scale, zero], dim=-1).transpose(0, 1).contiguous()  # [groups, out, 2]
        self.register_buffer("scales_and_zeros", pairs)

    def packed(self, codes: Tensor) -> Tensor:
        return torch._convert_weight_to_int4pack_for_cpu(codes, 1)

    def product(self, x: Tensor) -> Tensor:
        return torch._weight_int4pack_mm_for_cpu(x, self.weight, GROUP, self.scales_and_zeros)

    def forward(self, x: Tensor) -> Tensor:
        y = self.product(x.reshape(-1, self.in_features))
        return (y + self.bias.to(x.dtype)).reshape(*x.shape[:-1], self.out_features)


class Int4OnCuda(Int4WeightOnly):
    """`torch._weight_int4pack_mm`: the same weights, as tensor cores want them."""

    def packed(self, codes: Tensor) -> Tensor:
        pairs = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8)
        return torch._convert_weight_to_int4pack(pairs.cuda(), INNER_TILES)

    def product(self, x: Tensor) -> Tensor:
        return torch._weight_int4pack_mm(x, self.weight, GROUP, self.scales_and_zeros)


class Float8Dynamic(_Packed):
    """`torch._scaled_mm`: e4m3 by e4m3 with one scale a tensor."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        scale = linear.weight.detach().abs().max() / 448
        self.weight = nn.Parameter((linear.weight.detach() / scale).to(torch.float8_e4m3fn), requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, self.in_features)
        scale = flat.abs().max().float() / 448
        a = (flat.float() / scale).to(torch.float8_e4m3fn)
        y = torch._scaled_mm(a, self.weight.t(), scale, self.scale, out_dtype=torch.bfloat16)
        return (y + self.bias.bfloat16()).to(x.dtype).reshape(*x.shape[:-1], self.out_features)


class Float8WeightOnly(_Packed):
    """e4m3 weights with a scale an output, that are made bf16 for each call."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        scale = linear.weight.detach().abs().amax(dim=1, keepdim=True) / 448
        self.weight = nn.Parameter((linear.weight.detach() / scale).to(torch.float8_e4m3fn), requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, (self.weight.float() * self.scale).to(x.dtype), self.bias.to(x.dtype))


def _native(kind: type[_Packed], dtype: torch.dtype) -> Callable[[nn.Linear], Quantised]:
    def build(linear: nn.Linear) -> Quantised:
        layer: Any = kind(linear)
        meant = getattr(layer, "meant", None)
        if meant is None:
            scale = torch.as_tensor(layer.scale).double().reshape(-1, 1)
            meant = layer.weight.detach().double() * scale
        return Quantised(layer, meant, dtype, lambda: _bytes(layer.weight))

    return build


def _dynamic(dtype: torch.dtype) -> Callable[[nn.Linear], Quantised]:
    """`torch.ao.quantization.quantize_dynamic`; its `weight` is a method, and it has no parameters."""

    def build(linear: nn.Linear) -> Quantised:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is going to move to torchao
            layer: Any = torch.ao.quantization.quantize_dynamic(nn.Sequential(linear), {nn.Linear}, dtype=dtype)[0]

        def meant() -> Tensor:
            weight = layer.weight()
            return weight.dequantize() if weight.is_quantized else weight

        return Quantised(layer, meant().double(), torch.float32, lambda: _bytes(meant()))

    return build


TORCH: Mapping[str, Callable[[nn.Linear], Quantised]] = {
    "int8 weight-only (torch._weight_int8pack_mm)": _native(Int8WeightOnly, torch.bfloat16),
    "int8 dynamic (torch._int_mm)": _native(Int8Dynamic, torch.float32),
    "int4 weight-only (torch._weight_int4pack_mm)": _native(Int4WeightOnly, torch.bfloat16),
    "fp8 dynamic (torch._scaled_mm)": _native(Float8Dynamic, torch.bfloat16),
    "fp8 weight-only (float8_e4m3fn)": _native(Float8WeightOnly, torch.bfloat16),
    "int8 dynamic (torch.ao)": _dynamic(torch.qint8),
    "fp16 dynamic (torch.ao)": _dynamic(torch.float16),
}

TORCH_CUDA: Mapping[str, Callable[[nn.Linear], Quantised]] = {
    **{name: build for name, build in TORCH.items() if "torch.ao" not in name and "int4" not in name},
    "int4 weight-only (torch._weight_int4pack_mm)": _native(Int4OnCuda, torch.bfloat16),
}
"""What of it runs on a CUDA device, once it has been moved there."""


def torchao_layer(config: str, **options: Any) -> Callable[[nn.Linear], Quantised]:
    """An `nn.Linear` whose weight is one of torchao's tensors."""

    def build(linear: nn.Linear) -> Quantised:
        import torchao.quantization as ao

        layer: Any = nn.Sequential(linear)
        words = {name: getattr(torch, value) for name, value in options.items()}
        ao.quantize_(layer, getattr(ao, config)(**words))
        weight = layer[0].weight
        return Quantised(layer[0], weight.dequantize().double(), torch.float32, lambda: _bytes(weight.dequantize()))

    return build


TORCHAO: Mapping[str, Callable[[nn.Linear], Quantised]] = {
    "Int8WeightOnlyConfig": torchao_layer("Int8WeightOnlyConfig"),
    "Int8DynamicActivationInt8WeightConfig": torchao_layer("Int8DynamicActivationInt8WeightConfig"),
    "IntxWeightOnlyConfig int4": torchao_layer("IntxWeightOnlyConfig", weight_dtype="int4"),
    "Int8DynamicActivationIntxWeightConfig int4": torchao_layer(
        "Int8DynamicActivationIntxWeightConfig", weight_dtype="int4"
    ),
    "Float8WeightOnlyConfig": torchao_layer("Float8WeightOnlyConfig"),
}


def _bnb_8bit(linear: nn.Linear) -> Quantised:
    import bitsandbytes as bnb

    layer: Any = bnb.nn.Linear8bitLt(linear.in_features, linear.out_features, has_fp16_weights=False)
    layer.load_state_dict(linear.state_dict())
    layer = layer.to("cpu")
    layer(torch.zeros(1, linear.in_features))  # it packs when it first runs
    meant = layer.weight.data.double() * layer.state.SCB.double()[:, None] / 127
    return Quantised(layer, meant, torch.float32, lambda: _bytes(layer.weight.data))


def _bnb_4bit(kind: str) -> Callable[[nn.Linear], Quantised]:
    def build(linear: nn.Linear) -> Quantised:
        import bitsandbytes as bnb

        layer: Any = bnb.nn.Linear4bit(
            linear.in_features, linear.out_features, quant_type=kind, compute_dtype=torch.float32
        )
        layer.load_state_dict(linear.state_dict())
        layer = layer.to("cpu")
        layer(torch.zeros(1, linear.in_features))
        meant = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state).double()
        return Quantised(layer, meant, torch.float32, lambda: _bytes(layer.weight.data))

    return build


BITSANDBYTES: Mapping[str, Callable[[nn.Linear], Quantised]] = {
    "Linear8bitLt": _bnb_8bit, "Linear4bit nf4": _bnb_4bit("nf4"), "Linear4bit fp4": _bnb_4bit("fp4"),
}  # fmt: skip


def _quanto(kind: str) -> Callable[[nn.Linear], Quantised]:
    def build(linear: nn.Linear) -> Quantised:
        import optimum.quanto as quanto

        layer: Any = nn.Sequential(linear)
        quanto.quantize(layer, weights=getattr(quanto, kind))
        quanto.freeze(layer)
        weight = layer[0].weight
        return Quantised(
            layer[0], weight.dequantize().detach().double(), torch.float32, lambda: _bytes(weight.dequantize())
        )

    return build


QUANTO: Mapping[str, Callable[[nn.Linear], Quantised]] = {
    kind: _quanto(kind) for kind in ("qint8", "qint4", "qint2", "qfloat8")
}


def plain_linear(seed: int = 3) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(N_IN, N_OUT).requires_grad_(False)
