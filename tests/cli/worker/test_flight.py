"""Who decodes goes on with a token that the host does not know yet; who draws its tokens waits for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from adapterd.cli.worker.forward import FlatModel
from adapterd.cli.worker.inputs import MOST_SAID
from adapterd.cli.worker.models import tiny_model
from adapterd.cli.worker.prefix import BLOCK_TOKENS, PrefixCache
from adapterd.cli.worker.requests import Reason
from adapterd.cli.worker.sampling import Verdict, judge
from adapterd.loader.errors import Code
from fakes.worker_world import ALL, WorkerWorld

PROMPT = [3, 1, 4, 1, 5]


def after(flat: FlatModel, prompts: Sequence[Sequence[int]], ids: Sequence[Sequence[int]]) -> Tensor:
    """Logits of a second step with these ids, behind one with the prompts."""
    kvs = [flat.key_values() for _ in prompts]
    for kv, prompt, more in zip(kvs, prompts, ids, strict=True):
        kv.reserve(len(prompt) + len(more))
    flat.run(flat.plan(list(zip(prompts, kvs, strict=True))))
    flat.hear(flat.verdict().tokens)
    logits = flat.run(flat.plan(list(zip(ids, kvs, strict=True)))).clone()
    for kv in kvs:
        kv.free()
    return logits


@pytest.mark.parametrize("most_rows", [0, 2, 256])
def test_an_id_below_zero_is_what_a_sequence_has_said(most_rows: int) -> None:
    """By table, each apart, and both in one step."""
    flat = FlatModel(tiny_model(), kv_blocks=16, most_rows=most_rows)
    prompts = [[7, 3, 2], [9], list(range(20))]
    kvs = [flat.key_values() for _ in prompts]
    for kv, prompt in zip(kvs, prompts, strict=True):
        kv.reserve(len(prompt))
    flat.run(flat.plan(list(zip(prompts, kvs, strict=True))))
    said = flat.verdict().tokens.tolist()
    for kv in kvs:
        kv.free()
    assert len(set(said)) > 1
    order = [2, 0, 1]
    wanted = after(flat, prompts, [[said[n], 5] if n else [said[n]] for n in order])
    found = after(flat, prompts, [[~n, 5] if n else [~n] for n in order])
    assert torch.equal(found, wanted)
    flat.close()


def test_a_verdict_says_the_largest_and_whether_all_are_finite() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [1.0, float("nan"), 9.0], [0.0, 1.0, float("-inf")], [0.0, 1.0, torch.inf]])
    verdicts = Verdict(judge(logits)).wait()
    assert verdicts[0] == (1, 1)
    assert [sound for sound, _ in verdicts] == [1, 0, 0, 0]


def test_the_next_step_is_launched_before_the_host_knows_a_token(tmp_path: Path) -> None:
    with WorkerWorld(tmp_path) as world:
        world.check_greedy(PROMPT, world.answer(None, PROMPT, 5), ())
        assert world.flat.ids[-5:] == (tuple(PROMPT), (~0,), (~0,), (~0,), (~0,))


def test_who_draws_its_tokens_waits_for_them_and_so_do_its_neighbours(tmp_path: Path) -> None:
    with WorkerWorld(tmp_path) as world:
        world.ask("greedy", None, PROMPT, 4)
        world.ask("drawn", None, PROMPT, 4, temperature=0.5)
        before = len(world.flat.ids)
        world.run()
        assert all(token >= 0 for ids in world.flat.ids[before:] for token in ids)
        world.check_greedy(PROMPT, world.tokens("greedy"), ())


def test_a_stop_token_that_the_next_step_did_not_know_of_ends_the_answer(tmp_path: Path) -> None:
    """Its row there was in vain, and harmed nobody."""
    with WorkerWorld(tmp_path, prefix=PrefixCache(8)) as world:
        world.publisher.publish("acme", "a", modules=ALL, rank=4, alpha=8, seed=1)
        whole = world.answer("acme/a", PROMPT, 3 * BLOCK_TOKENS)
        last = BLOCK_TOKENS + 3
        stop = frozenset({whole[last]})
        world.ask("beside", None, PROMPT, 40)
        stopped = world.answer("acme/a", PROMPT, 3 * BLOCK_TOKENS, stop=stop)
        assert stopped == whole[: whole.index(whole[last]) + 1]
        world.check_greedy(PROMPT, world.tokens("beside"), ())
        assert world.answer("acme/a", [*PROMPT, *whole], 2)
        for name in world.events:
            assert world.ended(name).reason in {Reason.STOP, Reason.LENGTH}


def test_a_block_is_kept_for_others_once_all_its_tokens_are_known(tmp_path: Path) -> None:
    """Its last row is under way when the first token of the answer comes."""
    with WorkerWorld(tmp_path, prefix=PrefixCache(8)) as world:
        prompt = list(range(1, BLOCK_TOKENS))
        world.ask("a", None, prompt, 4)
        world.run(lambda: bool(world.tokens("a")))
        assert world.prefix.blocks == 0
        world.run()
        world.check_greedy(prompt, world.tokens("a"), ())
        assert world.prefix.blocks == 1


def test_a_step_that_fails_beside_an_answer_that_ends_takes_nothing_from_that_answer(tmp_path: Path) -> None:
    """The one before has brought its stop token; the one that failed had a row for it, in vain."""
    with WorkerWorld(tmp_path) as world:
        whole = world.answer(None, PROMPT, 8)
        place = next(n for n in range(1, 8) if whole[n] not in whole[:n])
        forwards = [0]

        def fail(*_: object) -> None:
            forwards[0] += 1
            if forwards[0] == place + 2:
                raise RuntimeError("out of memory")

        handle = world.model.get_submodule("lm_head").register_forward_hook(fail)
        world.ask("stops", None, PROMPT, 8, stop=frozenset({whole[place]}))
        world.ask("goes on", None, PROMPT, 8)
        world.run()
        handle.remove()
        assert world.ended("stops").reason is Reason.STOP
        assert world.tokens("stops") == world.tokens("goes on") == whole[: place + 1]
        assert world.ended("goes on").problems[0].code is Code.DEVICE_ERROR


def test_more_sequences_than_are_remembered_wait_for_each_other() -> None:
    flat = FlatModel(tiny_model(), kv_blocks=4)
    with pytest.raises(RuntimeError):
        flat.hear(torch.zeros(MOST_SAID + 1, dtype=torch.int64))
    flat.close()


def test_no_room_for_keys_and_values_is_not_said_before_the_tokens_under_way_are_known(tmp_path: Path) -> None:
    """The last of them may be a stop token: it needs no room then, and gives its own back."""
    full, short = list(range(1, BLOCK_TOKENS)), [1, 2, 3]
    with WorkerWorld(tmp_path, flat={"kv_blocks": 2}) as world:
        whole, other = world.answer(None, full, 6), world.answer(None, short, 6)
        assert whole[1] not in whole[:1] and other[1] not in other[:1]
        world.ask("holds a block", None, short, 6)
        world.ask("stops itself", None, full, 6, stop=frozenset({whole[1]}))
        world.run()
        assert (world.tokens("holds a block"), world.tokens("stops itself")) == (other, whole[:2])
        world.ask("makes room", None, short, 6, stop=frozenset({other[1]}))
        world.ask("takes it", None, full, 6)
        world.run()
        assert (world.tokens("makes room"), world.tokens("takes it")) == (other[:2], whole)
        world.ask("holds a block", None, short, 8)
        world.ask("has none", None, full, 6)
        world.run()
        assert world.ended("has none").problems[0].code is Code.BUDGET_EXCEEDED


@pytest.mark.parametrize("gone", ["cancel", "pause"])
def test_nothing_of_a_forward_that_is_under_way_is_kept_for_others(tmp_path: Path, gone: str) -> None:
    """It was not sound, and whoever began like it would have got its NaNs."""
    prompt = list(range(2 * BLOCK_TOKENS + 4))
    with WorkerWorld(tmp_path, prefix=PrefixCache(8)) as world:
        spoiled = world.model.get_submodule("model.layers.0.self_attn.v_proj")
        handle = spoiled.register_forward_hook(lambda _module, _args, output: output * float("nan"))
        world.ask("a", None, prompt, 4)
        before = len(world.flat.ids)
        world.run(lambda: len(world.flat.ids) > before)
        handle.remove()
        getattr(world.loop, gone)("a")
        assert world.prefix.blocks == 0
        world.check_greedy(prompt, world.answer(None, prompt), ())
        if gone == "pause":
            world.loop.resume("a")
            world.run()
            world.check_greedy(prompt, world.tokens("a"), ())


def test_no_memory_for_a_verdict_takes_nothing_from_the_answers_before_it(tmp_path: Path) -> None:
    with WorkerWorld(tmp_path) as world:
        whole = world.answer(None, PROMPT, 8)
        place = next(n for n in range(1, 8) if whole[n] not in whole[:n])
        hear, heard = world.flat.hear, [0]

        def fail(tokens: Tensor) -> None:
            heard[0] += 1
            if heard[0] == place + 2:
                raise RuntimeError("out of memory")
            hear(tokens)

        world.flat.hear = fail  # type: ignore[method-assign]
        world.ask("stops", None, PROMPT, 8, stop=frozenset({whole[place]}))
        world.ask("goes on", None, PROMPT, 8)
        world.run()
        assert world.ended("stops").reason is Reason.STOP
        assert world.tokens("stops") == world.tokens("goes on") == whole[: place + 1]
        assert world.ended("goes on").problems[0].code is Code.DEVICE_ERROR


def _end_raises(world: WorkerWorld, name: str) -> None:
    """What ends it does so, and raises."""
    hold = world.loop._roll.find(name).hold
    release = hold.release

    def fail() -> None:
        release()
        raise RuntimeError("the device is gone")

    hold.release = fail  # type: ignore[method-assign]


def test_an_end_that_raises_leaves_the_others_their_tokens(tmp_path: Path) -> None:
    """Theirs came with the same forward, and the next one is under way already."""
    with WorkerWorld(tmp_path) as world:
        whole = world.answer(None, PROMPT, 8)
        place = next(n for n in range(1, 8) if whole[n] not in whole[:n])
        world.ask("stops", None, PROMPT, 8, stop=frozenset({whole[place]}))
        world.ask("goes on", None, PROMPT, 8)
        world.loop.step()
        _end_raises(world, "stops")
        with pytest.raises(RuntimeError, match="gone"):
            world.run()
        for _ in range(len(whole) + 2):
            world.loop.step()
        assert world.ended("stops").reason is Reason.STOP
        assert world.tokens("goes on") == whole


def test_closing_ends_all_though_one_end_raises(tmp_path: Path) -> None:
    with WorkerWorld(tmp_path) as world:
        for name in ("first", "second"):
            world.ask(name, None, PROMPT, 8)
        world.loop.step()
        _end_raises(world, "first")
        with pytest.raises(RuntimeError, match="gone"):
            world.loop.close()
        assert [world.ended(name).reason for name in ("first", "second")] == [Reason.CANCELLED] * 2
        world.loop.close()
