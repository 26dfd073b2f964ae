from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import nn

from adapterd.gpu_cache.engine.layers import Site, Slice, find_sites
from adapterd.loader.base_model import BaseModule, BaseSpec, ModuleKind
from adapterd.loader.errors import AdapterdError, Code
from fakes.toy_models import LINEARS, STACKED, Toy, toy_spec

REVISION = "a" * 40


def sites_of(
    model: nn.Module,
    base: BaseSpec | None = None,
    stacked: Mapping[str, Sequence[str]] | None = None,
    targets: Sequence[str] | None = None,
) -> dict[str, Site]:
    base = base or BaseSpec.from_module(model, id="tests/model", revision=REVISION)
    return {s.path: s for s in find_sites(model, base, stacked or {}, targets)}


def refusal(*args: object, **kwargs: object) -> AdapterdError:
    with pytest.raises(AdapterdError) as caught:
        sites_of(*args, **kwargs)  # type: ignore[arg-type]
    return caught.value


def test_every_linear_of_the_table_is_wrapped_once() -> None:
    found = sites_of(Toy(), toy_spec())
    assert sorted(found) == sorted(LINEARS)
    assert all(site.slices == (Slice(path, 0, site.out_features),) for path, site in found.items())


def test_a_fused_linear_holds_its_parts_in_order() -> None:
    found = sites_of(Toy(fused=True), toy_spec(), STACKED)
    assert found["layers.1.self_attn.qkv_proj"].slices == (
        Slice("layers.1.self_attn.q_proj", 0, 48),
        Slice("layers.1.self_attn.k_proj", 48, 24),
        Slice("layers.1.self_attn.v_proj", 72, 24),
    )
    assert {s.path for site in found.values() for s in site.slices} == set(LINEARS)


def test_a_fused_linear_without_stacked_is_not_the_table() -> None:
    caught = refusal(Toy(fused=True), toy_spec())
    assert caught.code is Code.BASE_TABLE_INVALID
    assert "layers.0.self_attn.k_proj is missing" in caught.problem.message
    assert "and 3 more" in caught.problem.message
    assert "stacked" in caught.problem.hint


def test_a_table_that_lists_the_fused_linear_itself_is_taken_at_its_word() -> None:
    model = Toy(fused=True)
    found = sites_of(model, None, STACKED)
    assert found["layers.0.self_attn.qkv_proj"].slices == (Slice("layers.0.self_attn.qkv_proj", 0, 96),)


def test_a_fused_linear_that_lacks_a_part_is_refused() -> None:
    base = toy_spec()
    smaller = BaseSpec.of([m for m in base.modules if "v_proj" not in m.path], id=base.id, revision=base.revision)
    caught = refusal(Toy(fused=True), smaller, STACKED)
    assert caught.code is Code.BASE_TABLE_INVALID
    assert caught.problem.where == "layers.0.self_attn.v_proj"


def test_fused_widths_must_add_up() -> None:
    caught = refusal(Toy(fused=True), toy_spec(), {"qkv_proj": ["q_proj", "k_proj"]})
    assert caught.code is Code.SHAPE_MISMATCH
    assert caught.problem.where == "layers.0.self_attn.qkv_proj"


def test_a_table_of_other_widths_is_refused() -> None:
    base = toy_spec()
    modules = [BaseModule(m.path, m.kind, m.in_features, 47) if m.path == LINEARS[3] else m for m in base.modules]
    caught = refusal(Toy(), BaseSpec.of(modules, id=base.id, revision=base.revision))
    assert caught.code is Code.BASE_TABLE_INVALID
    assert caught.problem.where == LINEARS[3]
    assert "47" in caught.problem.message


def test_a_table_of_another_model_is_refused() -> None:
    base = BaseSpec.of([BaseModule("h.0.x", ModuleKind.LINEAR, 4, 4)], id="tests/other", revision=REVISION)
    assert refusal(Toy(), base).code is Code.BASE_TABLE_INVALID


@pytest.mark.parametrize("names", [{"stacked": {"qkv": ["a", "b"]}}, {"targets": ["q_prj"]}])
def test_names_that_fit_nothing_are_mistakes(names: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"qkv|q_prj"):
        sites_of(Toy(), toy_spec(), **names)  # type: ignore[arg-type]


def test_targets_are_names_at_dots() -> None:
    found = sites_of(Toy(), toy_spec(), targets=["q_proj", "mlp.up", "layers.1.mlp.down"])
    wanted = {p for p in LINEARS if p.endswith((".q_proj", ".up"))}
    assert set(found) == wanted | {"layers.1.mlp.down"}


@pytest.mark.parametrize("name", ["roj", "proj", "elf_attn.q_proj"])
def test_a_target_ends_at_a_dot(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        sites_of(Toy(), toy_spec(), targets=[name])


def test_targets_choose_parts_of_a_fused_linear() -> None:
    found = sites_of(Toy(fused=True), toy_spec(), STACKED, ["v_proj"])
    assert [s.slices for s in found.values()] == [(Slice(f"layers.{i}.self_attn.v_proj", 72, 24),) for i in range(2)]


class WithHead(nn.Module):
    """Heads by name, by the model's own word, and outside its body."""

    base_model_prefix = "model"

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"body": nn.Linear(4, 4), "pooler": nn.Linear(4, 4)})
        self.unembed, self.dense = nn.Linear(4, 9), nn.Linear(4, 2)

    def get_output_embeddings(self) -> nn.Module:
        return self.unembed


def test_heads_are_left_out_unless_named() -> None:
    model = WithHead()
    assert list(sites_of(model)) == ["model.body"]
    assert list(sites_of(model, targets=["unembed"])) == ["unembed"]
    assert list(sites_of(nn.ModuleDict({"lm_head": nn.Linear(4, 9), "x": nn.Linear(4, 4)}))) == ["x"]


def test_multihead_attention_is_left_out() -> None:
    """It reads the weight of its out_proj without calling it: a hook there would never run."""
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(8, 2), "x": nn.Linear(4, 4)})
    assert list(sites_of(model)) == ["x"]


def test_a_module_at_two_paths_is_left_out() -> None:
    shared = nn.Linear(4, 4)
    model = nn.ModuleDict({"a": shared, "b": shared, "x": nn.Linear(4, 4)})
    assert list(sites_of(model)) == ["x"]


class PackedLinear(nn.Module):
    """A quantised linear as the field writes them: not an nn.Linear, no weight of the usual shape."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.register_buffer("packed", torch.zeros(in_features * out_features // 2, dtype=torch.uint8))


def test_a_quantised_linear_is_one() -> None:
    found = sites_of(nn.ModuleDict({"x": PackedLinear(6, 4)}))
    assert found["x"].slices == (Slice("x", 0, 4),)


def test_conv1d_of_transformers_is_a_linear() -> None:
    from transformers.pytorch_utils import Conv1D

    found = sites_of(nn.ModuleDict({"c_attn": Conv1D(12, 4)}))
    assert (found["c_attn"].in_features, found["c_attn"].out_features) == (4, 12)
