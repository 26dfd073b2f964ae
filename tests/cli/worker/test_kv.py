"""Keys and values in blocks: nobody meets another's, and running out is the request's own failure."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from adapterd.cli.worker.forward import FlatModel
from adapterd.cli.worker.kv import BLOCK_TOKENS
from adapterd.cli.worker.models import tiny_model
from adapterd.cli.worker.prefix import PrefixCache
from adapterd.cli.worker.requests import Reason
from adapterd.cli.worker.rows import ROW_BUCKETS, TABLE_ENTRIES, bucket_of
from adapterd.loader.errors import AdapterdError, Code
from fakes.worker_world import WorkerWorld

PROMPT = [3, 1, 4, 1, 5]


def test_an_earlier_owner_leaves_nothing_in_a_block(tmp_path: Path) -> None:
    """Not even a NaN, which would get through every mask."""
    with WorkerWorld(tmp_path, flat={"kv_blocks": 4}) as world:
        bad = world.flat.key_values()
        bad.reserve(4 * BLOCK_TOKENS)
        for layer in range(2):
            for pool in world.flat._pool.layer(layer):
                pool.fill_(float("nan"))
                pool[0] = 0
        bad.free()
        world.check_greedy(PROMPT, world.answer(None, PROMPT, 20), ())


def test_a_request_that_finds_no_block_fails_alone(tmp_path: Path) -> None:
    with WorkerWorld(tmp_path, flat={"kv_blocks": 3}) as world:
        world.ask("first", None, PROMPT, 2 * BLOCK_TOKENS)  # comes to need three blocks
        world.ask("second", None, PROMPT, 2)
        world.ask("huge", None, range(4 * BLOCK_TOKENS), 2)
        world.run()
        assert world.ended("huge").problems[0].code is Code.BUDGET_EXCEEDED
        for name in ("first", "second"):
            assert world.ended(name).reason is Reason.LENGTH
            world.check_greedy(PROMPT, world.tokens(name), ())


def test_a_prefix_that_finds_no_block_fails_its_request_alone(tmp_path: Path) -> None:
    with WorkerWorld(tmp_path, flat={"kv_blocks": 3}, prefix=PrefixCache(8)) as world:
        stem = list(range(2 * BLOCK_TOKENS))
        world.answer(None, [*stem, 1], 2)
        world.ask("holds", None, stem[:BLOCK_TOKENS], BLOCK_TOKENS)
        world.run(lambda: len(world.tokens("holds")) == 2)
        world.ask("late", None, [*stem, 2], 2)
        world.run()
        assert world.ended("late").problems[0].code is Code.BUDGET_EXCEEDED
        world.check_greedy(stem[:BLOCK_TOKENS], world.tokens("holds"), ())


def test_copies_cross_blocks() -> None:
    flat = FlatModel(tiny_model(), kv_blocks=8)
    one, other = flat.key_values(), flat.key_values()
    one.reserve(40)
    flat._pool.clear()
    for group in flat._pool.groups:
        group.copy_(torch.randn_like(group))
    one.commit(40)
    for start, stop in ((0, 7), (7, 31), (31, 40)):
        other.copy_in(one.copy_out(start, stop))
    assert other.length == 40 and set(one.blocks) & set(other.blocks) == set()
    for mine, copied in zip(one.copy_out(0, 40), other.copy_out(0, 40), strict=True):
        assert torch.equal(mine, copied) and mine.shape[1] == 40
    flat.close()


def test_too_many_blocks_for_the_device_are_refused() -> None:
    with pytest.raises(AdapterdError) as caught:
        FlatModel(tiny_model(), kv_blocks=1 << 40)
    assert caught.value.code is Code.DEVICE_ERROR and "--kv-blocks" in caught.value.problems[0].hint


def test_a_model_in_half_precision_is_served() -> None:
    FlatModel(tiny_model().bfloat16(), kv_blocks=8).close()


@pytest.mark.parametrize("most_rows", [0, 256])
def test_a_window_hides_what_is_behind_it(most_rows: int) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(3)
    config = MistralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, sliding_window=5, head_dim=8,
    )  # fmt: skip
    model, tokens = MistralForCausalLM(config).eval(), [(7 * i) % 64 for i in range(23)]
    with torch.inference_mode():
        wanted = model(input_ids=torch.tensor([tokens])).logits[0]
    flat = FlatModel(model, kv_blocks=8, most_rows=most_rows)
    kv = flat.key_values()
    for start, stop in ((0, 11), (11, 12), (12, 22), (22, 23)):
        kv.reserve(stop - start)
        logits = flat.run(flat.plan([(tokens[start:stop], kv)]))
        torch.testing.assert_close(logits[0], wanted[stop - 1], rtol=0, atol=1e-4)
    flat.close()


def test_a_bucket_holds_what_it_is_for_and_its_table_is_bounded() -> None:
    for rows in range(1, ROW_BUCKETS[-1] + 1):
        for blocks in (1, 16, 17, 100, 3000):
            found = bucket_of(rows, blocks, ROW_BUCKETS[-1])
            if found is not None:
                assert rows <= found.rows <= max(2 * rows, 1) and found.blocks >= blocks
                assert found.rows * found.blocks <= TABLE_ENTRIES
            else:
                assert 4 * rows * blocks > TABLE_ENTRIES
    assert bucket_of(5, 1, 4) is None is bucket_of(1, 1, 0)
