"""Layout: blocks cover every rank row once, lie inside a page, and never overlap."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from time import process_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapterd.loader.errors import Code, Refused
from adapterd.loader.identity import BasePin, FileEntry
from adapterd.loader.layout import ALIGNMENT, COLUMNS, ITEM_BYTES, Dtype, Layout
from adapterd.loader.manifest import Manifest, ModuleEntry, TensorEntry
from adapterd.loader.planning import block_rows, plan_layout

PIN = BasePin("b/m", "0" * 40, "1" * 64)


def module(name: str, rank: int, n_in: int, n_out: int) -> ModuleEntry:
    a = TensorEntry(f"{name}.lora_A.weight", "F32", (rank, n_in), 0, rank * n_in * 4)
    b = TensorEntry(f"{name}.lora_B.weight", "F32", (n_out, rank), a.end, a.end + rank * n_out * 4)
    return ModuleEntry(name, rank, float(rank), 1.0, "F32", n_in, n_out, a, b)


def manifest(*modules: ModuleEntry) -> Manifest:
    return Manifest(PIN, modules, (FileEntry("adapter_model.safetensors", "2" * 64, 1),))


modules = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 3000), st.integers(1, 3000)), min_size=1, max_size=8
).map(lambda shapes: manifest(*(module(f"m{i:02}", *s) for i, s in enumerate(shapes))))
dtypes: st.SearchStrategy[Dtype] = st.sampled_from(["F32", "F16", "BF16"])


@given(modules, dtypes, st.sampled_from([1 << 15, 1 << 16, 1 << 20]))
def test_every_rank_row_has_exactly_one_place(m: Manifest, dtype: Dtype, page_bytes: int) -> None:
    layout = plan_layout(m, dtype, page_bytes)
    item = ITEM_BYTES[dtype]
    rows = sorted((b.module, b.matrix, b.row + i) for b in layout.blocks for i in range(b.rows))
    assert rows == [(i, x, r) for i, e in enumerate(m.modules) for x in "ab" for r in range(e.rank)]
    spans = sorted((b.page, b.offset, b.offset + b.rows * b.width * item) for b in layout.blocks)
    for page, begin, end in spans:
        assert 0 <= page < layout.n_pages and begin % ALIGNMENT == 0 and end <= page_bytes
    for (page, _, end), (next_page, begin, _) in pairwise(spans):
        assert page != next_page or end <= begin
    assert {b.page for b in layout.blocks} == set(range(layout.n_pages))


@given(modules, dtypes)
def test_blocks_are_the_most_rows_that_fit_half_a_page(m: Manifest, dtype: Dtype) -> None:
    for entry in m.modules:
        rows = block_rows(entry, dtype, 1 << 16)
        row_bytes = max(entry.in_features, entry.out_features) * ITEM_BYTES[dtype]
        assert rows == 1 or rows * row_bytes <= 1 << 15
        assert rows == 16 or 2 * rows * row_bytes > 1 << 15


def llama_8b(rank: int) -> Manifest:
    shapes = [
        (4096, 4096),
        (4096, 1024),
        (4096, 1024),
        (4096, 4096),
        (4096, 14336),
        (4096, 14336),
        (14336, 4096),
    ]
    return manifest(*(module(f"l{i:02}.{j}", rank, *s) for i in range(32) for j, s in enumerate(shapes)))


@pytest.mark.parametrize("rank", [8, 16, 64])
def test_overhead_of_a_llama_8b_adapter_is_at_most_five_per_cent(rank: int) -> None:
    m = llama_8b(rank)
    layout = plan_layout(m, "BF16")
    own = sum(2 * e.rank * (e.in_features + e.out_features) for e in m.modules)
    assert layout.nbytes <= 1.05 * own


def test_a_rank_8_adapter_never_pays_for_rank_128() -> None:
    small, large = plan_layout(llama_8b(8), "BF16"), plan_layout(llama_8b(128), "BF16")
    assert small.nbytes * 15 < large.nbytes


def test_a_row_wider_than_a_page_is_refused_by_name() -> None:
    with pytest.raises(Refused) as refused:
        plan_layout(manifest(module("wide", 1, 1 << 20, 8)), "F32")
    assert (refused.value.code, refused.value.problem.where) == (Code.QUOTA_EXCEEDED, "wide")


def test_the_same_manifest_gives_the_same_layout() -> None:
    assert plan_layout(llama_8b(16), "BF16") == plan_layout(llama_8b(16), "BF16")
    assert isinstance(plan_layout(llama_8b(16), "BF16"), Layout)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4000), st.integers(1, 4000)), min_size=1, max_size=30))
def test_every_block_lies_in_the_first_page_with_room(shapes: list[tuple[int, int, int]]) -> None:
    """First fit, largest first: by looking at every page in turn."""
    layout = plan_layout(manifest(*(module(f"m{i:02}", *s) for i, s in enumerate(shapes))), "F32", 1 << 15)
    sizes = [-(-b.rows * b.width * 4 // ALIGNMENT) * ALIGNMENT for b in layout.blocks]
    used: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        page = next((p for p, n in enumerate(used) if n + sizes[index] <= 1 << 15), len(used))
        used += [0] * (page == len(used))
        assert (layout.blocks[index].page, layout.blocks[index].offset) == (page, used[page])
        used[page] += sizes[index]
    assert layout.n_pages == len(used)


def test_hostile_shapes_take_seconds_at_most_of_processor_time() -> None:
    """14 GB whose pages all keep room for the one small module: each block used to look at each page."""
    wide = [module(f"a{i:02}", 500, 100_000, 100_000) for i in range(20)]
    less = [module(f"b{i:02}", 500, 75_000, 75_000) for i in range(20)]
    m = manifest(*wide, *less, module("c", 1, 64, 64))
    before = process_time()
    assert plan_layout(m, "F32").n_pages > 15_000
    assert process_time() - before < 5


@pytest.mark.parametrize("width", [53_248, 128_256, 151_936, 262_144])
def test_the_widths_of_real_models_fit_in_fp32(width: int) -> None:
    assert plan_layout(manifest(module("head", 3, 4096, width)), "F32").n_pages >= 3 * width // (1 << 18)
    assert plan_layout(manifest(module("head", 3, 4096, 2 * width)), "BF16").n_pages >= 3 * width // (1 << 18)


# --- the wire


@given(modules, dtypes, st.sampled_from([1 << 15, 1 << 20]))
def test_a_layout_crosses_a_wire_unchanged(m: Manifest, dtype: Dtype, page_bytes: int) -> None:
    layout = plan_layout(m, dtype, page_bytes)
    copy = Layout.from_bytes(layout.to_bytes())
    assert copy == layout and hash(copy) == hash(layout) and copy.digest == layout.digest
    assert copy.blocks == layout.blocks
    assert Layout(page_bytes, dtype, layout.n_pages, layout.blocks) == layout


def test_a_layout_without_blocks_crosses_too() -> None:
    layout = Layout(1 << 20, "F32", 5)
    assert Layout.from_bytes(layout.to_bytes()) == layout and layout.blocks == ()


def forged(column: str, value: int, block: int = 0) -> bytes:
    layout = plan_layout(llama_8b(16), "BF16")
    table = layout.table.copy()
    table[block, COLUMNS.index(column)] = value
    return Layout.of_table(layout.page_bytes, "BF16", layout.n_pages, table).to_bytes()


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("module", -1), ("matrix", 2), ("matrix", -1), ("row", -1), ("rows", 0), ("rows", 2**31 - 1), ("width", 0),
        ("width", 2**31 - 1), ("page", -1), ("page", 80), ("offset", -256), ("offset", 8), ("offset", 1 << 20),
    ],
)  # fmt: skip
def test_a_block_outside_its_page_is_no_layout(column: str, value: int) -> None:
    with pytest.raises(ValueError, match="block 0 of the layout"):
        Layout.from_bytes(forged(column, value))


def test_blocks_that_overlap_are_no_layout() -> None:
    assert plan_layout(llama_8b(16), "BF16").blocks[0].offset > 0  # so another block begins its page
    with pytest.raises(ValueError, match="overlap"):
        Layout.from_bytes(forged("offset", 0))


@pytest.mark.parametrize("damage", [lambda d: d[:-1], lambda d: d + b"\0" * 28, lambda d: b"", lambda d: b"x" + d[1:]])
def test_other_bytes_are_no_layout(damage: Callable[[bytes], bytes]) -> None:
    with pytest.raises(ValueError, match="layout"):
        Layout.from_bytes(damage(plan_layout(llama_8b(16), "BF16").to_bytes()))


@given(st.binary(max_size=200), st.integers(0, 600))
def test_garbage_is_a_layout_or_a_value_error(noise: bytes, at: int) -> None:
    data = plan_layout(manifest(module("m", 17, 40, 50)), "F32", 1 << 15).to_bytes()
    try:
        layout = Layout.from_bytes((data[:at] + noise + data[at + len(noise) :])[: len(data)])
    except ValueError:
        return
    assert all(0 <= begin < end <= layout.nbytes for begin, end in layout.spans().tolist())


def test_distinct_sizes_without_number_take_seconds_at_most_of_processor_time() -> None:
    m = manifest(*(module(f"m{i:05}", 1, 64 * i + 64, 64 * i + 64) for i in range(4000)))
    before = process_time()
    assert plan_layout(m, "F32").n_pages > 1000
    assert process_time() - before < 5
