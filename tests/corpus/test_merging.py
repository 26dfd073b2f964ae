"""The merged model is PEFT's merged model, and the served one."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch

from adapterd.gpu_cache import AdapterCache, CacheConfig
from adapterd.gpu_cache.engine import LoRAEngine
from adapterd.loader.base_model import BaseSpec
from corpus.good.bases import DTYPES, base_revision, build_base
from corpus.good.cases import case_table
from corpus.good.making import make_case
from corpus.good.references import run_model
from corpus.merging import loaded, merging
from corpus.run_corpus import make_corpus, table
from corpus.verdicts import Corpus
from fakes.commands import Commands
from fakes.publisher import FolderPublisher

pytestmark = pytest.mark.filterwarnings("ignore")
CASES = ("llama_all7", "llama_patterns_rslora", "gpt2_conv1d", "phi3_fused", "t5_qv", "falcon_qkv", "llama_dora")


def test_weights_are_those_that_peft_merges(tmp_path: Path) -> None:
    cases = case_table()
    entries = [make_case(name, cases[name], tmp_path) for name in CASES]
    assert len(entries) == len(CASES)
    (tmp_path / "good/index.json").write_text(json.dumps([{"case": name} for name in CASES]))
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/index.json").write_text(json.dumps({"cases": [], "limits": {}}))
    outcomes = list(merging(Corpus(tmp_path)))
    assert [o.case for o in outcomes] == list(CASES)
    assert not (short := [o for o in outcomes if not o.passed]), table(short)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_good_adapter_is_merged_as_peft_merges_it(tmp_path: Path) -> None:
    make_corpus(tmp_path)
    outcomes = list(merging(Corpus(tmp_path)))
    assert len(outcomes) > 60
    assert not (short := [o for o in outcomes if not o.passed]), table(short)


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3"])
def test_the_merged_model_says_what_the_served_one_says(tmp_path: Path, name: str, dtype: str) -> None:
    targets = {"gpt2": ("c_attn", "c_fc"), "phi3": ("qkv_proj", "down_proj")}.get(name, ("q_proj", "up_proj"))
    base = tmp_path / "base"
    build_base(name).to(DTYPES[dtype]).save_pretrained(base)
    revision = base_revision(name)
    spec = BaseSpec.from_directory(base, id=f"corpus/tiny-{name}", revision=revision)
    publisher = FolderPublisher(tmp_path / "published", spec)
    fan = {"fan_in_fan_out": True} if name == "gpt2" else {}
    written = publisher.publish("acme", "one", rank=4, alpha=6, modules=targets, dtype=dtype, **fan)
    named = ("--base-id", spec.id, "--base-revision", spec.revision)
    shell = Commands(tmp_path / "home")
    shell.home.mkdir()
    shell.json("merge", written.directory, "--base", base, *named, "--out", tmp_path / "merged")

    plain, served = run_model(loaded(base, DTYPES[dtype])), _served(base, spec, publisher, DTYPES[dtype])
    merged = run_model(loaded(tmp_path / "merged", DTYPES[dtype]))
    moved = float((served - plain).abs().max())
    assert moved > 0.5
    assert float((merged - served).abs().max()) < moved * {"F32": 1e-5, "BF16": 5e-2}[dtype]
    assert _dtypes(base) == _dtypes(tmp_path / "merged")


def _served(base: Path, spec: BaseSpec, publisher: FolderPublisher, dtype: torch.dtype) -> torch.Tensor:
    model = loaded(base, dtype)
    config = CacheConfig(vram_bytes=16 << 20, host_bytes=16 << 20)
    with (
        AdapterCache(config, base=spec, source=publisher.source, trust=publisher.trust) as cache,
        LoRAEngine(model, cache) as engine,
        cache.acquire("acme/one", tenant="acme") as lease,
    ):
        lease.wait(60)
        with engine.step([(lease, 16)]):
            return run_model(model)


def _dtypes(folder: Path) -> dict[str, str]:
    data = (folder / "model.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    return {name: info["dtype"] for name, info in header.items() if name != "__metadata__"}
