"""Shards: rules cut evenly or not at all, and the ranks' packed parts tile the whole matrices."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapterd.loader.base_model import BaseModule, BaseSpec, ModuleKind
from adapterd.loader.errors import Code, Failed
from adapterd.loader.formats.safetensors_header import read_header
from adapterd.loader.identity import BasePin, FileEntry
from adapterd.loader.layout import Layout
from adapterd.loader.limits import DEFAULT_LIMITS
from adapterd.loader.manifest import Manifest, ModuleEntry
from adapterd.loader.pack import pack
from adapterd.loader.planning import plan_layout
from adapterd.loader.sharding import WHOLE, Cut, Rule, Sharding, joined
from adapterd.loader.trust.admission import CHUNK_BYTES
from fakes.packages import safetensors_bytes, tensors_of
from fakes.readers import BytesReader

PAGE = 1 << 14
Factors = dict[str, tuple[np.ndarray, np.ndarray]]


def base(**modules: tuple[int, int]) -> BaseSpec:
    listed = [BaseModule(name, ModuleKind.LINEAR, *widths) for name, widths in modules.items()]
    return BaseSpec.of(listed, id="tests/shards", revision="a" * 40)


# --- rules


def test_a_column_rule_cuts_outputs_and_a_row_rule_inputs() -> None:
    sharding = Sharding.of(1, 4, column=["q_proj"], row=["o_proj"])
    assert sharding.cut("layers.0.q_proj", 8, 16) == Cut(((0, 8),), ((4, 8),))
    assert sharding.cut("layers.0.o_proj", 16, 8) == Cut(((4, 8),), ((0, 8),))
    assert sharding.cut("layers.0.router", 8, 3) == Cut(((0, 8),), ((0, 3),))


def test_the_longest_name_counts_and_names_end_at_dots() -> None:
    rules = (Rule("proj", "column", 2), Rule("b.proj", "row", 2))
    sharding = Sharding(0, 2, rules)
    assert sharding.rule("a.proj") == rules[0]
    assert sharding.rule("x.b.proj") == rules[1]
    assert sharding.rule("q_proj") is None


def test_key_heads_that_are_fewer_than_ranks_are_held_by_neighbours() -> None:
    cuts = [Sharding(rank, 4, (Rule("k_proj", "column", 2),)).cut("k_proj", 8, 6).outputs for rank in range(4)]
    assert cuts == [((0, 3),), ((0, 3),), ((3, 6),), ((3, 6),)]


def test_groups_are_cut_each_by_itself() -> None:
    sharding = Sharding(1, 2, (Rule("qkv", "column", 2, (8, 4, 4)),))
    assert sharding.cut("qkv", 8, 16).outputs == ((4, 8), (10, 12), (14, 16))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Sharding(2, 2), "2 of 2 ranks"),
        (lambda: Sharding(0, 5000), "5000 ranks"),
        (lambda: Sharding(0, 4, (Rule("q", "column", 3),)), "3 slices for 4 ranks"),
        (lambda: Sharding(0, 4, (Rule("q", "column", 0),)), "0 slices"),
        (lambda: Sharding(0, 2, (Rule("q", "diagonal", 2),)), "neither column nor row"),  # type: ignore[arg-type]
        (lambda: Sharding(0, 2, (Rule("", "row", 2),)), "neither column nor row"),
        (lambda: Sharding(0, 2, (Rule("q", "row", 2, (0, 4)),)), "groups"),
        (lambda: Sharding(0, 2, (Rule("q", "row", 2), Rule("q", "column", 2))), "twice"),
        (lambda: Sharding.of(0, 4, column=["q"]).check(base(q=(8, 10))), "10 features cannot be cut into 4"),
        (lambda: Sharding.of(0, 4, row=["q"]).check(base(q=(10, 8))), "10 features cannot be cut into 4"),
        (lambda: Sharding(0, 2, (Rule("q", "column", 2, (4, 4)),)).check(base(q=(8, 10))), "groups of 8 features"),
        (lambda: Sharding.of(0, 2, column=["w"]).check(base(q=(8, 10))), "fits no module"),
    ],
)
def test_what_cannot_be_cut_evenly_is_refused_by_name(make: Any, said: str) -> None:
    with pytest.raises(Failed) as refused:
        make()
    assert refused.value.code is Code.SETTINGS_INVALID
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Sharding(0.5, 2),  # type: ignore[arg-type]
        lambda: Sharding(True, 2),
        lambda: Sharding("0", 2),  # type: ignore[arg-type]
        lambda: Sharding(0, 2.0),  # type: ignore[arg-type]
        lambda: Sharding(0, 2, (Rule("q", "column", 2.0),)),  # type: ignore[arg-type]
        lambda: Sharding(0, 2, (Rule("q", "column", 2, (4.0, 4.0)),)),  # type: ignore[arg-type]
    ],
)
def test_ranks_and_slices_are_whole_numbers(make: Any) -> None:
    with pytest.raises(Failed) as refused:
        make()
    assert refused.value.code is Code.SETTINGS_INVALID
    assert "is no whole number" in str(refused.value)


def test_an_embedding_is_not_cut() -> None:
    table = BaseSpec.of([BaseModule("wte", ModuleKind.EMBEDDING, 64, 8)], id="tests/shards", revision="a" * 40)
    with pytest.raises(Failed, match="only linears can be cut"):
        Sharding.of(0, 2, column=["wte"]).check(table)


@given(st.integers(1, 4), st.integers(0, 3), st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_slices_tile_the_features(power: int, fewer: int, groups: list[int]) -> None:
    size, slices = 2**power, 2 ** max(power - fewer, 0)
    widths = tuple(slices * group for group in groups)
    rule = Rule("m", "column", slices, widths)
    cuts = [Sharding(rank, size, (rule,)).cut("m", 3, sum(widths)).outputs for rank in range(size)]
    held = sorted(i for ranges in cuts for begin, end in ranges for i in range(begin, end))
    assert held == sorted(list(range(sum(widths))) * (size // slices))
    assert all(ranges == joined(ranges) for ranges in cuts)


# --- packing


def packed_factors(shapes: list[tuple[int, int, int]]) -> Factors:
    """A [rank, in] and B [out, rank] of every (rank, in, out)."""
    rng = np.random.default_rng(3)
    return {
        f"m{i}": (rng.random((r, n), np.float32), rng.random((m, r), np.float32)) for i, (r, n, m) in enumerate(shapes)
    }


def packed_manifest(factors: Factors) -> tuple[Manifest, bytes, tuple[str, ...]]:
    """Manifest, file and chunk digests."""
    data = safetensors_bytes(tensors_of(factors))
    found = {t.name: t for t in read_header(BytesReader(data), DEFAULT_LIMITS).tensors}
    entries = []
    for name, (a, b) in factors.items():
        sides = [found[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB"]
        entries.append(ModuleEntry(name, len(a), 1.0, 1.0, "F32", a.shape[1], len(b), *sides))
    file = FileEntry("adapter_model.safetensors", hashlib.sha256(data).hexdigest(), len(data))
    pieces = [data[i : i + CHUNK_BYTES] for i in range(0, len(data), CHUNK_BYTES)]
    chunks = tuple(hashlib.sha256(piece).hexdigest() for piece in pieces)
    return Manifest(BasePin("b/m", "0" * 40, "1" * 64), tuple(entries), (file,)), data, chunks


def part_of(manifest: Any, layout: Layout, out: bytearray) -> list[tuple[np.ndarray, np.ndarray]]:
    """A and B of every module, as one rank's image holds them."""
    found = []
    for index, module in enumerate(manifest.modules):
        sides = []
        for matrix in "ab":
            blocks = [b for b in layout.blocks if (b.module, b.matrix) == (index, matrix)]
            rows = [
                np.frombuffer(out, np.float32, b.rows * b.width, b.page * PAGE + b.offset).reshape(b.rows, b.width)
                for b in blocks
            ]
            sides.append(np.concatenate(rows))
        assert len(sides[0]) == len(sides[1]) == module.rank
        found.append((sides[0], sides[1].T))
    return found


