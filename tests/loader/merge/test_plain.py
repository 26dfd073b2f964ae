"""A base in floats: the same folder, byte for byte, but for the bytes of the adapted weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from adapterd.loader.base_model import BaseModule, BaseSpec, ModuleKind
from adapterd.loader.errors import AdapterdError, Code
from adapterd.loader.manifest import Manifest, ModuleEntry, TensorEntry
from adapterd.loader.merge import Wish, opened_base, plan_merge
from fakes.merging import BASE, INDEX, SHARDS, base_tensors, merge, read_tensors, span_of, write_base
from fakes.packages import NUMPY_DTYPES, safetensors_bytes, write_package
from fakes.readers import BytesReader

MODULES = ("q_proj", "v_proj", "down_proj")


def refusal(base: Path, adapter: Path, out: Path, **more: object) -> AdapterdError:
    with pytest.raises(AdapterdError) as caught:
        merge(base, adapter, out, **more)  # type: ignore[arg-type]
    assert not out.exists()
    assert not list(out.parent.glob("adapterd-merge-*"))
    return caught.value


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("sharded", [True, False])
def test_nothing_but_the_adapted_weights_changes(tmp_path: Path, dtype: str, sharded: bool) -> None:
    base = write_base(tmp_path / "base", dtype=dtype, sharded=sharded)
    adapter = write_package(tmp_path / "a", modules=MODULES, rank=4, alpha=6)
    told: list[int] = []
    plan = merge(base, adapter.directory, tmp_path / "out", tile_values=200, progress=told)
    before, after = ({p.name: p.read_bytes() for p in f.iterdir()} for f in (base, tmp_path / "out"))
    assert before.keys() == after.keys()
    adapted = {f"{path}.weight" for path in adapter.factors}
    for name, data in before.items():
        expected = bytearray(data)
        if name.endswith(".safetensors"):
            inside = adapted & read_tensors_of(base / name)
            for tensor in inside:
                begin, end = span_of(base / name, tensor)
                assert after[name][begin:end] != data[begin:end]
                expected[begin:end] = after[name][begin:end]
        assert after[name] == bytes(expected)
    merged, plain = read_tensors(tmp_path / "out"), read_tensors(base)
    for path, (a, b) in adapter.factors.items():
        wanted = plain[f"{path}.weight"].astype(np.float64) + 1.5 * (b.astype(np.float64) @ a.astype(np.float64))
        rounded = wanted.astype(NUMPY_DTYPES[dtype]).astype(np.float64)
        step = {"BF16": 2.0**-7, "F16": 2.0**-10, "F32": 2.0**-22}[dtype]
        got = merged[f"{path}.weight"].astype(np.float64)
        assert np.abs(got - rounded).max() <= step * np.abs(wanted).max()
        assert (got == rounded).mean() > (0.4 if dtype == "F32" else 0.99)  # rounded once
    assert sum(told) == plan.model.total_bytes == sum(map(len, after.values()))
    assert (plan.mode, plan.left_out) == ("plain", ())


def read_tensors_of(file: Path) -> set[str]:
    data = file.read_bytes()
    return set(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]))


def test_shards_without_an_adapted_weight_are_copies(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    adapter = write_package(tmp_path / "a", modules=("model.layers.0.self_attn.q_proj",)).directory
    merge(base, adapter, tmp_path / "out")
    same = [s for s in SHARDS if (base / s).read_bytes() == (tmp_path / "out" / s).read_bytes()]
    assert len(same) == 1


def test_an_output_head_is_never_merged_whoever_admitted_it(tmp_path: Path) -> None:
    """Its weight may be the input embedding's; `examine` refuses such adapters, and so does this room."""
    a, b = TensorEntry("a", "F32", (4, 32), 0, 512), TensorEntry("b", "F32", (96, 4), 512, 2048)
    module = ModuleEntry("lm_head", 4, 4.0, 1.0, "F32", 32, 96, a, b)
    manifest = Manifest(BASE.pin, (module,), ())
    with opened_base(write_base(tmp_path / "base")) as folder, pytest.raises(AdapterdError) as caught:
        plan_merge(folder, BASE, manifest, BytesReader(bytes(2048)), Wish())
    assert (caught.value.code, caught.value.problem.where) == (Code.UNSUPPORTED_FEATURE, "lm_head")


