"""At bind time the live model is compared with the base's table, module by module."""

from __future__ import annotations

import dataclasses

import pytest
from torch import nn

from adapterd.gpu_cache.engine import LoRAEngine
from adapterd.gpu_cache.engine.bind import check_table
from adapterd.loader.base_model import BaseModule, BaseSpec, ModuleKind
from adapterd.loader.errors import Code, Failed
from fakes.static_cache import StaticCache
from fakes.toy_models import Toy, toy_spec

LINEAR, EMBEDDING, EXPERTS = ModuleKind.LINEAR, ModuleKind.EMBEDDING, ModuleKind.EXPERTS


def model() -> nn.Module:
    """An embedding, a linear, a Conv1D, a stack of experts and a norm."""
    from transformers.pytorch_utils import Conv1D

    return nn.ModuleDict(
        {
            "embed": nn.Embedding(10, 4), "up": nn.Linear(4, 8), "conv": Conv1D(6, 4), "norm": nn.LayerNorm(4),
            "block_sparse_moe": nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(4, 4)])}),
        }
    )  # fmt: skip


def table(*changes: BaseModule) -> BaseSpec:
    """The model's own table with some entries replaced or added."""
    spec = BaseSpec.from_module(model(), id="tests/model", revision="a" * 40)
    modules = {m.path: m for m in (*spec.modules, *changes)}
    return BaseSpec.of(modules.values(), id=spec.id, revision=spec.revision)


def refused(spec: BaseSpec) -> tuple[str, str]:
    with pytest.raises(Failed) as caught:
        check_table(model(), spec, frozenset())
    assert caught.value.code is Code.BASE_TABLE_INVALID
    return caught.value.problem.where, caught.value.problem.message


def test_a_model_fits_its_own_table() -> None:
    check_table(model(), table(), frozenset())


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (BaseModule("up", LINEAR, 4, 9), "has in_features 4 and out_features 8, by the table 4 and 9"),
        (BaseModule("up", EMBEDDING, 8, 4), "is a linear and no embedding"),
        (BaseModule("norm", LINEAR, 4, 4), "is a LayerNorm and no linear"),
        (BaseModule("embed", EMBEDDING, 11, 4), "has rows 10 and width 4, by the table 11 and 4"),
        (BaseModule("conv", LINEAR, 6, 4), "has in_features 4 and out_features 6"),
        (BaseModule("down", LINEAR, 8, 4), "is missing"),
        (BaseModule("tokens", EMBEDDING, 8, 4), "is missing"),
        (BaseModule("mlp.experts", EXPERTS, 0, 0), "is missing"),
    ],
)
def test_each_difference_is_named(entry: BaseModule, words: str) -> None:
    where, message = refused(table(entry))
    assert where == entry.path
    assert f"{entry.path} {words}" in message


def test_the_first_few_are_named_and_the_others_counted() -> None:
    _, message = refused(table(*(BaseModule(f"h.{i}", LINEAR, 4, 4) for i in range(5))))
    assert "h.0 is missing; h.1 is missing; h.2 is missing; and 2 more" in message


def test_a_conv1d_may_have_become_a_linear() -> None:
    """Quantisers replace them; to an adapter both are y = x Wᵀ."""
    check_table(model(), table(BaseModule("conv", LINEAR, 4, 6)), frozenset())


def test_modules_beside_the_table_and_held_ones_are_no_fault() -> None:
    grown = nn.ModuleDict({"x": nn.Linear(2, 2), "extra": nn.Linear(3, 3)})
    base = BaseSpec.of([BaseModule("x", LINEAR, 2, 2), BaseModule("q", LINEAR, 2, 1)], id="b", revision="a" * 40)
    check_table(grown, base, {"q"})


def test_an_embedding_of_an_engine_of_its_own_passes() -> None:
    class Padded(nn.Module):
        num_embeddings = 128

    base = BaseSpec.of(
        [BaseModule("x", LINEAR, 2, 2), BaseModule("embed", EMBEDDING, 100, 2)], id="b", revision="a" * 40
    )
    check_table(nn.ModuleDict({"x": nn.Linear(2, 2), "embed": Padded()}), base, frozenset())


def test_an_engine_does_not_start_on_another_model() -> None:
    base = toy_spec()
    cache = StaticCache(dataclasses.replace(base, modules=base.modules[1:]))
    LoRAEngine(Toy(), cache).close()  # a linear beside the table
    more = BaseSpec.of([*base.modules, BaseModule("layers.2.mlp.up", LINEAR, 48, 96)], id=base.id, revision="a" * 40)
    with pytest.raises(Failed, match=r"layers\.2\.mlp\.up is missing"):
        LoRAEngine(Toy(), StaticCache(more))
