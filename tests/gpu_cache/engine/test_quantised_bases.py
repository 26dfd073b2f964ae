"""Quantised bases: whatever the packing, base rows keep their bits and deltas are those of the dequantised weight.

`docs/quantised_bases.md` has the table. What needs a library runs where it is installed.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from adapterd.gpu_cache import CacheConfig
from adapterd.gpu_cache.engine import LoRAEngine
from adapterd.gpu_cache.engine.dispatch import model_dtype
from adapterd.gpu_cache.engine.reference import KERNEL
from adapterd.loader.base_model import BaseSpec
from adapterd.loader.checks.examination import examine_headers, examine_path
from adapterd.loader.errors import AdapterdError, Code
from adapterd.loader.formats.files import DirectoryPackage
from adapterd.loader.limits import DEFAULT_LIMITS
from fakes.merged import Composition
from fakes.packages import tiny_llama_spec, write_package
from fakes.quantised_layers import BITSANDBYTES, QUANTO, TORCH, TORCHAO, Int8Dynamic, plain_linear
from fakes.served_layer import check_quantised
from fakes.static_cache import StaticCache
from fakes.toy_models import HIDDEN, toy

OPTIONAL = "is not installed; `pip install torchao bitsandbytes optimum-quanto` runs these, too"


@pytest.mark.parametrize("name", TORCH)
def test_torchs_own(name: str) -> None:
    assert check_quantised(TORCH[name]) == KERNEL


@pytest.mark.skipif(find_spec("torchao") is None, reason=f"torchao {OPTIONAL}")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TORCHAO)
def test_torchao(name: str) -> None:
    assert check_quantised(TORCHAO[name]) == KERNEL


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason=f"bitsandbytes {OPTIONAL}")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", BITSANDBYTES)
def test_bitsandbytes(name: str) -> None:
    assert check_quantised(BITSANDBYTES[name]) == KERNEL


@pytest.mark.skipif(find_spec("optimum") is None, reason=f"optimum-quanto {OPTIONAL}")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", QUANTO)
def test_quanto(name: str) -> None:
    assert check_quantised(QUANTO[name]) == KERNEL


# --- a whole model


class Explicit(nn.Module):
    """A quantised linear with one adapter's delta written out behind it."""

    def __init__(self, layer: nn.Module, change: Tensor) -> None:
        super().__init__()
        self.layer, self.change = layer, change

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x).double() + x.double() @ self.change.T).to(x.dtype)


def quantised_toy(composition: Composition = ()) -> nn.Module:
    model = toy()
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            packed: nn.Module = Int8Dynamic(module)
            changes = [w * a.modules[path].scaling * a.modules[path].b.double() @ a.modules[path].a.double()
                       for a, w in composition if path in a.modules]  # fmt: skip
            if changes:
                packed = Explicit(packed, torch.stack(changes).sum(0))
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, packed)
    return model


def test_every_row_of_a_quantised_model_has_its_own_adapter() -> None:
    model = quantised_toy()
    base = BaseSpec.from_module(model, id="tests/quantised", revision="d" * 40)
    assert base.modules == BaseSpec.from_module(toy(), id="tests/quantised", revision="d" * 40).modules
    cache = StaticCache(base, n_pages=600)
    engine = LoRAEngine(model, cache)
    everything = cache.add(dict.fromkeys(engine.served, 6), seed=1)
    some = cache.add({p: 3 for p in engine.served if ".1." in p}, seed=2)
    mixes: list[Composition] = [[(everything, 1.0)], [], [(some, 1.0)], [(some, 0.5), (everything, -0.75)]]
    x = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(2))
    with engine.step([(cache.lease(*mix) if mix else None, 1) for mix in mixes]) as step:
        got = model(x)
    assert step.receipt.not_run == ()
    assert torch.equal(got[1], quantised_toy()(x)[1])
    for row, mix in enumerate(mixes):
        wanted = quantised_toy(mix)(x[row : row + 1])[0]
        # An activation at the edge of two int8 codes may fall on the other side: one code is 1/127 of its row.
        torch.testing.assert_close(got[row], wanted, rtol=0, atol=2e-2)
        if mix:
            assert (wanted - quantised_toy()(x[row : row + 1])[0]).abs().max() > 0.2


# --- adapters are floats


@pytest.mark.parametrize("word", ["INT8", "I8", "F8_E4M3", "FP8", "bf16"])
def test_a_cache_keeps_no_adapters_in_int8_or_fp8(word: str) -> None:
    with pytest.raises(AdapterdError) as caught:
        CacheConfig(dtype=word)  # type: ignore[arg-type]
    assert (caught.value.code, caught.value.problem.where) == (Code.SETTINGS_INVALID, "dtype")
    assert "INT8 and FP8" in caught.value.problem.hint


@pytest.mark.parametrize("word", ["I8", "U8", "F8_E4M3", "F8_E5M2"])
def test_an_adapter_in_int8_or_fp8_is_refused_by_name(word: str, tmp_path: Path) -> None:
    kinds = {"I8": torch.int8, "U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
    base = tiny_llama_spec()
    folder = write_package(tmp_path / "p", base=base).directory
    weights = folder / "adapter_model.safetensors"
    save_file({name: tensor.to(kinds[word]) for name, tensor in load_file(weights).items()}, weights)
    verdict = examine_path(folder, base)
    assert verdict.manifest is None
    (problem,) = verdict.problems
    assert problem.code is Code.DTYPE_UNSUPPORTED
    assert word in problem.message
    assert "scales" in problem.hint
    with DirectoryPackage.open_dir(folder, DEFAULT_LIMITS) as package:
        names, found = examine_headers(package, base)
    assert (names, found) == (None, (problem,))


# --- what the engine makes of such modules


def test_packed_weights_do_not_say_what_dtype_the_model_is() -> None:
    packed = TORCH["fp8 weight-only (float8_e4m3fn)"](plain_linear()).layer
    model = nn.ParameterList([packed.weight, nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))])
    assert next(model.parameters()).dtype is torch.float8_e4m3fn
    assert model_dtype(model) is torch.bfloat16


class Between(nn.Module):
    """Knows its widths, and takes or gives activations that are quantised outside of it."""

    def __init__(self, dtype: torch.dtype, *, gives: bool) -> None:
        super().__init__()
        self.in_features, self.out_features, self.dtype, self.gives = 8, 8, dtype, gives

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype) if self.gives else x.float()


@pytest.mark.parametrize("gives", [False, True])
@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.float8_e4m3fn])
def test_activations_that_are_quantised_outside_are_refused(dtype: torch.dtype, gives: bool) -> None:
    """Their scales are nobody's here: a delta of the bare codes would be wrong without a word."""
    model = nn.ModuleDict({"layer": Between(dtype, gives=gives)})
    base = BaseSpec.from_module(model, id="tests/between", revision="d" * 40)
    cache = StaticCache(base)
    engine = LoRAEngine(model, cache)
    lease = cache.lease(cache.add({"layer": 2}, seed=1))
    x = torch.ones(2, 8) if gives else torch.ones(2, 8).to(dtype)
    with pytest.raises(AdapterdError) as caught, engine.step([(lease, 2)]):
        model["layer"](x)
    integers_come_out = gives and not dtype.is_floating_point
    assert caught.value.code is (Code.MODULE_NOT_SERVED if integers_come_out else Code.DTYPE_UNSUPPORTED)
    assert caught.value.problem.where == "layer"
    if not integers_come_out:
        with engine.step([(None, 2)]):
            assert model["layer"](x).dtype is (dtype if gives else torch.float32)
