"""Module tables: the same from a live model, from its files, and from a table file."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from adapterd.loader.base_files import read_config, stored_tensors
from adapterd.loader.base_meta import meta_model
from adapterd.loader.base_model import BaseModule, BaseSpec, ModuleKind
from adapterd.loader.errors import Code, Failed, NotFound
from fakes.packages import TINY_REVISION, tiny_llama_spec

KW: Any = {"id": "tests/base", "revision": TINY_REVISION}


def header_only(path: Path, shapes: dict[str, list[int]], dtype: str = "BF16") -> None:
    """A safetensors file that is all header: the table reads no further, so neither do we write more."""
    entries = {name: {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    text = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)


LLAMA = {
    "model.embed_tokens.weight": [96, 32],
    "model.layers.0.self_attn.q_proj.weight": [32, 32],
    "model.layers.0.mlp.up_proj.weight": [64, 32],
    "model.layers.0.input_layernorm.weight": [32],
    "lm_head.weight": [96, 32],
}


def model_folder(folder: Path, shapes: dict[str, list[int]], dtype: str = "BF16", **config: Any) -> Path:
    fields = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"} | config
    (folder / "config.json").write_text(json.dumps(fields))
    header_only(folder / "model.safetensors", shapes, dtype)
    return folder


def refusal(folder: Path) -> tuple[Code, str, str]:
    with pytest.raises(Failed) as caught:
        BaseSpec.from_directory(folder, **KW)
    return caught.value.code, caught.value.problem.where, caught.value.problem.message


def test_a_llama_folder_gives_its_linears_and_embedding(tmp_path: Path) -> None:
    spec = BaseSpec.from_directory(model_folder(tmp_path, LLAMA), **KW)
    assert spec.modules == (
        BaseModule("lm_head", ModuleKind.LINEAR, 32, 96),
        BaseModule("model.embed_tokens", ModuleKind.EMBEDDING, 96, 32),
        BaseModule("model.layers.0.mlp.up_proj", ModuleKind.LINEAR, 32, 64),
        BaseModule("model.layers.0.self_attn.q_proj", ModuleKind.LINEAR, 32, 32),
    )
    assert spec.pin.module_table_digest == spec.table_digest
    assert spec.module("model.layers.0.self_attn.Q_proj") is None


def test_shards_give_the_same_table_as_one_file(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "many").mkdir()
    whole = BaseSpec.from_directory(model_folder(tmp_path / "one", LLAMA), **KW)
    folder = model_folder(tmp_path / "many", {})
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for i, (name, shape) in enumerate(LLAMA.items()):
        shard = f"model-{i + 1:05d}-of-00005.safetensors"
        header_only(folder / shard, {name: shape})
        weight_map[name] = shard
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert BaseSpec.from_directory(folder, **KW) == whole


def test_a_tied_head_is_added_from_the_embedding(tmp_path: Path) -> None:
    stored = {k: v for k, v in LLAMA.items() if k != "lm_head.weight"}
    spec = BaseSpec.from_directory(model_folder(tmp_path, stored, tie_word_embeddings=True), **KW)
    assert spec.module("lm_head") == BaseModule("lm_head", ModuleKind.LINEAR, 32, 96)


def test_a_head_that_is_neither_stored_nor_tied_is_refused(tmp_path: Path) -> None:
    stored = {k: v for k, v in LLAMA.items() if k != "lm_head.weight"}
    code, where, message = refusal(model_folder(tmp_path, stored, tie_word_embeddings=False))
    assert (code, where) == (Code.BASE_TABLE_INVALID, "lm_head")
    assert "not tied" in message


def test_gpt2_files_without_the_prefix_get_it(tmp_path: Path) -> None:
    stored = {"wte.weight": [96, 32], "wpe.weight": [64, 32], "h.0.attn.c_attn.weight": [32, 96]}
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}
    spec = BaseSpec.from_directory(model_folder(tmp_path, stored, **config), **KW)
    assert spec.module("transformer.h.0.attn.c_attn") == BaseModule(
        "transformer.h.0.attn.c_attn", ModuleKind.CONV1D, 32, 96
    )
    assert spec.module("lm_head") is not None


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"architectures": []}, "architectures"),
        ({"architectures": ["A", "B"]}, "architectures"),
        ({"model_type": 7}, "model_type"),
    ],
)
def test_a_config_that_does_not_say_what_it_is_is_refused(tmp_path: Path, change: dict[str, Any], word: str) -> None:
    code, where, _ = refusal(model_folder(tmp_path, LLAMA, **change))
    assert code is Code.BASE_TABLE_INVALID
    assert word in where


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 8,
        struct.pack("<Q", 40) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 5) + b"{nope",
        struct.pack("<Q", 34) + b'{"a.weight":{"shape":[1]},"a.weigh',
        struct.pack("<Q", 25) + b'{"a.weight":{"shape":-1}}',
    ],
)
def test_a_broken_weight_file_is_refused(tmp_path: Path, data: bytes) -> None:
    folder = model_folder(tmp_path, LLAMA)
    (folder / "model.safetensors").write_bytes(data)
    assert refusal(folder)[0] is Code.BASE_TABLE_INVALID


@pytest.mark.parametrize("shape", [[10**15] * 400, [1 << 63], [1] * 65, [0] * 100_000])
def test_a_shape_that_no_tensor_has_is_refused_before_anybody_multiplies_it(tmp_path: Path, shape: list[int]) -> None:
    """The product may be a number that takes minutes, and that Python does not write out."""
    folder = model_folder(tmp_path, {**LLAMA, "extra": shape})
    with pytest.raises(Failed, match="has a shape that no tensor has") as caught:
        list(stored_tensors(folder))
    assert (caught.value.code, caught.value.problem.where) == (Code.BASE_TABLE_INVALID, "extra")


def test_a_shape_as_large_as_can_be_is_read(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, {"extra": [(1 << 63) - 1] * 64})
    assert [len(tensor.shape) for tensor in stored_tensors(folder)] == [64]


def test_an_index_cannot_lead_out_of_the_folder(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, LLAMA)
    index = {"weight_map": {"lm_head.weight": "../model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "outside" in refusal(folder)[2]


def test_missing_things_are_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        BaseSpec.from_directory(tmp_path / "nowhere", **KW)
    with pytest.raises(NotFound):
        BaseSpec.from_directory(tmp_path, **KW)
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaModel"], "model_type": "llama"}')
    with pytest.raises(NotFound) as caught:
        BaseSpec.from_directory(tmp_path, **KW)
    assert "model.safetensors" in caught.value.problem.where


def test_json_and_file_round_trip(tmp_path: Path) -> None:
    spec = tiny_llama_spec()
    assert BaseSpec.from_json(spec.as_json()) == spec
    spec.save(tmp_path / "base.json")
    again = BaseSpec.load(tmp_path / "base.json")
    assert again == spec
    assert again.table_digest == spec.table_digest
    with pytest.raises(NotFound):
        BaseSpec.load(tmp_path / "other.json")


def test_the_digest_follows_the_table_and_not_the_names() -> None:
    spec = tiny_llama_spec()
    renamed = BaseSpec(id="tests/other", revision="0" * 40, modules=spec.modules)
    assert renamed.table_digest == spec.table_digest
    assert BaseSpec(spec.id, spec.revision, spec.modules[1:]).table_digest != spec.table_digest


def edited(**changes: Any) -> dict[str, Any]:
    body = tiny_llama_spec().as_json()
    for name, value in changes.items():
        if value is ...:
            del body[name]
        else:
            body[name] = value
    return body


MODULE = {"path": "a", "kind": "linear", "in_features": 1, "out_features": 1}


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ([], "table"),
        (edited(schema="adapterd.base/2"), "schema"),
        (edited(schema=...), "schema"),
        (edited(more=1), "more"),
        (edited(id=""), "id"),
        (edited(id="a\nb"), "id"),
        (edited(id=" a"), "id"),
        (edited(modules=[]), "modules"),
        (edited(modules={}), "modules"),
        (edited(modules=[MODULE, MODULE]), "modules"),
        (edited(modules=[MODULE | {"path": "b"}, MODULE]), "modules"),
        (edited(modules=[MODULE | {"path": ""}]), "modules[0].path"),
        (edited(modules=[MODULE | {"kind": "conv2d"}]), "modules[0].kind"),
        (edited(modules=[MODULE | {"in_features": 0}]), "modules[0].in_features"),
        (edited(modules=[MODULE | {"in_features": True}]), "modules[0].in_features"),
        (edited(modules=[MODULE | {"out_features": 1 << 40}]), "modules[0].out_features"),
        (edited(modules=[MODULE | {"bias": False}]), "modules[0].bias"),
        (edited(modules=["a"]), "modules[0]"),
    ],
)
def test_a_table_that_is_not_strict_is_refused(body: Any, where: str) -> None:
    with pytest.raises(Failed) as caught:
        BaseSpec.from_json(body)
    assert caught.value.code is Code.BASE_TABLE_INVALID
    assert where in caught.value.problem.where


def test_a_branch_does_not_pin_a_base() -> None:
    with pytest.raises(Failed) as caught:
        BaseSpec.from_json(edited(revision="main"))
    assert caught.value.code is Code.REF_INVALID


@pytest.mark.parametrize("text", ["", "{", '{"id": 1, "id": 2}', '{"id": NaN}', "[" * 100_000, "\xff"])
def test_a_table_file_that_is_no_json_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "base.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(Failed) as caught:
        BaseSpec.load(tmp_path / "base.json")
    assert caught.value.code is Code.BASE_TABLE_INVALID


# ------------------------------------------------------------------ live models

FAMILIES: dict[str, dict[str, Any]] = {
    "GemmaForCausalLM": {"head_dim": 8},
    "PhiForCausalLM": {},
    "Olmo2ForCausalLM": {},
    "GraniteForCausalLM": {},
    "CohereForCausalLM": {},
    "StableLmForCausalLM": {},
    "Starcoder2ForCausalLM": {},
    "SmolLM3ForCausalLM": {"pad_token_id": 0},
    "GPTJForCausalLM": {"n_embd": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 4},
    "BloomForCausalLM": {"n_layer": 1, "n_head": 4},
    "Qwen2MoeForCausalLM": {
        "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "BertForMaskedLM": {},
    "RobertaForSequenceClassification": {},
    "RobertaForMaskedLM": {},
    "DistilBertForMaskedLM": {"dim": 32, "hidden_dim": 64, "n_layers": 1, "n_heads": 4},
    "MT5ForConditionalGeneration": {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4},
}  # fmt: skip
SMALL = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("architecture", FAMILIES)
def test_files_and_live_model_give_one_table(tmp_path: Path, architecture: str) -> None:
    import transformers

    kind: Any = getattr(transformers, architecture)
    model = kind(kind.config_class(**SMALL | FAMILIES[architecture]))
    model.save_pretrained(tmp_path)
    live = BaseSpec.from_module(model, **KW)
    assert live == BaseSpec.from_directory(tmp_path, **KW)
    assert live == BaseSpec.from_module(meta_model(read_config(tmp_path)), **KW)
    assert any(m.kind is ModuleKind.LINEAR for m in live.modules)


def test_any_torch_module_has_a_table() -> None:
    import torch

    class Quantised(torch.nn.Module):
        in_features, out_features = 16, 8

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.LayerNorm(16))
            self.second = Quantised()
            self.experts = torch.nn.ModuleList([torch.nn.Linear(8, 8)])
            self.gate = torch.nn.Linear(8, 1)

    with torch.device("meta"):
        spec = BaseSpec.from_module(Model(), **KW)
    assert spec.modules == (
        BaseModule("experts", ModuleKind.EXPERTS, 0, 0),
        BaseModule("first.0", ModuleKind.LINEAR, 4, 16),
        BaseModule("second", ModuleKind.LINEAR, 16, 8),
    )
    assert BaseSpec.from_json(spec.as_json()) == spec
