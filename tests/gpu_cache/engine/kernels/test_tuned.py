"""Tuning tables: what a file may say, which entry answers, and that the rule's own configurations would pass."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from adapterd.gpu_cache.engine.device_plan import Regime
from adapterd.gpu_cache.engine.kernels.configs import Key, RowsConfig, Rule, TilesConfig, whole_blocks
from adapterd.gpu_cache.engine.kernels.tuned import (
    TABLES,
    Entry,
    Table,
    Tuned,
    configs_for,
    load,
    parse,
    slug,
)
from adapterd.loader.errors import AdapterdError, Code

KEY: Key = (4096, 28672, 2, 64, 2048)
TILES = TilesConfig(4, 64, 64, 4, 3, 128, 16, 8, 2)
ROWS = RowsConfig(8, 256, 4, 512, 4)


def entry(key: Key = KEY, config: RowsConfig | TilesConfig = TILES, item_bytes: int = 2) -> Entry:
    return Entry(key, item_bytes, config, 91.25, 96.0)


def body(**changes: Any) -> dict[str, Any]:
    """A good table of one entry; changes of its `entries[0]`, and of its config with a leading underscore."""
    table = json.loads(Table("NVIDIA H200", "2.11", "3.6", (entry(),)).text())
    for name, value in changes.items():
        where = table["entries"][0]["config"] if name.startswith("_") else table["entries"][0]
        where[name.removeprefix("_")] = value
    return table


def refused(data: bytes) -> str:
    with pytest.raises(AdapterdError) as caught:
        parse(data, "t.json")
    assert caught.value.code is Code.SETTINGS_INVALID
    assert caught.value.problem.where.startswith("t.json") or "t.json" in caught.value.problem.message
    return caught.value.problem.message


def test_a_table_reads_back_as_it_was_written() -> None:
    table = Table("NVIDIA H200", "2.11", "3.6", (entry(), entry((4096, 4096, 1, 16, 64), ROWS)))
    assert parse(table.text().encode(), "t") == table
    assert parse(json.dumps(table.as_json()).encode(), "t") == table
    empty = Table("x", "", "", ())
    assert parse(empty.text().encode(), "t") == empty


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"_split": 3}, "power of two"), ({"_split": 0}, "split"), ({"_split": 32}, "split"),
        ({"_split": True}, "split"),
        ({"_split": 4.0}, "split"), ({"_split": "4"}, "split"), ({"_block_k": 8}, "block_k"),
        ({"_block_k": 1024}, "block_k"), ({"_block_k": 512, "_lanes": 256}, "shared memory"),
        ({"_expand_stages": 9}, "expand_stages"), ({"_walk": 128}, "walk"), ({"_more": 1}, "'more' is unknown"),
        ({"more": 1}, "'more' is unknown"), ({"regime": "both"}, "regime"), ({"regime": []}, "regime"),
        ({"rows": 0}, "rows"), ({"lanes": -1}, "lanes"), ({"in_features": 1 << 25}, "in_features"),
        ({"item_bytes": 8}, "item_bytes"), ({"us": 0}, "us"), ({"rule_us": "1"}, "rule_us"), ({"us": True}, "us"),
        ({"config": []}, "no object"), ({"config": {}}, "missing"),
    ],
)  # fmt: skip
def test_what_an_entry_must_not_say(changes: dict[str, Any], word: str) -> None:
    assert word in refused(json.dumps(body(**changes)).encode())


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"", "not JSON"), (b"[]", "not an object"), (b"{}", "missing"), (b"\xff", "UTF-8"), (b"[" * 9, "nested"),
        (b" " * ((4 << 20) + 1), "bytes"), (b'{"type": 1, "type": 2}', "twice"), (b'{"a": NaN}', "NaN"),
        (b"[" + b"1," * 300_000 + b"1]", "values"),
    ],
)  # fmt: skip
def test_what_is_no_table(data: bytes, word: str) -> None:
    assert word in refused(data)


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [("type", "adapterd.kernel-configs/2", "type"), ("device", 5, "device"), ("torch", "x" * 201, "torch"),
     ("entries", {}, "list"), ("entries", [1], "no object"), ("extra", 1, "unknown")],
)  # fmt: skip
def test_what_a_head_must_not_say(field: str, value: object, word: str) -> None:
    assert word in refused(json.dumps({**body(), field: value}).encode())


def test_a_shape_stands_in_one_entry() -> None:
    table = body()
    table["entries"] *= 2
    assert "two entries" in refused(json.dumps(table).encode())


def test_rows_of_more_than_a_warp_holds_are_refused() -> None:
    table = Table("x", "", "", (entry((4096, 4096, 1, 16, 64), RowsConfig(2, 2048, 2, 512, 4)),))
    assert "warps" in refused(table.text().encode())


def test_an_entry_answers_for_its_shape_and_those_near_by() -> None:
    tuned = Tuned([entry()])
    for lanes, rows in ((64, 2048), (32, 2048), (128, 2048), (64, 8192), (64, 700), (128, 8192)):
        assert tuned.tiles((4096, 28672, 2, lanes, rows), 2, batch_invariant=False) == TILES, (lanes, rows)
    others: list[tuple[Key, int]] = [
        ((4096, 28672, 2, 16, 2048), 2), ((4096, 28672, 2, 64, 8193), 2), ((4096, 28672, 2, 64, 512), 2),
        ((4096, 28672, 1, 64, 2048), 2), ((4096, 4096, 2, 64, 2048), 2), (KEY, 4),
    ]  # fmt: skip
    for key, item_bytes in others:
        assert tuned.tiles(key, item_bytes, batch_invariant=False) == Rule().tiles(
            key, item_bytes, batch_invariant=False
        )
    assert tuned.rows(KEY, 2) == Rule().rows(KEY, 2)


def test_rows_one_by_one_have_the_entry_of_as_many_lanes_or_more() -> None:
    rows = RowsConfig(4, 1024, 8, 1024, 4)
    tuned = Tuned([Entry((4096, 4096, 1, 32, 64), 2, rows, 5.0, 6.0)])
    assert tuned.rows((4096, 4096, 1, 16, 64), 2) == tuned.rows((4096, 4096, 1, 32, 64), 2) == rows
    assert tuned.rows((4096, 4096, 1, 64, 64), 2) == Rule().rows((4096, 4096, 1, 64, 64), 2) != rows


def test_the_nearest_entry_answers() -> None:
    one, two, three = (TilesConfig(1 << i, 64, 64, 4, 3, 128, 16, 8, 2) for i in range(3))
    tuned = Tuned(
        [
            entry((4096, 4096, 1, lanes, rows), c)
            for lanes, rows, c in ((16, 2048, one), (64, 2048, two), (64, 8192, three))
        ]
    )
    got = {
        (lanes, rows): tuned.tiles((4096, 4096, 1, lanes, rows), 2, batch_invariant=False).split
        for lanes, rows in ((16, 2048), (16, 4096), (64, 3000), (64, 6000), (128, 8192), (32, 8192))
    }
    assert got == {(16, 2048): 1, (16, 4096): 1, (64, 3000): 2, (64, 6000): 4, (128, 8192): 4, (32, 8192): 4}


def test_batch_invariant_configurations_are_the_rules() -> None:
    wanted = Rule().tiles(KEY, 2, batch_invariant=True)
    assert Tuned([entry()]).tiles(KEY, 2, batch_invariant=True) == wanted != TILES


@pytest.mark.parametrize(
    "widths", [(4096, 4096, 1), (4096, 28672, 2), (14336, 4096, 1), (100, 130, 2), (8192, 8192, 1)]
)
@pytest.mark.parametrize("item_bytes", [2, 4])
def test_what_batch_invariance_rests_on_does_not_depend_on_rows(widths: tuple[int, int, int], item_bytes: int) -> None:
    found = {
        (c.split, c.block_k)
        for rows in (1, 16, 64, 256, 512, 513, 2048, 8192)
        for lanes in (16, 64, 128)
        for c in [Rule().tiles((*widths, lanes, rows), item_bytes, batch_invariant=True)]
    }
    assert len(found) == 1


@pytest.mark.parametrize("widths", [(4096, 4096, 1), (4096, 28672, 2), (14336, 4096, 1), (576, 163, 2), (17, 5, 1)])
def test_the_rules_own_configurations_pass(widths: tuple[int, int, int]) -> None:
    """A table may hold whatever the rule says, so the limits of a file are no tighter than the rule."""
    for lanes in (16, 32, 64, 128):
        for rows in (1, 64, 256, 2048, 8192):
            for item_bytes in (2, 4):
                key = (*widths, lanes, rows)
                rule = Rule()
                for config in (rule.rows(key, item_bytes), rule.tiles(key, item_bytes, batch_invariant=False)):
                    one = Table("x", "", "", (entry(key, config, item_bytes),))
                    assert parse(one.text().encode(), "t") == one


def test_the_rule_fills_a_large_card_and_no_more() -> None:
    def split(rows: int, slices: int, lanes: int, out: int = 4096) -> tuple[int, int]:
        config = Rule().tiles((4096, out, slices, lanes, rows), 2, batch_invariant=False)
        return config.split, config.walk

    assert split(8192, 1, 16) == (2, 16)
    assert split(2048, 1, 16) == (8, 4)
    assert split(2048, 2, 64, 28672) == (4, 16)


def test_parts_of_k_are_whole_blocks_where_they_can_be() -> None:
    assert whole_blocks(4096, 4, 1024) == 1024
    assert whole_blocks(14336, 8, 256) == 256
    assert whole_blocks(100, 1, 64) == 64
    assert whole_blocks(17, 1, 1024) == 32


def by_rule(one: Entry) -> RowsConfig | TilesConfig:
    if one.regime is Regime.ROWS:
        return Rule().rows(one.key, one.item_bytes)
    return Rule().tiles(one.key, one.item_bytes, batch_invariant=False)


def test_shipped_tables_are_good_and_are_found_by_the_cards_name() -> None:
    paths = list(TABLES.glob("*.json"))
    assert [path.name for path in paths] == ["nvidia-h200.json"]
    for path in paths:
        table = load(path)
        assert slug(table.device) == path.stem
        configs = configs_for(table.device)
        for one in table.entries:
            assert one.us < one.rule_us or (one.us, one.config) == (one.rule_us, by_rule(one))
            if one.regime is Regime.TILES:
                assert configs.tiles(one.key, one.item_bytes, batch_invariant=False) == one.config
            else:
                assert configs.rows(one.key, one.item_bytes) == one.config
    assert isinstance(configs_for("NVIDIA GeForce GTX 1"), Rule)


def test_a_users_own_table(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    path.write_text(Table("another card", "", "", (entry(),)).text())
    assert configs_for("NVIDIA H200", path).tiles(KEY, 2, batch_invariant=False) == TILES
    assert asdict(load(path).entries[0].config) == asdict(TILES)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name, code in (("none", Code.PATH_NOT_FOUND), ("folder", Code.PATH_NOT_FOUND), ("pipe", Code.SETTINGS_INVALID)):
        with pytest.raises(AdapterdError) as caught:
            load(tmp_path / name)
        assert caught.value.code is code, name
