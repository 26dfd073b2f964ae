"""Quantised bases (I20): floats are never added to packed integers; what the packed ones mean is known, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from adapterd.loader.base_model import BaseSpec
from adapterd.loader.errors import AdapterdError, Code
from adapterd.loader.manifest import TensorEntry
from adapterd.loader.merge.fp8 import Fp8
from adapterd.loader.merge.grouped import Grouped
from adapterd.loader.merge.loss import Loss
from adapterd.loader.merge.matrices import MOST_FEATURES, NUMPY, Stored
from adapterd.loader.merge.packed_rows import PackedRows
from adapterd.loader.merge.packing import in_order
from adapterd.loader.merge.quantised import Scheme, not_understood
from adapterd.loader.merge.tiles import merged
from fakes.merging import INDEX, merge, read_tensors, span_of, write_base
from fakes.packages import TINY_ID, TINY_REVISION, WrittenPackage, write_package
from fakes.packed_weights import AWQ, AWQ_PLACES, FP8, GPTQ, fp8, gptq, random_integers, values_in, write_packed
from fakes.quantised import LAYOUTS, write_quantised
from fakes.readers import BytesReader

pytestmark = pytest.mark.filterwarnings("ignore")
TARGETS = ("q_proj", "down_proj")
SCHEMES: dict[str, tuple[dict[str, Any], bool]] = {
    "gptq": (GPTQ, False), "gptq act order": ({**GPTQ, "desc_act": True}, True),
    "gptq 8 bits": ({**GPTQ, "bits": 8}, False), "gptq v2": ({**GPTQ, "checkpoint_format": "gptq_v2"}, False),
    "gptq one group": ({**GPTQ, "group_size": 64}, False), "awq": (AWQ, False), "fp8": (FP8, False),
    "fp8 one scale": ({**FP8, "weight_block_size": None}, False),
}  # fmt: skip


def tiny(layers: int = 1) -> Any:
    import transformers

    torch.manual_seed(4)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1)
    return model


def spec_of(model: nn.Module) -> BaseSpec:
    return BaseSpec.from_module(model, id=TINY_ID, revision=TINY_REVISION)


def adapter_for(spec: BaseSpec, folder: Path) -> WrittenPackage:
    return write_package(folder, base=spec, modules=TARGETS, rank=4, alpha=8)


def change_of(adapter: WrittenPackage, path: str) -> np.ndarray:
    a, b = (f.astype(np.float64) for f in adapter.factors[path])
    change: np.ndarray = 2 * b @ a
    return change


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shards", [1, 3])
def test_dequantised_and_merged(tmp_path: Path, scheme: str, shards: int) -> None:
    from transformers import LlamaForCausalLM

    settings, act_order = SCHEMES[scheme]
    model = tiny()
    spec, base, out = spec_of(model), tmp_path / "base", tmp_path / "out"
    means = write_packed(model, base, settings, shards=shards, act_order=act_order)
    (base / "quantize_config.json").write_text("{}")
    adapter = adapter_for(spec, tmp_path / "a")
    plan = merge(base, adapter.directory, out, spec=spec, dequantize="F32", tile_values=600)
    assert (plan.mode, plan.left_out) == ("dequantized", ("quantize_config.json",))
    assert sum(p.stat().st_size for p in out.iterdir()) == plan.model.total_bytes
    config = json.loads((out / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "float32"
    loaded, info = LlamaForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    wanted = tiny()
    with torch.no_grad():
        for path, meant in means.items():
            change = change_of(adapter, path) if path in adapter.factors else 0
            wanted.get_submodule(path).weight.copy_(torch.from_numpy(meant + change))
    for name, tensor in wanted.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], tensor, rtol=2e-6, atol=2e-6, msg=name)
    ids = torch.arange(8)[None]
    torch.testing.assert_close(loaded(ids).logits, wanted(ids).logits, rtol=1e-4, atol=1e-4)
    if shards > 1:
        index = json.loads((out / INDEX).read_text())
        assert index["weight_map"].keys() == read_tensors(out).keys()
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in read_tensors(out).values())


@pytest.mark.parametrize(
    ("scheme", "symmetric"),
    [*((s, False) for s in SCHEMES if not s.startswith("fp8")), *((s, True) for s in SCHEMES if s.startswith("gptq"))],
)
def test_requantised_in_place_of_the_old_integers(tmp_path: Path, scheme: str, symmetric: bool) -> None:
    settings, act_order = SCHEMES[scheme]
    settings = {**settings, "sym": True} if symmetric else settings
    model = tiny()
    spec, base, out = spec_of(model), tmp_path / "base", tmp_path / "out"
    means = write_packed(model, base, settings, shards=3, act_order=act_order)
    adapter = adapter_for(spec, tmp_path / "a")
    plan = merge(base, adapter.directory, out, spec=spec, requantize=True, tile_values=600)
    before, after = ({p.name: p.read_bytes() for p in f.iterdir()} for f in (base, out))
    assert {n: len(d) for n, d in before.items()} == {n: len(d) for n, d in after.items()}
    old, new = read_tensors(base), read_tensors(out)
    changed = {n for n in old if old[n].tobytes() != new[n].tobytes()}
    parts = {f"{path}.{part}" for path in adapter.factors for part in ("qweight", "qzeros", "scales")}
    assert changed <= parts
    assert {n for n in parts if not n.endswith("qzeros")} <= changed
    for path in adapter.factors:
        exact = means[path] + change_of(adapter, path)
        got, step = meaning(new, path, settings)
        assert np.abs(got - exact).max() <= (step * (1.01 if settings["bits"] == 4 else 1.2)).max()
        assert (np.abs(got - exact) <= step * 0.51 + 1e-3).mean() > 0.97
        loss = plan.losses[path]
        assert loss.lost_max == pytest.approx(np.abs(got - exact).max(), rel=1e-3)
        assert 0 < loss.share < 1
    same = {n: d for n, d in before.items() if n.endswith(".json")}
    assert all(after[n] == d for n, d in same.items())


def meaning(tensors: dict[str, np.ndarray], path: str, settings: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """What is stored for `path` as [out, in], and the scale of each value, by the fakes' own reader."""
    words = {p: torch.from_numpy(tensors[f"{path}.{p}"].copy()) for p in ("qweight", "qzeros")}
    scales = tensors[f"{path}.scales"].astype(np.float64)
    bits = settings["bits"]
    if settings["quant_method"] == "awq":
        q, zeros = (values_in(words[p], 4, AWQ_PLACES) for p in ("qweight", "qzeros"))
        groups = np.arange(len(q)) // settings["group_size"]
    else:
        q = values_in(words["qweight"].T.contiguous(), bits).T
        zeros = values_in(words["qzeros"], bits) + (0 if settings.get("checkpoint_format") == "gptq_v2" else 1)
        groups = tensors[f"{path}.g_idx"]
    return ((q - zeros[groups]) * scales[groups]).T, scales[groups].T


