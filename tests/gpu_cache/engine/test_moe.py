"""Mixtures of experts: attention and dense layers are served, shared experts too; experts are refused by name."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from adapterd.gpu_cache.engine import LoRAEngine
from adapterd.gpu_cache.slots import Resident
from adapterd.loader.base_model import BaseModule, BaseSpec, ModuleKind
from adapterd.loader.checks import examine_path
from adapterd.loader.errors import AdapterdError, Code
from fakes.merged import Composition, merged_model
from fakes.packages import write_package
from fakes.static_cache import Adapter, StaticCache

VOCAB, TIME = 96, 7
COMMON = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "initializer_range": 0.15, "experts_implementation": "eager",
}  # fmt: skip
ATTENTION = {f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
SHARED = {f"mlp.shared_expert.{name}" for name in ("gate_proj", "up_proj", "down_proj")}


def mixtral() -> nn.Module:
    import transformers as t

    return t.MixtralForCausalLM(t.MixtralConfig(num_local_experts=4, num_key_value_heads=2, **COMMON))


def qwen2_moe() -> nn.Module:
    import transformers as t

    config = t.Qwen2MoeConfig(
        num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=24, num_experts_per_tok=2,
        num_key_value_heads=2, mlp_only_layers=[0], **COMMON,
    )  # fmt: skip
    return t.Qwen2MoeForCausalLM(config)


def qwen3_moe() -> nn.Module:
    import transformers as t

    config = t.Qwen3MoeConfig(
        num_experts=4, moe_intermediate_size=16, num_experts_per_tok=2, num_key_value_heads=2, head_dim=8, **COMMON
    )
    return t.Qwen3MoeForCausalLM(config)


def deepseek_v3() -> nn.Module:
    import transformers as t

    config = t.DeepseekV3Config(
        n_routed_experts=4, moe_intermediate_size=16, n_shared_experts=1, num_experts_per_tok=2, n_group=2,
        first_k_dense_replace=1, topk_group=1, q_lora_rank=16, kv_lora_rank=8, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=8, num_key_value_heads=4, **COMMON,
    )  # fmt: skip
    return t.DeepseekV3ForCausalLM(config)


MLA = {f"self_attn.{n}" for n in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")}
MODELS: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "mixtral": (mixtral, ATTENTION),
    "qwen2_moe": (qwen2_moe, ATTENTION | SHARED | {"mlp.shared_expert_gate"}),
    "qwen3_moe": (qwen3_moe, ATTENTION),
    "deepseek_v3": (deepseek_v3, MLA | {f"mlp.shared_experts.{n}" for n in ("gate_proj", "up_proj", "down_proj")}),
}


def built(name: str) -> nn.Module:
    torch.manual_seed(7)
    return MODELS[name][0]().eval().requires_grad_(False)


def spec_of(model: nn.Module, name: str) -> BaseSpec:
    return BaseSpec.from_module(model, id=f"tests/{name}", revision="e" * 40)


def tokens(rows: int) -> Tensor:
    return torch.randint(0, VOCAB, (rows, TIME), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", MODELS)
def test_attention_dense_and_shared_layers_are_served(name: str) -> None:
    """Each row as a model with merged weights has it; experts see other rows of the step, and are let be."""
    model, plain = built(name), built(name)
    cache = StaticCache(spec_of(model, name), n_pages=900)
    engine = LoRAEngine(model, cache)
    last = {p.removeprefix("model.layers.1.") for p in engine.served if p.startswith("model.layers.1.")}
    assert last == MODELS[name][1]
    everything = cache.add(dict.fromkeys(engine.served, 5), seed=1)
    some = cache.add({p: 3 for p in engine.served if ".1." in p}, seed=2)
    mixes: list[Composition] = [[(everything, 1.0)], [], [(some, 1.0)], [(some, 0.5), (everything, -0.75)]]
    ids = tokens(len(mixes))
    with engine.step([(cache.lease(*mix) if mix else None, TIME) for mix in mixes]) as step:
        logits = model(input_ids=ids).logits
    assert step.receipt.not_run == ()
    assert step.receipt.layer_calls == len(engine.served)
    for row, mix in enumerate(mixes):
        wanted = merged_model(plain, mix)(input_ids=ids[row : row + 1]).logits[0]
        torch.testing.assert_close(logits[row].double(), wanted, rtol=0, atol=1e-4)
        if mix:
            assert (wanted - plain(input_ids=ids[row : row + 1]).logits[0]).abs().max() > 0.02


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_same_as_peft(tmp_path: Path) -> None:
    import peft

    model = built("qwen2_moe")
    cache = StaticCache(spec_of(model, "qwen2_moe"), n_pages=900)
    names = {p for p in LoRAEngine(model, cache).served if p.endswith(("q_proj", "o_proj", "shared_expert.up_proj"))}
    adapter = cache.add(dict.fromkeys(names, 4), seed=3)
    config = peft.LoraConfig(r=4, lora_alpha=4, target_modules=sorted(names))
    theirs = peft.get_peft_model(copy.deepcopy(built("qwen2_moe")), config).eval()
    for path, factors in adapter.modules.items():
        layer = theirs.base_model.model.get_submodule(path)
        layer.lora_A["default"].weight.data = factors.a.clone()
        layer.lora_B["default"].weight.data = factors.b * factors.scaling
    fresh = built("qwen2_moe")
    with LoRAEngine(fresh, cache) as engine, engine.step([(None, TIME), (cache.lease(adapter), TIME)]):
        got = fresh(input_ids=tokens(2)).logits[1]
    wanted = theirs(input_ids=tokens(2)[1:]).logits[0]
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)


# --- rows


class Routed(nn.Module):
    """A layer of experts under a name that no table knows them by: each sees the rows that were sent to it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.dense = nn.Linear(8, 8)
        setattr(self, name, nn.ModuleList(nn.Linear(8, 8) for _ in range(2)))
        self.parts = name

    def forward(self, x: Tensor) -> Tensor:
        x = self.dense(x)
        first = x[:, 0] > x[:, 0].median()
        out = torch.empty_like(x)
        for where, expert in zip((first, ~first), getattr(self, self.parts), strict=True):
            out[where] = expert(x[where])
        return out


