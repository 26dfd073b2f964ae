"""Failures at every stage: they stay with their request, and nothing is left behind (I17)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from torch import Tensor

from adapterd.cli.worker.kv import KeyValues
from adapterd.cli.worker.prefix import BLOCK_TOKENS, PrefixCache
from adapterd.cli.worker.requests import Event, Reason, Request, Token
from adapterd.cli.worker.scheduling import C, Choice, FirstComeFirstServed
from adapterd.cli.worker.tally import Progress
from adapterd.gpu_cache.revocation import Revocation
from adapterd.loader.base_model import BaseSpec
from adapterd.loader.errors import AdapterdError, Code
from fakes.hanging_source import HangingSource
from fakes.worker_world import ALL, WorkerWorld

PROMPT = [3, 1, 4, 1, 5]


def publish_all(world: WorkerWorld) -> None:
    world.publisher.publish("acme", "finance", modules=ALL, rank=4, alpha=8, seed=1)
    world.publisher.publish("acme", "narrow", modules=["q_proj"], rank=2, alpha=2, seed=2)


def ask_two(world: WorkerWorld) -> None:
    world.ask("base", None, PROMPT, 6)
    world.ask("finance", "acme/finance", PROMPT, 6)


def code_of(world: WorkerWorld, name: str) -> Code:
    ended = world.ended(name)
    assert ended.reason is Reason.FAILED
    return ended.problems[0].code


def check_still_serves(world: WorkerWorld, wish: str = "acme/finance") -> None:
    """After a failure a new request is answered."""
    world.check_held(0)
    assert len(world.answer(wish, PROMPT)) == 4
    world.check_greedy(PROMPT, world.answer(None, PROMPT), ())


# The adapter


def test_an_adapter_that_fails_fails_its_own_request_only(tmp_path: Path) -> None:
    with WorkerWorld(tmp_path) as world:
        publish_all(world)
        weights = world.publisher.root / "acme/narrow/1/adapter_model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
        ask_two(world)
        wrong = {
            "nothing": ("acme/nothing", Code.NOT_FOUND),
            "flipped": ("acme/narrow", Code.HASH_MISMATCH),
            "no ref": ("finance", Code.REF_INVALID),
            "zero": ((("acme/finance", float("nan")),), Code.COMPOSITION_INVALID),
        }
        for name, (wish, _) in wrong.items():
            world.ask(name, wish, PROMPT, tenant="acme")  # type: ignore[arg-type]
        world.ask("foreign", "acme/finance", PROMPT, tenant="globex")
        world.run()
        assert {name: code_of(world, name) for name in wrong} == {name: code for name, (_, code) in wrong.items()}
        assert code_of(world, "foreign") is Code.NOT_FOUND
        assert len(world.tokens("base")) == len(world.tokens("finance")) == 6
        world.check_greedy(PROMPT, world.tokens("base"), ())
        check_still_serves(world)


def test_an_adapter_with_a_module_that_is_not_served_fails_before_its_first_step(tmp_path: Path) -> None:
    with WorkerWorld(tmp_path, targets=["q_proj"]) as world:
        publish_all(world)
        ask_two(world)
        world.ask("narrow", "acme/narrow", PROMPT, 6)
        world.run()
        assert code_of(world, "finance") is Code.MODULE_NOT_SERVED
        assert len(world.tokens("base")) == len(world.tokens("narrow")) == 6
        check_still_serves(world, "acme/narrow")


def test_base_rows_do_not_wait_for_an_adapter_that_hangs(tmp_path: Path) -> None:
    sources: list[HangingSource] = []

    def hang(inner: object) -> HangingSource:
        sources.append(HangingSource(inner))  # type: ignore[arg-type]
        return sources[0]

    with WorkerWorld(tmp_path, wrap=hang, scheduler=FirstComeFirstServed(seats=2, ahead=2)) as world:  # type: ignore[arg-type]
        publish_all(world)
        for number in range(6):
            world.ask(f"a{number}", "acme/finance", PROMPT)
        world.ask("base", None, PROMPT, 6)
        for _ in range(6):
            assert world.loop.step() is Progress.RAN
        assert world.loop.step() is Progress.WAITING
        assert len(world.tokens("base")) == 6
        world.check_held(2)
        world.loop.cancel("a0")
        sources[0].barrier.open()
        world.run()
        assert world.ended("a0").reason is Reason.CANCELLED
        assert all(len(world.tokens(f"a{number}")) == 4 for number in range(1, 6))


def test_a_base_reload_ends_everything_that_was_open(tmp_path: Path) -> None:
    with WorkerWorld(tmp_path, prefix=PrefixCache(8)) as world:
        publish_all(world)
        ask_two(world)
        world.run(lambda: len(world.tokens("finance")) == 2)
        moved = BaseSpec.of(world.base.modules, id=world.base.id, revision="c" * 40)
        world.engine.rebind(world.model, moved)
        world.run()
        assert len(world.tokens("base")) == 6 or code_of(world, "base") is Code.SLOT_STALE
        assert code_of(world, "finance") is Code.SLOT_STALE
        world.engine.rebind(world.model, world.base)
        check_still_serves(world)


def test_a_revocation_while_serving_ends_what_it_is_about_and_nothing_else(tmp_path: Path) -> None:
    with WorkerWorld(tmp_path, prefix=PrefixCache(8)) as world:
        publish_all(world)
        finance = world.answer("acme/finance", PROMPT, 30)
        both = (("acme/finance", 1.0), ("acme/narrow", 1.0))
        hit = {"narrow": "acme/narrow", "both": both, "paused": "acme/narrow"}
        for name, wish in {"base": None, "finance": "acme/finance", **hit}.items():
            world.ask(name, wish, PROMPT, 30)  # type: ignore[arg-type]
        world.run(lambda: all(len(world.tokens(name)) > 2 for name in hit))
        world.loop.pause("paused")
        told = {name: len(world.tokens(name)) for name in hit}
        world.cache.revoke(Revocation("acme", adapter="narrow", reason="it leaks"))
        world.ask("late", "acme/narrow", PROMPT)
        world.run()
        for name in (*hit, "late"):
            assert code_of(world, name) is Code.VERSION_REVOKED
            assert "it leaks" in world.ended(name).problems[0].message
        assert {name: len(world.tokens(name)) for name in hit} == told and max(told.values()) < 30
        assert world.tokens("finance") == finance
        assert len(world.tokens("base")) == 30
        check_still_serves(world)


# The model


def fail_at(world: WorkerWorld, path: str, call: int) -> Callable[[], None]:
    """The `call`-th forward of a module from now raises. Returns what undoes it."""
    left = [call]

    def hook(*_: object) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError("out of memory\nand a long story")

    return world.model.get_submodule(path).register_forward_hook(hook).remove


@pytest.mark.parametrize("path", ["model.embed_tokens", "model.layers.0.self_attn.k_proj", "model.layers.1", "lm_head"])
@pytest.mark.parametrize("call", [1, 3])
def test_a_model_that_fails_ends_the_step_and_not_the_worker(tmp_path: Path, path: str, call: int) -> None:
    with WorkerWorld(tmp_path) as world:
        publish_all(world)
        world.ask("finance", "acme/finance", PROMPT, 6)
        world.run(lambda: len(world.tokens("finance")) == 1)  # its second one is under way by then
        world.ask("base", None, PROMPT, 6)  # its prompt runs beside the other's next token
        undo = fail_at(world, path, call)
        world.run()
        undo()
        for name in ("base", "finance"):
            assert code_of(world, name) is Code.DEVICE_ERROR
            assert "long story" not in world.ended(name).problems[0].message
            assert len(world.tokens(name)) == call - 1 + 2 * (name == "finance")
        check_still_serves(world)


def test_logits_that_are_not_finite_end_their_own_request_only(tmp_path: Path) -> None:
    def spoil(_module: object, _args: object, output: Tensor) -> Tensor:
        output[0, 0, 7] = float("nan")
        return output

    with WorkerWorld(tmp_path) as world:
        for name in ("first", "second"):
            world.ask(name, None, PROMPT, 3)
        world.loop.step()
        handle = world.model.get_submodule("lm_head").register_forward_hook(spoil)
        world.loop.step()
        handle.remove()
        world.run()
        assert code_of(world, "first") is Code.NONFINITE
        world.check_greedy(PROMPT, world.tokens("second"), ())
        assert len(world.tokens("second")) == 3


# Our own collaborators


class NoMemory(PrefixCache):
    """Fails to copy, in one direction."""

    def __init__(self, direction: str) -> None:
        super().__init__(64)
        self.direction: str | None = direction

    def fill(self, prefix_key: bytes, tokens: Sequence[int], kv: KeyValues) -> int:
        taken = super().fill(prefix_key, tokens, kv)
        if self.direction == "fill":
            raise RuntimeError("out of memory")
        return taken

    def keep(self, prefix_key: bytes, tokens: Sequence[int], kv: KeyValues) -> None:
        super().keep(prefix_key, tokens, kv)
        if self.direction == "keep":
            raise RuntimeError("out of memory")


def test_no_memory_for_taking_prefixes_fails_the_request(tmp_path: Path) -> None:
    prefix = NoMemory("fill")
    with WorkerWorld(tmp_path, prefix=prefix) as world:
        publish_all(world)
        ask_two(world)
        world.run()
        assert code_of(world, "base") is code_of(world, "finance") is Code.DEVICE_ERROR
        prefix.direction = None
        check_still_serves(world)


def test_no_memory_for_keeping_prefixes_empties_the_cache_and_fails_nobody(tmp_path: Path) -> None:
    with WorkerWorld(tmp_path, prefix=NoMemory("keep")) as world:
        publish_all(world)
        world.check_greedy(PROMPT, world.answer(None, PROMPT, 3 * BLOCK_TOKENS), ())
        assert world.prefix.blocks == 0
        check_still_serves(world)


class BrokenScheduler(FirstComeFirstServed):
    """Raises when it is asked who runs."""

    def choose(self, ready: Sequence[C], max_rows: int) -> Choice[C]:
        raise LookupError("nobody knows")


def test_a_scheduler_that_raises_ends_the_loop_and_leaves_nothing(tmp_path: Path) -> None:
    with WorkerWorld(tmp_path, scheduler=BrokenScheduler()) as world:
        publish_all(world)
        ask_two(world)
        with pytest.raises(LookupError):
            world.run()
        world.loop.close()
        assert world.ended("base").reason is Reason.CANCELLED


@pytest.mark.parametrize("kind", [Token, Event])
def test_a_caller_that_raises_ends_its_own_request_only(tmp_path: Path, kind: type) -> None:
    calls: list[Event] = []

    def sink(event: Event) -> None:
        calls.append(event)
        if kind is not Token or isinstance(event, Token):
            raise ConnectionError("the caller went away")

    with WorkerWorld(tmp_path) as world:
        world.loop.submit(Request("rude", "acme", None, PROMPT, 6), sink)
        world.ask("base", None, PROMPT, 6)
        with pytest.raises(ConnectionError):
            world.run()
        world.run()
        world.check_greedy(PROMPT, world.tokens("base"), ())
        assert len(world.tokens("base")) == 6
        assert [type(event).__name__ for event in calls] == ["Token", "Ended"]


# Endings


def test_closing_ends_requests_in_every_state(tmp_path: Path) -> None:
    with WorkerWorld(tmp_path, wrap=HangingSource, max_rows=8) as world:
        publish_all(world)
        world.ask("running", None, PROMPT, 50)
        world.ask("loading", "acme/finance", PROMPT)
        world.ask("paused", None, PROMPT)
        world.loop.step()
        world.loop.pause("paused")
        world.ask("waiting", None, PROMPT)
        open_now = world.loop.statistics().open
        assert sorted(open_now.elements()) == ["loading", "paused", "ready", "waiting"]
        world.loop.close()
        world.loop.close()
        for name in ("running", "loading", "paused", "waiting"):
            assert world.ended(name).reason is Reason.CANCELLED
        with pytest.raises(AdapterdError) as caught:
            world.ask("late")
        assert caught.value.code is Code.CACHE_CLOSED


def test_draining_finishes_what_is_open(tmp_path: Path) -> None:
    with WorkerWorld(tmp_path) as world:
        publish_all(world)
        ask_two(world)
        world.ask("paused", None, PROMPT)
        world.loop.pause("paused")
        world.loop.drain()
        assert not world.loop.drained and world.ended("paused").reason is Reason.CANCELLED
        world.loop.step()
        world.loop.pause("finance")  # nobody could resume it any more
        assert world.ended("finance").reason is Reason.CANCELLED
        world.run()
        assert world.loop.drained and len(world.tokens("base")) == 6
