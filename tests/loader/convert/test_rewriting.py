"""The copy: other names, the same bytes."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from adapterd.loader.base_alternatives import Alternative
from adapterd.loader.convert import Conversion, plan_conversion, write_weights
from adapterd.loader.errors import Code, Refused
from adapterd.loader.formats.files import BytesReader, DirectoryPackage
from adapterd.loader.formats.safetensors_header import Header, read_header
from adapterd.loader.limits import DEFAULT_LIMITS
from fakes.packages import safetensors_bytes, tensors_of, tiny_llama_spec, write_package

BASE = tiny_llama_spec()
WEIGHTS = "adapter_model.safetensors"


def spoilt(folder: Path, rename: Callable[[str], str], **package: object) -> Path:
    """A package whose tensors have other names and, in the file, another order than their names."""
    written = write_package(folder, **package)  # type: ignore[arg-type]
    tensors = {rename(name): value for name, value in reversed(tensors_of(written.factors).items())}
    (folder / WEIGHTS).write_bytes(safetensors_bytes(tensors, {"format": "pt", "note": "kept"}))
    return folder


def converted(folder: Path) -> tuple[Conversion, bytes]:
    with DirectoryPackage.open_dir(folder, DEFAULT_LIMITS) as package:
        plan = plan_conversion(package, BASE, DEFAULT_LIMITS)
        out, moved = io.BytesIO(), []
        write_weights(plan, out, moved.append)
        assert sum(moved) > 0
        return plan, out.getvalue()


def header_of(data: bytes) -> Header:
    return read_header(BytesReader(data), DEFAULT_LIMITS)


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_bytes_order_dtype_and_metadata_stay(tmp_path: Path, dtype: str) -> None:
    folder = spoilt(tmp_path / "p", lambda name: f"_orig_mod.{name}", dtype=dtype)
    before = (folder / WEIGHTS).read_bytes()
    _, after = converted(folder)
    old, new = header_of(before), header_of(after)
    assert [f"_orig_mod.{t.name}" for t in new.tensors] == [t.name for t in old.tensors]
    assert [(t.dtype, t.shape) for t in new.tensors] == [(t.dtype, t.shape) for t in old.tensors]
    assert after[new.data_start :] == before[old.data_start :]
    assert new.metadata == old.metadata
    assert new.data_start % 8 == 0
    listed = json.loads(after[8 : 8 + struct.unpack("<Q", after[:8])[0]])
    assert list(listed)[1:] == [t.name for t in new.tensors]


def test_without_a_change_it_is_the_same_file(tmp_path: Path) -> None:
    folder = write_package(tmp_path / "p").directory
    plan, after = converted(folder)
    assert plan.changes == ()
    assert after == (folder / WEIGHTS).read_bytes()


def test_other_files_are_copied_and_an_old_signature_is_not(tmp_path: Path) -> None:
    folder = spoilt(tmp_path / "p", lambda name: f"module.{name}", files={"README.md": b"hello", "model.sig": b"{}"})
    plan, _ = converted(folder)
    assert plan.copied == ("README.md", "adapter_config.json")
    assert plan.left_out == ("model.sig",)


def inside(name: str) -> str:
    return name.replace("base_model.model.", "base_model.model._orig_mod.")


@pytest.mark.parametrize(
    "config",
    [
        {"alpha_pattern": {r"^model\.layers\.0\.self_attn\.q_proj": 32}},
        {"rank_pattern": {r"_orig_mod\.model\.layers\.1\.self_attn\.v_proj": 2}},
    ],
)
def test_a_scale_that_hangs_on_the_old_name_is_refused(tmp_path: Path, config: dict[str, object]) -> None:
    with pytest.raises(Refused) as caught:
        converted(spoilt(tmp_path / "p", inside, **config))
    assert caught.value.code is Code.CONFIG_TENSOR_DISAGREE


def test_a_scale_that_is_the_same_under_both_names_is_none(tmp_path: Path) -> None:
    config = {"alpha_pattern": {"q_proj": 32, r"layers\.1\.self_attn\.v_proj": 4}}
    plan, _ = converted(spoilt(tmp_path / "p", inside, **config))
    assert len(plan.changes) == 8


def test_names_of_an_alternative_naming_are_proved_by_it(tmp_path: Path) -> None:
    queries = [m.path for m in BASE.modules if m.path.endswith("q_proj")]
    other = Alternative.of("old", {path.replace("q_proj", "query"): path for path in queries})
    folder = spoilt(tmp_path / "p", lambda name: "module." + name.replace("q_proj", "query"))
    with DirectoryPackage.open_dir(folder, DEFAULT_LIMITS) as package:
        with pytest.raises(Refused) as caught:
            plan_conversion(package, BASE, DEFAULT_LIMITS)
        assert caught.value.code is Code.UNKNOWN_MODULE
        plan = plan_conversion(package, BASE.with_alternatives([other]), DEFAULT_LIMITS)
    assert {r.module.rpartition(".")[2] for r in plan.renames} == {"query", "v_proj"}


def test_a_file_that_is_no_adapters_is_refused_as_everywhere(tmp_path: Path) -> None:
    folder = spoilt(tmp_path / "p", lambda name: f"module.{name}", use_dora=True)
    with pytest.raises(Refused) as caught:
        converted(folder)
    assert caught.value.code is Code.UNSUPPORTED_FEATURE
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[:-4])
    with pytest.raises(Refused) as caught:
        converted(folder)
    assert caught.value.code is Code.ST_TRUNCATED


def test_the_values_are_the_ones_that_were_there(tmp_path: Path) -> None:
    written = write_package(tmp_path / "good")
    folder = spoilt(tmp_path / "p", lambda name: name.replace(".weight", ".default.weight"))
    _, after = converted(folder)
    for tensor in header_of(after).tensors:
        module, side = tensor.name.removeprefix("base_model.model.").removesuffix(".weight").rsplit(".lora_", 1)
        value = np.frombuffer(after[tensor.begin : tensor.end], "<f4").reshape(tensor.shape)
        assert np.array_equal(value, written.factors[module]["AB".index(side)])