@pytest.mark.parametrize("adapted", [False, True])
def test_experts_under_another_name_are_an_error_and_no_wrong_result(adapted: bool) -> None:
    torch.manual_seed(1)
    model = nn.ModuleDict({"mlp": Routed("specialists")})
    cache = StaticCache(spec_of(model, "routed"))
    lease = cache.lease(cache.add({"mlp.dense": 2}, seed=1)) if adapted else None
    x = torch.randn(6, 8)
    with LoRAEngine(model, cache) as engine:
        with pytest.raises(AdapterdError) as caught, engine.step([(lease, 6)]):
            model["mlp"](x)
        assert caught.value.code is Code.ROWS_MISMATCH
        assert caught.value.problem.where.startswith("mlp.specialists.")
    with LoRAEngine(model, cache, targets=["mlp.dense"]) as engine, engine.step([(lease, 6)]) as step:
        assert model["mlp"](x).shape == (6, 8)
    assert step.receipt.not_run == ()


def test_one_linear_an_expert_is_not_wrapped() -> None:
    model = nn.ModuleDict({"mlp": Routed("experts")})
    base = spec_of(model, "routed")
    assert {(m.path, m.kind) for m in base.modules} == {
        ("mlp.dense", ModuleKind.LINEAR),
        ("mlp.experts", ModuleKind.EXPERTS),
    }
    cache = StaticCache(base)
    with LoRAEngine(model, cache) as engine:
        assert engine.served == {"mlp.dense"}
        with engine.step([(cache.lease(cache.add({"mlp.dense": 2}, seed=1)), 6)]):
            assert model["mlp"](torch.randn(6, 8)).isfinite().all()


@pytest.mark.parametrize("name", ["experts.0", "mlp.experts.1", "mlp.experts"])
def test_no_target_makes_an_expert_served(name: str) -> None:
    model = nn.ModuleDict({"mlp": Routed("experts")})
    with pytest.raises(ValueError, match=r"experts"):
        LoRAEngine(model, StaticCache(spec_of(model, "routed")), targets=[name])


