"""Real transformers models end to end: a mixed batch against one merged float64 model a composition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from adapterd.gpu_cache.engine import LoRAEngine
from adapterd.loader.base_model import BaseSpec, ModuleKind
from adapterd.loader.errors import AdapterdError, Code
from adapterd.loader.layout import Dtype
from fakes.merged import Composition, merged_model
from fakes.static_cache import StaticCache

VOCAB, TIME = 96, 7


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.15,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(7)
    config = GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.15,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return GPT2LMHeadModel(config).eval().requires_grad_(False)


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(7)
    config = BertConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, num_labels=3, initializer_range=0.15,
    )  # fmt: skip
    return BertForSequenceClassification(config).eval().requires_grad_(False)


MODELS = {"llama": llama, "gpt2": gpt2, "bert": bert}
HEADS = {"llama": {"lm_head"}, "gpt2": {"lm_head"}, "bert": {"bert.pooler.dense", "classifier"}}


def tokens(rows: int) -> Tensor:
    return torch.randint(0, VOCAB, (rows, TIME), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("name", MODELS)
def test_a_mixed_batch_equals_merged_models(name: str, dtype: Dtype) -> None:
    model, plain = MODELS[name](), MODELS[name]()
    base = BaseSpec.from_module(model, id=f"tests/{name}", revision="e" * 40)
    cache = StaticCache(base, n_pages=600)
    engine = LoRAEngine(model, cache)
    linears = {m.path for m in base.modules if m.kind is not ModuleKind.EMBEDDING}
    assert engine.served == linears - HEADS[name]
    everything = cache.add(dict.fromkeys(engine.served, 5), seed=1, dtype=dtype)
    some = cache.add({p: 3 for p in engine.served if ".1." in p}, seed=2, dtype=dtype)
    mixes: list[Composition] = [[(everything, 1.0)], [], [(some, 1.0)], [(some, 0.5), (everything, -0.75)]]
    ids = tokens(len(mixes))
    with engine.step([(cache.lease(*mix) if mix else None, TIME) for mix in mixes]) as step:
        logits = model(input_ids=ids).logits
    assert step.receipt.not_run == ()
    for row, mix in enumerate(mixes):
        wanted = merged_model(plain, mix)(input_ids=ids[row : row + 1]).logits[0]
        torch.testing.assert_close(logits[row].double(), wanted, rtol=0, atol=5e-5)
        if mix:
            assert (wanted - plain(input_ids=ids[row : row + 1]).logits[0]).abs().max() > 0.02


def test_generation_with_a_cache_of_keys_steps_by_its_own_rows() -> None:
    model = llama()
    base = BaseSpec.from_module(model, id="tests/llama", revision="e" * 40)
    cache = StaticCache(base, n_pages=600)
    engine = LoRAEngine(model, cache)
    adapter = cache.add(dict.fromkeys(engine.served, 4), seed=3)
    lease, ids = cache.lease(adapter), tokens(2)
    wanted = merged_model(llama(), [(adapter, 1.0)])
    with engine.step([(None, TIME), (lease, TIME)]):
        out = model(input_ids=ids, use_cache=True, logits_to_keep=1)
    following = out.logits[:, -1].argmax(-1, keepdim=True)
    with engine.step([(None, 1), (lease, 1)]):
        out = model(input_ids=following, cache=out.cache, use_cache=True)
    whole = torch.cat([ids, following], dim=1)
    expected = wanted(input_ids=whole[1:]).logits[0, -1]
    torch.testing.assert_close(out.logits[1, -1].double(), expected, rtol=0, atol=5e-5)


def test_an_adapter_on_the_head_is_refused_unless_the_head_is_a_target() -> None:
    model = llama()
    base = BaseSpec.from_module(model, id="tests/llama", revision="e" * 40)
    cache = StaticCache(base)
    adapter = cache.add({"lm_head": 2}, seed=1)
    engine = LoRAEngine(model, cache)
    with pytest.raises(AdapterdError) as caught:
        engine.check(cache.lease(adapter))
    assert caught.value.code is Code.MODULE_NOT_SERVED
    engine.close()
    engine = LoRAEngine(model, cache, targets=["lm_head"])
    with engine.step([(cache.lease(adapter), TIME)]):
        logits = model(input_ids=tokens(1)).logits
    wanted = merged_model(llama(), [(adapter, 1.0)])(input_ids=tokens(1)).logits
    torch.testing.assert_close(logits.double(), wanted, rtol=0, atol=5e-5)
