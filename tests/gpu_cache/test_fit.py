"""What is said from manifests is what the cache's own counters say, and so many fit and no more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import nn

from adapterd.gpu_cache import AdapterCache, CacheConfig
from adapterd.gpu_cache.engine import LoRAEngine
from adapterd.gpu_cache.engine.fast_path import FastPath
from adapterd.gpu_cache.engine.layers import find_sites
from adapterd.gpu_cache.fit import PLAN_BYTES, Footprint, beyond_tables, footprint, in_turn
from adapterd.gpu_cache.host.loading import Dtypes
from adapterd.gpu_cache.slots import Resident
from adapterd.gpu_cache.table_shape import Matrix, TableShape, served_by_default
from adapterd.loader.base_model import BaseModule, BaseSpec, ModuleKind
from adapterd.loader.checks.examination import examine_headers
from adapterd.loader.errors import AdapterdError, Code
from adapterd.loader.formats.files import DirectoryPackage, FileReader
from adapterd.loader.layout import Dtype
from adapterd.loader.limits import DEFAULT_LIMITS
from adapterd.loader.manifest import Manifest
from adapterd.loader.sharding import Sharding
from fakes.packages import tiny_llama_spec, write_package
from fakes.publisher import FolderPublisher
from fakes.static_cache import StaticCache
from fakes.toy_models import LINEARS, Toy, toy_spec

PAGE = 4096
SHAPES: Sequence[Mapping[str, object]] = (
    {"modules": ("q_proj",), "rank": 8},
    {"modules": LINEARS, "rank": 5, "dtype": "BF16"},
    {"modules": ("up", "down"), "rank": 24, "dtype": "F16"},
    {"modules": LINEARS, "rank": 1},
)


@pytest.fixture
def publisher(tmp_path: Path) -> FolderPublisher:
    return FolderPublisher(tmp_path / "published", toy_spec())


def of_folder(folder: Path, base: BaseSpec) -> Manifest:
    with DirectoryPackage.open_dir(folder, DEFAULT_LIMITS) as package:
        modules, problems = examine_headers(package, base)
    assert modules is not None, problems
    return Manifest(base.pin, modules, ())


def published(publisher: FolderPublisher, count: int, dtype: Dtypes, first: int = 0) -> list[Footprint]:
    """Adapters from `a{first}` to below `a{count}`, of `SHAPES` in turn, as their headers say."""
    found = []
    for i in range(first, count):
        options = SHAPES[i % len(SHAPES)]
        written = publisher.publish("acme", f"a{i}", seed=i, **options)
        found.append(footprint(of_folder(written.directory, publisher.base), dtype, PAGE))
    return found


def cache_of(publisher: FolderPublisher, pages: int, **settings: object) -> AdapterCache:
    config = CacheConfig(
        vram_bytes=pages * PAGE, host_bytes=64 * pages * PAGE, page_bytes=PAGE,
        **settings,  # type: ignore[arg-type]
    )  # fmt: skip
    return AdapterCache(config, base=publisher.base, source=publisher.source, trust=publisher.trust)


@pytest.mark.parametrize("dtype", ["auto", "F32", "BF16"])
def test_bytes_and_pages_are_the_pools_own(publisher: FolderPublisher, dtype: Dtypes) -> None:
    taken = published(publisher, len(SHAPES), dtype)
    used = 0
    with cache_of(publisher, 200, dtype=dtype) as cache:
        for i, said in enumerate(taken):
            lease = cache.acquire(f"acme/a{i}", tenant="acme").wait(30)
            (resident, _) = lease.composition[0]
            assert said.pages == len(resident.pages)
            assert said.dtype == resident.layout.dtype
            used += said.total_bytes
            assert cache.statistics().vram_bytes == {"acme": used}
            assert cache.statistics().vram_free_bytes == 200 * PAGE - used
            in_blocks = resident.layout.spans()
            assert said.nbytes == int((in_blocks[:, 1] - in_blocks[:, 0]).sum())
            assert said.cells == len(resident.layout.blocks)


@pytest.mark.parametrize("dtype", ["auto", "BF16"])
def test_the_parts_are_the_formulas_and_add_up(publisher: FolderPublisher, dtype: Dtypes) -> None:
    size = {"F32": 4, "F16": 2, "BF16": 2}
    taken = published(publisher, len(SHAPES), dtype)
    for said in taken:
        for module in said.modules:
            k_n = module.in_features + module.out_features
            assert module.nbytes == module.rank * k_n * size[said.dtype]
            assert 0 <= module.alignment < 256 * module.cells
            assert (module.scales, module.zeros) == (0, 0)
        assert said.nbytes + said.alignment + said.slack == said.pages * PAGE
        assert said.slack >= 0
    assert any(m.alignment for said in taken for m in said.modules)


@pytest.mark.parametrize(("pages", "slots"), [(40, 1024), (97, 1024), (200, 5), (64, 1024)])
def test_exactly_so_many_of_a_mix_fit(publisher: FolderPublisher, pages: int, slots: int) -> None:
    mix = published(publisher, len(SHAPES), "auto")
    sizes = [said.pages for said in mix]
    assert len(set(sizes)) > 2
    fit = in_turn(sizes, pages, slots)
    more = mix + published(publisher, fit + 1, "auto", len(mix))
    with cache_of(publisher, pages, max_residents=slots) as cache:
        held = [cache.acquire(f"acme/a{i}", tenant="acme").wait(30) for i in range(fit)]
        assert all(lease.ready for lease in held)
        said = sum(each.total_bytes for each in more[:fit])
        assert cache.statistics().vram_bytes == {"acme": said}
        last = cache.acquire(f"acme/a{fit}", tenant="acme")
        with pytest.raises(AdapterdError) as caught:
            last.wait(0.3)
        assert caught.value.code is Code.LEASE_TIMEOUT
        assert cache.statistics().vram_bytes == {"acme": said}
        assert more[fit].total_bytes > cache.statistics().vram_free_bytes or fit == slots
        for lease in held:
            lease.release()
        assert last.wait(30).ready  # room was all that it waited for


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_a_group_takes_what_is_said_of_it(publisher: FolderPublisher, rank: int) -> None:
    sharding = Sharding.of(rank, 2, column=("q_proj", "v_proj", "up"), row=("down",))
    used = whole = 0
    with cache_of(publisher, 200, sharding=sharding) as cache:
        for i, unsharded in enumerate(published(publisher, len(SHAPES), "auto")):
            folder = publisher.root / "acme" / f"a{i}" / "1"
            said = footprint(of_folder(folder, publisher.base), "auto", PAGE, sharding)
            (resident, _) = cache.acquire(f"acme/a{i}", tenant="acme").wait(30).composition[0]
            used, whole = used + said.total_bytes, whole + unsharded.total_bytes
            assert said.pages == len(resident.pages)
            assert said.nbytes == int((resident.layout.spans() @ [-1, 1]).sum()) < unsharded.nbytes
            assert cache.statistics().vram_bytes == {"acme": used}
            for module, entry in zip(said.modules, resident.manifest.modules, strict=True):
                cut = sharding.cut(entry.name, entry.in_features, entry.out_features)
                size = {"F32": 4, "F16": 2, "BF16": 2}[said.dtype]
                assert module.nbytes == module.rank * (cut.in_features + cut.out_features) * size
    assert used < whole


def test_in_turn_counts_as_one_would() -> None:
    for sizes in ((1,), (3,), (2, 5), (4, 1, 1)):
        for free in range(30):
            left, count = free, 0
            while sizes[count % len(sizes)] <= left and count < 7:
                left -= sizes[count % len(sizes)]
                count += 1
            assert in_turn(sizes, free, 7) == count, (sizes, free)


# --- the tables


def live(name: str) -> nn.Module:
    import transformers as t

    common = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    if name == "toy":
        return Toy()
    if name == "gpt2":
        return t.GPT2LMHeadModel(t.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4))
    if name == "bert":
        return t.BertForSequenceClassification(t.BertConfig(intermediate_size=64, **common))
    return t.LlamaForCausalLM(t.LlamaConfig(intermediate_size=64, num_key_value_heads=2, **common))


@pytest.mark.parametrize("max_rank", [16, 128])
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize("name", ["toy", "llama", "gpt2", "bert"])
def test_the_tables_are_those_that_an_engine_makes(name: str, dtype: Dtype, max_rank: int) -> None:
    model = live(name)
    base = BaseSpec.from_module(model, id=f"tests/{name}", revision="e" * 40)
    cache = StaticCache(base, page_bytes=PAGE, slots=24)
    sites = find_sites(model, base, {}, None)
    path = FastPath(cache, sites, dtype, lambda _: None, max_rank=max_rank)
    said = TableShape(tuple(served_by_default(base)), 24, max_rank, dtype, PAGE)
    assert set(said.index) == LoRAEngine(model, cache).served
    assert path.nbytes == said.nbytes + PLAN_BYTES
    assert path._tables.cells.nbytes == said.nbytes == 24 * said.row_bytes
    assert path._plan.memory.nbytes == PLAN_BYTES


def test_a_fused_engine_has_the_same_tables() -> None:
    model, base = Toy(fused=True), toy_spec()
    sites = find_sites(model, base, {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}, None)
    path = FastPath(StaticCache(base, slots=8), sites, "F32", lambda _: None, max_rank=64)
    assert path.nbytes == TableShape(tuple(served_by_default(base)), 8, 64, "F32", PAGE).nbytes + PLAN_BYTES


def test_what_kernels_cannot_serve_is_what_the_tables_say(publisher: FolderPublisher) -> None:
    model = Toy()
    cache = StaticCache(publisher.base, page_bytes=PAGE, slots=8)
    path = FastPath(cache, find_sites(model, publisher.base, {}, None), "F32", lambda _: None, max_rank=20)
    shape = TableShape(tuple(served_by_default(publisher.base)), 8, 20, "F32", PAGE)
    verdicts = set()
    for rank, dtype in ((20, "F32"), (64, "F32"), (300, "F32"), (8, "BF16")):
        manifest = cache.add({LINEARS[0]: rank}, seed=rank, dtype=cast("Dtype", dtype)).resident.manifest
        said = beyond_tables(footprint(manifest, "auto", PAGE), shape)
        resident = cache.add({LINEARS[0]: rank}, seed=rank + 1, dtype=cast("Dtype", dtype)).resident
        assert bool(said) == bool(path._tables.why_not(cast("Resident", resident))), (rank, dtype)
        verdicts.add(bool(said))
    assert verdicts == {True, False}


def test_a_base_of_heads_alone_has_no_tables() -> None:
    base = BaseSpec.of([BaseModule("score", ModuleKind.LINEAR, 8, 2)], id="tests/heads", revision="a" * 40)
    assert list(served_by_default(base)) == []
    assert TableShape((), 8, 16, "F32", PAGE).nbytes == 0
    assert Matrix("x", 1, 1) not in served_by_default(base)


# --- headers alone


class Watched:
    """A package that counts the bytes that are read of each of its files."""

    def __init__(self, package: DirectoryPackage) -> None:
        self._package = package
        self.read: dict[str, int] = {}

    def names(self) -> tuple[str, ...]:
        return self._package.names()

    def sizes(self) -> dict[str, int]:
        return self._package.sizes()

    def open(self, name: str) -> FileReader:
        return _Counting(self._package.open(name), name, self.read)


class _Counting:
    def __init__(self, reader: FileReader, name: str, read: dict[str, int]) -> None:
        self._reader, self._name, self._read = reader, name, read
        self.size = reader.size

    def read_at(self, offset: int, length: int) -> bytes:
        end = self._read.get(self._name, 0)
        self._read[self._name] = max(end, offset + length)
        return self._reader.read_at(offset, length)


def test_no_byte_of_a_tensor_is_read(tmp_path: Path) -> None:
    base = tiny_llama_spec()
    folder = write_package(tmp_path / "p", base=base, rank=64, modules=("q_proj", "down_proj")).directory
    weights = (folder / "adapter_model.safetensors").read_bytes()
    data_start = 8 + int.from_bytes(weights[:8], "little")
    with DirectoryPackage.open_dir(folder, DEFAULT_LIMITS) as package:
        watched = Watched(package)
        modules, problems = examine_headers(watched, base)
    assert modules is not None, problems
    assert watched.read["adapter_model.safetensors"] == data_start < len(weights) // 4
    assert torch.tensor([m.rank for m in modules]).eq(64).all()