def test_a_weight_that_is_in_no_file_is_refused(tmp_path: Path) -> None:
    tensors = base_tensors()
    del tensors["model.layers.1.self_attn.q_proj.weight"]
    base = write_base(tmp_path / "base", tensors=tensors)
    fault = refusal(base, write_package(tmp_path / "a").directory, tmp_path / "out")
    assert (fault.code, fault.problem.where) == (Code.UNKNOWN_MODULE, "model.layers.1.self_attn.q_proj")


def test_names_with_and_without_the_bodys_prefix(tmp_path: Path) -> None:
    """GPT-2's published files have the bare body's names; Conv1D weights are [in, out]."""
    spec = BaseSpec.of(
        [
            BaseModule("transformer.h.0.attn.c_attn", ModuleKind.CONV1D, 32, 96),
            BaseModule("transformer.wte", ModuleKind.EMBEDDING, 50, 32),
        ],
        id=BASE.id, revision=BASE.revision,
    )  # fmt: skip
    rng = np.random.default_rng(1)
    adapter = write_package(tmp_path / "a", base=spec, modules=("c_attn",), fan_in_fan_out=True)
    ((a, b),) = adapter.factors.values()
    for prefix in ("", "transformer."):
        tensors = {
            f"{prefix}h.0.attn.c_attn.weight": rng.normal(size=(32, 96)).astype(np.float32),
            f"{prefix}wte.weight": rng.normal(size=(50, 32)).astype(np.float32),
        }
        config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
        base = write_base(tmp_path / f"b{prefix}", tensors=tensors, sharded=False, **config)
        merge(base, adapter.directory, tmp_path / f"o{prefix}", spec=spec)
        got = read_tensors(tmp_path / f"o{prefix}")[f"{prefix}h.0.attn.c_attn.weight"]
        np.testing.assert_allclose(got, tensors[f"{prefix}h.0.attn.c_attn.weight"] + 2 * (b @ a).T, atol=1e-5)
    both = tensors | {"h.0.attn.c_attn.weight": tensors["transformer.h.0.attn.c_attn.weight"]}
    twice = write_base(tmp_path / "twice", tensors=both, sharded=False, model_type="gpt2")
    assert refusal(twice, adapter.directory, tmp_path / "x", spec=spec).code is Code.UNKNOWN_MODULE


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"shape": (32, 16)}, Code.SHAPE_MISMATCH),
        ({"name": "model.layers.0.attention.q.weight"}, Code.UNKNOWN_MODULE),
        ({"dtype": "I8"}, Code.DTYPE_UNSUPPORTED),
    ],
)
def test_weights_that_are_not_the_modules_are_refused(tmp_path: Path, change: dict[str, object], code: Code) -> None:
    tensors = base_tensors()
    name = "model.layers.0.self_attn.q_proj.weight"
    weight = tensors.pop(name)
    shape, dtype = change.get("shape", weight.shape), NUMPY_DTYPES[str(change.get("dtype", "BF16"))]
    tensors[str(change.get("name", name))] = np.ones(shape, dtype)  # type: ignore[call-overload]
    base = write_base(tmp_path / "base", tensors=tensors)
    assert refusal(base, write_package(tmp_path / "a").directory, tmp_path / "out").code is code


def test_other_weights_of_the_base_are_not_given_away_as_merged(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    (base / "pytorch_model.bin").write_bytes(b"\x80\x04never opened")
    (base / "consolidated.safetensors").write_bytes(safetensors_bytes(base_tensors()))
    (base / "chat").mkdir()
    (base / "chat/template.jinja").write_text("{{ x }}")
    (base / ".git").mkdir()
    (base / ".git/config").write_text("[core]")
    plan = merge(base, write_package(tmp_path / "a").directory, tmp_path / "out")
    assert plan.left_out == (".git/", "consolidated.safetensors", "pytorch_model.bin")
    names = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert names == {*SHARDS, INDEX, "config.json", "tokenizer.json", "LICENSE", "chat/template.jinja"}
    assert (tmp_path / "out/chat/template.jinja").read_text() == "{{ x }}"