@pytest.mark.parametrize("act_order", [False, True])
def test_a_packed_conv1d_is_written_the_other_way_round(act_order: bool) -> None:
    made = random_integers(48, 16, bits=4, group=16, seed=2, act_order=act_order)
    weight = Grouped.of("w", stored(gptq(made)), in_order(4), 16, by_rows=True, zero_offset=1, symmetric=False)
    data = b"".join(merged(PackedRows("w.weight", weight, transposed=True), None, "F32", Loss(), 200))
    np.testing.assert_array_equal(np.frombuffer(data, np.float32).reshape(48, 16), made.weight.T.astype(np.float32))


def test_every_tensor_of_a_rewritten_file_is_aligned(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = tiny()
    spec, base = spec_of(model), tmp_path / "base"
    write_packed(model, base, GPTQ)
    odd = {"a.counter": torch.arange(3, dtype=torch.uint8), "z.half": torch.ones(5, dtype=torch.float16)}
    save_file(load_file(base / "model.safetensors") | odd, base / "model.safetensors")
    merge(base, adapter_for(spec, tmp_path / "a").directory, tmp_path / "out", spec=spec, dequantize="BF16")
    file = tmp_path / "out/model.safetensors"
    for name, tensor in read_tensors(tmp_path / "out").items():
        assert span_of(file, name)[0] % tensor.dtype.itemsize == 0, name
    assert load_file(file)["a.counter"].tolist() == [0, 1, 2]


def stored(parts: dict[str, torch.Tensor]) -> dict[str, Stored]:
    """Each part in a file of its own."""
    words = {torch.int32: "I32", torch.float16: "F16"}
    return {
        n: Stored("f", TensorEntry(n, words[t.dtype], tuple(t.shape), 0, t.nbytes), BytesReader(t.numpy().tobytes()))
        for n, t in parts.items()
    }


@pytest.mark.parametrize("symmetric", [False, True])
def test_a_group_of_zeros_and_a_group_of_one_sign_are_requantised(symmetric: bool) -> None:
    made = gptq(random_integers(32, 16, bits=4, group=16, seed=1))
    weight = Grouped.of("w", stored(made), in_order(4), 16, by_rows=True, zero_offset=1, symmetric=symmetric)
    values = np.concatenate([np.zeros((16, 16)), np.linspace(0.5, 1, 256).reshape(16, 16)], axis=1).astype(np.float32)
    meant, patches = weight.quantised((0, 16), values)
    assert (meant[:, :16] == 0).all()
    assert np.abs(meant - values).max() < 0.16
    files = {n: bytearray(t.numpy().tobytes()) for n, t in made.items()}
    for name, patch in zip(("qweight", "qzeros", "scales"), patches, strict=True):
        files[name][patch.offset : patch.offset + len(patch.data)] = patch.data
    tensors = {f"w.{n}": np.frombuffer(files[n], t.numpy().dtype).reshape(t.shape) for n, t in made.items()}
    np.testing.assert_array_equal(meaning(tensors, "w", GPTQ)[0].astype(np.float32), meant)


def test_fp8_means_what_transformers_says() -> None:
    from types import SimpleNamespace

    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    parts, meant = fp8(torch.randn(48, 32, generator=torch.Generator().manual_seed(1)))
    theirs = Fp8Dequantize(SimpleNamespace(quantization_config=None))._dequantize_one(
        parts["weight"], parts["weight_scale_inv"], torch.float32
    )
    torch.testing.assert_close(theirs.double(), meant, rtol=1e-6, atol=1e-9)


def refusal(base: Path, adapter: Path, out: Path, spec: BaseSpec, **wish: Any) -> AdapterdError:
    with pytest.raises(AdapterdError) as caught:
        merge(base, adapter, out, spec=spec, **wish)
    assert not out.exists()
    return caught.value


def test_floats_are_not_added_to_packed_integers(tmp_path: Path) -> None:
    model = tiny()
    spec = spec_of(model)
    adapter = adapter_for(spec, tmp_path / "a").directory
    for name, (settings, act_order) in SCHEMES.items():
        base = tmp_path / name
        write_packed(model, base, settings, act_order=act_order)
        fault = refusal(base, adapter, tmp_path / "out", spec)
        assert (fault.code, fault.exit_status) == (Code.DTYPE_UNSUPPORTED, 6)
        assert "--dequantize" in fault.problem.hint
    assert refusal(tmp_path / "fp8", adapter, tmp_path / "out", spec, requantize=True).code is Code.UNSUPPORTED_FEATURE


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("announced", [True, False])
def test_no_packed_layout_is_merged_into_by_default(tmp_path: Path, layout: str, announced: bool) -> None:
    model = tiny()
    spec = spec_of(model)
    base = write_quantised(model, tmp_path / "base", layout, announced=announced)
    fault = refusal(base, adapter_for(spec, tmp_path / "a").directory, tmp_path / "out", spec)
    assert (fault.code, fault.exit_status) == (Code.DTYPE_UNSUPPORTED, 6)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({**GPTQ, "bits": 3}, "3 bits"), ({**GPTQ, "checkpoint_format": "marlin"}, "marlin"),
        ({**GPTQ, "is_marlin_format": True}, "Marlin"), ({**GPTQ, "dynamic": {"-:lm_head": {}}}, "module to module"),
        ({**GPTQ, "group_size": 0}, "no size"), ({**GPTQ, "group_size": None}, "no size"),
        ({**AWQ, "version": "gemv"}, "gemv"), ({**AWQ, "zero_point": False}, "zero points"),
        ({**AWQ, "backend": "llm-awq"}, "llm-awq"), ({**FP8, "activation_scheme": "static"}, "static"),
        ({**FP8, "weight_block_size": [0, 16]}, "pair of sizes"), ({**GPTQ, "quant_method": "hqq"}, "hqq"),
        *(({**GPTQ, "quant_method": name}, name) for name in ("bitsandbytes", "compressed-tensors")),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused_by_name(tmp_path: Path, settings: dict[str, Any], word: str) -> None:
    model = tiny()
    spec, base = spec_of(model), tmp_path / "base"
    write_packed(
        model, base, FP8 if settings["quant_method"] == "fp8" else AWQ if settings["quant_method"] == "awq" else GPTQ
    )
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    adapter = adapter_for(spec, tmp_path / "a").directory
    for wish in ({"dequantize": "BF16"}, {"requantize": True}):
        fault = refusal(base, adapter, tmp_path / "out", spec, **wish)
        assert (fault.code, fault.exit_status) == (Code.UNSUPPORTED_FEATURE, 6)
        assert word in fault.problem.message


@pytest.mark.parametrize(
    ("part", "value", "code"),
    [
        ("scales", torch.zeros(3, 128, dtype=torch.float16), Code.SHAPE_MISMATCH),
        ("qzeros", torch.zeros(4, 16, dtype=torch.int64), Code.DTYPE_UNSUPPORTED),
        ("g_idx", torch.full((64,), 7, dtype=torch.int32), Code.SHAPE_MISMATCH),
        ("g_idx", torch.zeros(64, dtype=torch.int32), Code.SHAPE_MISMATCH),
        ("g_idx", torch.zeros(8, dtype=torch.int32), Code.SHAPE_MISMATCH),
        ("weight", torch.zeros(128, 64), Code.UNSUPPORTED_FEATURE),
        ("qzeros", None, Code.UNSUPPORTED_FEATURE),
        ("qweight", None, Code.UNSUPPORTED_FEATURE),
        ("scales", torch.full((4, 128), float("inf"), dtype=torch.float16), Code.NONFINITE),
    ],
)  # fmt: skip
def test_parts_that_do_not_make_a_weight_are_refused(
    tmp_path: Path, part: str, value: torch.Tensor | None, code: Code
) -> None:
    from safetensors.torch import load_file, save_file

    model = tiny()
    spec, base = spec_of(model), tmp_path / "base"
    write_packed(model, base, GPTQ)
    tensors = load_file(base / "model.safetensors")
    name = f"model.layers.0.mlp.up_proj.{part}"
    tensors.pop(name, None)
    save_file(tensors if value is None else tensors | {name: value}, base / "model.safetensors")
    adapter = adapter_for(spec, tmp_path / "a").directory
    assert refusal(base, adapter, tmp_path / "out", spec, dequantize="F32").code is code


def entry_of(name: str, dtype: str, shape: tuple[int, ...], nbytes: int = 0) -> Stored:
    return Stored("f", TensorEntry(name, dtype, shape, 0, nbytes), BytesReader(b""))


@pytest.mark.parametrize("shape", [(4, 0), (0, 4), (0, 0), (1, MOST_FEATURES + 1)])
def test_a_packed_weight_has_inputs_and_outputs_and_not_too_many(shape: tuple[int, int]) -> None:
    scale = entry_of("w.weight_scale_inv", "F32", (shape[0], -(-shape[1] // MOST_FEATURES)))
    with pytest.raises(AdapterdError) as caught:
        Fp8.of("w", entry_of("w.weight", "F8_E4M3", shape), scale, [1, MOST_FEATURES])
    assert caught.value.code is Code.SHAPE_MISMATCH
    rows = MOST_FEATURES // 8 + 1
    parts = {
        "qweight": entry_of("w.qweight", "I32", (rows, 8)), "qzeros": entry_of("w.qzeros", "I32", (1, 1)),
        "scales": entry_of("w.scales", "F16", (1, 8)),
    }  # fmt: skip
    with pytest.raises(AdapterdError) as caught:
        Grouped.of("w", parts, in_order(4), -1, by_rows=True, zero_offset=1, symmetric=False)
    assert (caught.value.code, caught.value.problem.where) == (Code.SHAPE_MISMATCH, "w")


def test_a_size_beyond_the_weight_is_one_group_for_all() -> None:
    made = gptq(random_integers(32, 16, bits=4, group=32, seed=1))
    weights = [
        Grouped.of("w", stored(made), in_order(4), size, by_rows=True, zero_offset=1, symmetric=False)
        for size in (-1, 32, 10**30)
    ]
    one, *others = (w.block((0, 16), (0, 32)) for w in weights)
    assert np.ptp(one) > 0
    for other in others:
        np.testing.assert_array_equal(one, other)
    scale = Stored("f", TensorEntry("s", "F32", (1, 1), 0, 4), BytesReader(np.float32([3]).tobytes()))
    eight = NUMPY["F8_E4M3"]
    weight = Stored("f", TensorEntry("w", "F8_E4M3", (2, 2), 0, 4), BytesReader(np.ones((2, 2), eight).tobytes()))
    assert (Fp8.of("w", weight, scale, [10**40, 10**40]).block((0, 2), (0, 2)) == 3).all()


def test_a_config_is_not_repeated_at_length() -> None:
    for method in ("gptq", "awq"):
        why = not_understood(Scheme(method, {"bits": "\x1b[2J" * 9999}))
        assert why is not None
        assert len(why) < 60
        assert why.isprintable()


def test_a_wish_about_quantisation_for_a_base_in_floats_is_refused(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    adapter = write_package(tmp_path / "a").directory
    for wish in ({"dequantize": "BF16"}, {"requantize": True}):
        with pytest.raises(AdapterdError) as caught:
            merge(base, adapter, tmp_path / "out", **wish)
        assert caught.value.code is Code.REQUEST_INVALID
