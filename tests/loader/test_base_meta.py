"""Tables from the class that a config names: what headers do not say, without weights and without guesses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from adapterd.loader.base_directory import Undecided, modules_of_headers
from adapterd.loader.base_files import read_config, stored_tensors
from adapterd.loader.base_meta import MAX_LAYERS, meta_model
from adapterd.loader.base_model import BaseSpec, ModuleKind
from adapterd.loader.errors import Code, Failed
from fakes.packages import TINY_REVISION
from fakes.quantised import LAYOUTS, quantise, write_quantised

KW: Any = {"id": "tests/base", "revision": TINY_REVISION}
SMALL: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore")


def live(architecture: str, **config: Any) -> Any:
    import transformers

    kind = getattr(transformers, architecture)
    return kind(kind.config_class(**SMALL | config))


def meta_table(config: dict[str, Any]) -> BaseSpec:
    return BaseSpec.from_module(meta_model(config), **KW)


def undecided(folder: Path) -> Undecided:
    with pytest.raises(Undecided) as caught:
        tuple(modules_of_headers(read_config(folder), stored_tensors(folder)))
    return caught.value


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_weights_are_the_classs_business(tmp_path: Path, layout: str, announced: bool) -> None:
    """Whether or not the config says that they are packed: no header of theirs gives a table, or half of one."""
    model = live("LlamaForCausalLM")
    folder = write_quantised(model, tmp_path, layout, announced=announced)
    assert ("quantization_config" in undecided(folder).where) is announced
    table = meta_table(read_config(folder))
    assert table == BaseSpec.from_module(model, **KW)
    assert table.table_digest == BaseSpec.from_module(quantise(model), **KW).table_digest


FURTHER: dict[str, dict[str, Any]] = {
    "GPTNeoXForCausalLM": {},
    "DeepseekV3ForCausalLM": {
        "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "kv_lora_rank": 8,
        "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": 0,
        "moe_intermediate_size": 16,
    },
    "GptOssForCausalLM": {"num_local_experts": 4, "head_dim": 8, "layer_types": ["full_attention"]},
    "MambaForCausalLM": {"state_size": 4},
    "ElectraForSequenceClassification": {"embedding_size": 16},
    "BartForConditionalGeneration": {
        "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    },
}  # fmt: skip


@pytest.mark.parametrize("architecture", FURTHER)
def test_model_types_without_rules_have_one_table_on_the_meta_device_and_live(
    tmp_path: Path, architecture: str
) -> None:
    model = live(architecture, **FURTHER[architecture])
    model.save_pretrained(tmp_path)
    assert undecided(tmp_path).where == "config.json.model_type"
    table = meta_table(read_config(tmp_path))
    assert table == BaseSpec.from_module(model, **KW)
    assert any(m.kind is ModuleKind.LINEAR for m in table.modules)


def llama_config(**change: Any) -> dict[str, Any]:
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SMALL, **change}


@pytest.mark.parametrize(
    ("change", "where", "words"),
    [
        ({"model_type": "who_knows"}, "config.json.model_type", "of the type 'llama'"),
        ({"architectures": ["NoSuchForCausalLM"]}, "config.json.architectures", "has no class NoSuch"),
        ({"architectures": ["Trainer"]}, "config.json.architectures", "has no class Trainer"),
        ({"architectures": ["pipeline"]}, "config.json.architectures", "has no class"),
        ({"architectures": ["Mine"], "auto_map": {}}, "config.json.architectures", "never run"),
        ({"num_hidden_layers": MAX_LAYERS + 1}, "config.json.num_hidden_layers", "at most"),
        ({"text_config": {"n_layer": 1 << 60}}, "config.json.n_layer", "at most"),
        ({"hidden_size": "wide"}, "config.json", "cannot be made"),
        ({"num_attention_heads": 0}, "config.json", "cannot be made"),
    ],
)
def test_a_config_that_makes_no_model_is_refused(change: dict[str, Any], where: str, words: str) -> None:
    with pytest.raises(Failed) as caught:
        meta_model(llama_config(**change))
    assert caught.value.code is Code.BASE_TABLE_INVALID
    assert caught.value.problem.where == where
    assert words in caught.value.problem.message


def test_a_config_chooses_no_code() -> None:
    """Kernels may be named by an address to fetch them from, and classes by a file in the model's folder."""
    change = {
        "attn_implementation": "nobody/kernel", "_attn_implementation": "nobody/kernel",
        "auto_map": {"AutoModelForCausalLM": "modeling.Mine"}, "experts_implementation": "nobody/kernel",
    }  # fmt: skip
    assert meta_table(llama_config(**change)) == meta_table(llama_config())


def test_without_the_libraries_it_says_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_quantised(live("LlamaForCausalLM"), tmp_path, "awq")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(Failed) as caught:
        BaseSpec.from_directory(folder, **KW)
    problem = caught.value.problem
    assert problem.where == "config.json.quantization_config"
    assert problem.message.endswith("transformers is not installed")
    assert "adapterd[transformers]" in problem.hint
    assert "BaseSpec.from_module" in problem.hint


# ------------------------------------------------------------------ in the process of its own


def test_a_quantised_folder_gives_the_live_models_table(tmp_path: Path) -> None:
    model = live("LlamaForCausalLM")
    spec = BaseSpec.from_directory(write_quantised(model, tmp_path, "gptq"), **KW)
    assert spec == BaseSpec.from_module(quantise(model), **KW)


@pytest.mark.slow
def test_a_config_of_another_model_is_noticed(tmp_path: Path) -> None:
    folder = write_quantised(live("LlamaForCausalLM"), tmp_path, "bitsandbytes")
    config = read_config(folder)
    for change, words in (
        ({"vocab_size": 97}, "has shape [96, 32], by config.json it is [97, 32]"),
        ({"architectures": ["BertForMaskedLM"], "model_type": "bert"}, "hold none of the model's modules"),
        ({"model_type": "who_knows"}, "of the type 'llama'"),
    ):
        (folder / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(Failed) as caught:
            BaseSpec.from_directory(folder, **KW)
        assert words in caught.value.problem.message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attempt", "words"),
    [
        ("__import__('socket').create_connection(('127.0.0.1', 9))", "PermissionError: socket."),
        ("__import__('os').system('true')", "PermissionError: os.system"),
        ("__import__('pickle').loads(b'cos\\nsystem\\n.')", "PermissionError: pickle.find_class"),
        ("__import__('torch').nn.ModuleList(map(__import__('torch').nn.Identity, range(250_001)))", "more than 250000"),
        ("bytearray(20 << 30)", "MemoryError"),
    ],
)
def test_the_process_that_builds_a_model_reaches_nothing_and_has_an_end(attempt: str, words: str) -> None:
    code = f"from adapterd.loader import base_meta; import torch; base_meta._limit_this_process(); {attempt}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert words in done.stderr