# --- refusals by name


def of_other_base(cache: StaticCache, path: str) -> Adapter:
    """An adapter that some other table let through."""
    wide = BaseSpec.of([BaseModule(path, ModuleKind.LINEAR, 32, 32)], id="tests/other", revision="f" * 40)
    own, cache.base = cache.base, wide
    adapter = cache.add({path: 2}, seed=5)
    cache.base = own
    return adapter


@pytest.mark.parametrize("path", ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts.3.w1"])
def test_an_adapter_of_experts_is_refused_by_the_engine(path: str) -> None:
    model = built("mixtral")
    cache = StaticCache(spec_of(model, "mixtral"), n_pages=900)
    with LoRAEngine(model, cache) as engine:
        adapter = of_other_base(cache, path)
        assert isinstance(adapter.resident, Resident)
        with pytest.raises(AdapterdError) as caught:
            engine.check(cache.lease(adapter))
    assert caught.value.code is Code.MODULE_NOT_SERVED
    assert caught.value.problem.where == path
    assert "experts" in caught.value.problem.message
    assert "targets" not in caught.value.problem.hint


@pytest.mark.parametrize("module", ["mlp.experts.0.w1", "block_sparse_moe.experts.3.w2", "mlp.experts"])
def test_an_adapter_of_experts_is_refused_at_verify(module: str, tmp_path: Path) -> None:
    base = spec_of(built("mixtral"), "mixtral")
    problem = verdict_with(tmp_path, base, f"model.layers.0.{module}")
    assert problem.code is Code.UNSUPPORTED_FEATURE
    assert problem.where == f"model.layers.0.{module}"
    assert "experts" in problem.message
    assert "attention" in problem.hint


@pytest.mark.parametrize("module", ["mlp.gate", "block_sparse_moe.gate", "mlp.router"])
def test_an_adapter_of_the_router_is_refused_by_name(module: str, tmp_path: Path) -> None:
    base = spec_of(built("mixtral"), "mixtral")
    problem = verdict_with(tmp_path, base, f"model.layers.0.{module}")
    assert problem.code is Code.UNSUPPORTED_FEATURE
    assert "router" in problem.message


def test_a_gate_without_experts_beside_it_is_no_router(tmp_path: Path) -> None:
    problem = verdict_with(tmp_path, spec_of(built("mixtral"), "mixtral"), "model.layers.0.self_attn.gate")
    assert problem.code is Code.UNKNOWN_MODULE


def verdict_with(folder: Path, base: BaseSpec, module: str):  # type: ignore[no-untyped-def]
    """What is said of a package that adapts q_proj and one module more."""
    wide = BaseSpec.of(
        [m for m in base.modules if m.path != module] + [BaseModule(module, ModuleKind.LINEAR, 32, 4)],
        id=base.id, revision=base.revision,
    )  # fmt: skip
    q_proj = "model.layers.0.self_attn.q_proj"
    written = write_package(folder / "p", base=wide, modules=(q_proj, module), rank=2)
    verdict = examine_path(written.directory, base)
    assert verdict.manifest is None
    return verdict.problems[0]


@pytest.mark.parametrize(
    "parameters", [["mlp.experts.gate_up_proj"], ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]]
)
@pytest.mark.filterwarnings("ignore")
def test_what_peft_makes_of_experts_is_refused_at_verify(parameters: list[str], tmp_path: Path) -> None:
    """PEFT's `target_parameters`: LoRA of stacked experts."""
    import peft

    model = built("mixtral")
    base = spec_of(model, "mixtral")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=parameters, init_lora_weights=False)
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "p")
    (tmp_path / "p" / "README.md").unlink()
    written = json.loads((tmp_path / "p" / "adapter_config.json").read_text())
    written |= {"base_model_name_or_path": base.id, "revision": base.revision}
    (tmp_path / "p" / "adapter_config.json").write_text(json.dumps(written))
    verdict = examine_path(tmp_path / "p", base)
    assert verdict.manifest is None
    assert verdict.problems[0].code is Code.UNSUPPORTED_FEATURE, verdict.problems
    assert "experts" in verdict.problems[0].message
