"""Names that wrappers leave behind, proved by the base; and everything that cannot be proved."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapterd.loader.base_model import BaseModule, BaseSpec, ModuleKind
from adapterd.loader.convert.names import Step, renames
from adapterd.loader.errors import Code, Refused
from adapterd.loader.formats.tensor_names import PREFIX
from fakes.packages import TINY_REVISION, tiny_llama_spec

BASE = tiny_llama_spec()
Q = "model.layers.0.self_attn.q_proj"
PLAIN = f"{PREFIX}{Q}.lora_A.weight"


def codes(*names: str, base: BaseSpec = BASE) -> list[Code]:
    with pytest.raises(Refused) as caught:
        renames(names, base)
    return [p.code for p in caught.value.problems]


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        (PLAIN, ()),
        (f"_orig_mod.{PLAIN}", (Step.WRAPPER,)),
        (f"module.{PLAIN}", (Step.WRAPPER,)),
        (f"module._orig_mod.{PLAIN}", (Step.WRAPPER,)),
        (f"{PREFIX}_orig_mod.{Q}.lora_A.weight", (Step.WRAPPER,)),
        (f"{PREFIX}model.layers.0._checkpoint_wrapped_module.self_attn.q_proj.lora_A.weight", (Step.WRAPPER,)),
        (f"_fsdp_wrapped_module.{PREFIX}model._fsdp_wrapped_module.layers.0.self_attn.q_proj.lora_A.weight",
         (Step.WRAPPER,)),
        (f"{PREFIX}{PLAIN}", (Step.DOUBLED,)),
        (f"{PREFIX}{PREFIX}{PLAIN}", (Step.DOUBLED,)),
        (f"{Q}.lora_A.weight", (Step.MISSING,)),
        (f"module.{Q}.lora_A.weight", (Step.WRAPPER, Step.MISSING)),
        (f"{PREFIX}{Q}.lora_A.default.weight", (Step.ADAPTER,)),
        (f"{PREFIX}{Q}.lora_A.finance.weight", (Step.ADAPTER,)),
        (f"_orig_mod.{PREFIX}{PREFIX}{Q}.lora_A.default.weight", (Step.WRAPPER, Step.DOUBLED, Step.ADAPTER)),
    ],
)  # fmt: skip
def test_one_module_can_be_meant(name: str, steps: tuple[Step, ...]) -> None:
    (found,) = renames([name], BASE)
    assert (found.old, found.new, found.module, found.steps) == (name, PLAIN, Q, steps)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        (f"{PREFIX}model.language_model.layers.0.self_attn.q_proj.lora_A.weight", Code.UNKNOWN_MODULE),
        (f"{PREFIX}layers.0.self_attn.q_proj.lora_A.weight", Code.UNKNOWN_MODULE),
        (f"{PREFIX}model.layers.9.self_attn.q_proj.lora_A.weight", Code.UNKNOWN_MODULE),
        (f"{PREFIX}model.module.layers.0.self_attn.q_proj.lora_A.weight", Code.UNKNOWN_MODULE),
        (f"{PREFIX}model.embed_tokens.lora_A.weight", Code.UNKNOWN_MODULE),
        (f"{PREFIX}{Q}.lora_A", Code.UNKNOWN_KEY),
        (f"{PREFIX}{Q}.lora_down.weight", Code.UNKNOWN_KEY),
        (f"{PREFIX}{Q}.alpha", Code.UNKNOWN_KEY),
        (f"{PREFIX}{Q}.weight", Code.UNKNOWN_KEY),
        (f"{Q}.lora_a", Code.UNKNOWN_KEY),
        (f"_orig_mod.{PREFIX}{Q}.lora_magnitude_vector", Code.UNSUPPORTED_FEATURE),
        (f"module.{PREFIX}score.weight", Code.UNSUPPORTED_FEATURE),
        (f"{PREFIX}{Q}.base_layer.bias", Code.UNSUPPORTED_FEATURE),
    ],
)
def test_what_cannot_be_proved_is_refused_by_its_own_name(name: str, code: Code) -> None:
    assert codes(name) == [code]
    with pytest.raises(Refused) as caught:
        renames([PLAIN, name], BASE)
    assert [p.where for p in caught.value.problems] == [name]


def test_two_spellings_of_one_tensor_are_refused() -> None:
    assert codes(PLAIN, f"module.{PLAIN}") == [Code.DUPLICATE_LOGICAL_KEY]
    assert codes(f"{PREFIX}{Q}.lora_A.one.weight", f"{PREFIX}{Q}.lora_B.two.weight") == [Code.UNKNOWN_KEY]
    assert Code.DUPLICATE_LOGICAL_KEY in codes(PLAIN, f"{PREFIX}{Q}.lora_A.default.weight")


def test_a_name_that_may_mean_two_modules_is_refused() -> None:
    twins = [BaseModule(path, ModuleKind.LINEAR, 8, 8) for path in ("module.q", "q")]
    base = BaseSpec.of(twins, id="tests/twins", revision=TINY_REVISION)
    assert codes(f"{PREFIX}module.q.lora_A.weight", base=base) == [Code.KEY_PREFIX]
    assert renames([f"{PREFIX}q.lora_A.weight"], base)[0].module == "q"


def test_a_refusal_has_one_problem_a_kind() -> None:
    names = [f"{PREFIX}model.layers.{i}.mlp.w{i}.lora_A.weight" for i in range(500)]
    with pytest.raises(Refused) as caught:
        renames(names, BASE)
    (problem,) = caught.value.problems
    assert "500 such tensors" in problem.message


parts = st.sampled_from(["_orig_mod", "module", "base_model", "model", "layers", "0", "self_attn", "q_proj", "x"])


@settings(deadline=None)
@given(st.lists(parts, max_size=9), st.sampled_from(["", ".default"]))
def test_whatever_is_renamed_is_a_module_and_stays_as_it_is_the_second_time(path: list[str], adapter: str) -> None:
    name = ".".join([*path, f"lora_A{adapter}", "weight"])
    try:
        (found,) = renames([name], BASE)
    except Refused:
        return
    assert BASE.module(found.module) is not None
    assert found.new == f"{PREFIX}{found.module}.lora_A.weight"
    assert name.split(".lora_A")[0].endswith(found.module.rpartition(".")[2])
    (again,) = renames([found.new], BASE)
    assert (again.new, again.steps) == (found.new, ())