shapes = st.lists(st.tuples(st.integers(1, 19), st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=4)


@given(shapes, st.sampled_from([1, 2, 4]), st.integers(0, 3))
def test_the_ranks_parts_tile_every_matrix(sizes: list[tuple[int, int, int]], size: int, axis: int) -> None:
    """No overlap and no loss: side by side, the parts are the matrix, bit for bit."""
    factors = packed_factors([(r, size * n, size * 2 * m) for r, n, m in sizes])
    manifest, data, chunks = packed_manifest(factors)
    column = [m.name for i, m in enumerate(manifest.modules) if (i + axis) % 3 == 0]
    row = [m.name for i, m in enumerate(manifest.modules) if (i + axis) % 3 == 1]
    parts = []
    for rank in range(size):
        layout = plan_layout(manifest, "F32", PAGE, Sharding.of(rank, size, column=column, row=row))
        out = bytearray(b"\xff" * layout.nbytes)
        pack(manifest, layout, BytesReader(data), chunks, memoryview(out), threads=1)
        parts.append(part_of(manifest, layout, out))
    for index, module in enumerate(manifest.modules):
        a, b = factors[module.name]
        held_a, held_b = [p[index][0] for p in parts], [p[index][1] for p in parts]
        if module.name in row:
            np.testing.assert_array_equal(np.concatenate(held_a, axis=1), a)
        else:
            assert all(np.array_equal(part, a) for part in held_a)
        if module.name in column:
            np.testing.assert_array_equal(np.concatenate(held_b), b)
        else:
            assert all(np.array_equal(part, b) for part in held_b)


def test_groups_are_packed_in_the_order_of_the_live_module() -> None:
    factors = packed_factors([(3, 8, 16)])
    manifest, data, chunks = packed_manifest(factors)
    (name,) = factors
    layout = plan_layout(manifest, "F32", PAGE, Sharding(1, 2, (Rule(name, "column", 2, (8, 4, 4)),)))
    out = bytearray(layout.nbytes)
    pack(manifest, layout, BytesReader(data), chunks, memoryview(out))
    b = factors[name][1]
    np.testing.assert_array_equal(part_of(manifest, layout, out)[0][1], b[[4, 5, 6, 7, 10, 11, 14, 15]])


def test_a_part_that_lies_across_chunks_is_whole() -> None:
    """4 MiB chunks begin anywhere in a row."""
    factors = packed_factors([(5, 400_002, 6), (3, 6, 400_002)])
    manifest, data, chunks = packed_manifest(factors)
    assert len(chunks) > 2
    names = list(factors)
    for rank in range(3):
        layout = plan_layout(manifest, "F32", 1 << 20, Sharding.of(rank, 3, row=names[:1], column=names[1:]))
        out = bytearray(layout.nbytes)
        pack(manifest, layout, BytesReader(data), chunks, memoryview(out))
        begin, end = rank * 133_334, (rank + 1) * 133_334
        wanted = factors[names[0]][0][:, begin:end], factors[names[1]][1].T[:, begin:end]
        for index, matrix in ((0, "a"), (1, "b")):
            for block in (b for b in layout.blocks if (b.module, b.matrix) == (index, matrix)):
                at = block.page * (1 << 20) + block.offset
                rows = np.frombuffer(out, np.float32, block.rows * block.width, at).reshape(block.rows, -1)
                np.testing.assert_array_equal(rows, wanted[index][block.row : block.row + block.rows])


# --- layouts of ranks are never taken for one another


def test_layouts_of_two_ranks_differ_though_their_tables_are_equal() -> None:
    manifest, _, _ = packed_manifest(packed_factors([(3, 8, 16)]))
    names = [module.name for module in manifest.modules]
    one, two = (plan_layout(manifest, "F32", PAGE, Sharding.of(rank, 2, column=names)) for rank in range(2))
    assert (one.table == two.table).all()
    assert one != two and one.digest != two.digest and hash(one) != hash(two)
    assert Layout.from_bytes(one.to_bytes()) == one != Layout.from_bytes(two.to_bytes())
    assert len(plan_layout(manifest, "F32", PAGE, WHOLE).cuts) == 0


@pytest.mark.parametrize(
    ("cell", "value", "said"),
    [((0, 3), 7, "not as wide"), ((0, 2), 8, "disorder"), ((0, 1), 2, "disorder"), ((0, 0), 5, "without blocks"),
     ((0, 2), -8, "disorder")],
)  # fmt: skip
def test_forged_cuts_are_no_layout(cell: tuple[int, int], value: int, said: str) -> None:
    manifest, _, _ = packed_manifest(packed_factors([(3, 8, 16)]))
    names = [module.name for module in manifest.modules]
    layout = plan_layout(manifest, "F32", PAGE, Sharding.of(0, 2, column=names))
    cuts = layout.cuts.copy()
    cuts[cell] = value
    forged = Layout.of_table(layout.page_bytes, "F32", layout.n_pages, layout.table, cuts).to_bytes()
    with pytest.raises(ValueError, match=said):
        Layout.from_bytes(forged)
