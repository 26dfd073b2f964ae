"""What callers do when they are told something: anything, to any request, in the middle of a step."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from adapterd.cli.worker.prefix import PrefixCache
from adapterd.cli.worker.requests import Ended, Event, Reason, Request, Token
from adapterd.cli.worker.tally import Progress
from adapterd.gpu_cache.engine import LoRAEngine
from adapterd.gpu_cache.engine.device_plan import LaunchShape
from adapterd.gpu_cache.engine.engine import Step
from adapterd.gpu_cache.revocation import Revocation
from adapterd.loader.errors import Code, NotFound
from fakes.worker_play import kinds
from fakes.worker_world import ALL, WorkerWorld

PROMPT = [3, 1, 4, 1, 5]
Act = Callable[[Event], object]


def ask(world: WorkerWorld, name: str, act: Act, wish: str | None = None, most: int = 6) -> None:
    """A request whose caller does something with each event, after it has noted it."""

    def sink(event: Event) -> None:
        world.events[name].append(event)
        act(event)

    world.loop.submit(Request(name, "acme", wish, PROMPT, most), sink)


def at_token(index: int, act: Callable[[], object]) -> Act:
    return lambda event: act() if isinstance(event, Token) and event.index == index else None


def publish(world: WorkerWorld, *names: str) -> None:
    for seed, name in enumerate(names, 1):
        world.publisher.publish("acme", name, modules=ALL, rank=4, alpha=8, seed=seed)


# One request ends another


def test_one_that_is_ended_by_another_hears_its_token_and_then_its_end(tmp_path: Path) -> None:
    """Both have a token of the same step: it was told after the end."""
    with WorkerWorld(tmp_path) as world:
        ask(world, "first", at_token(1, lambda: world.loop.cancel("second")))
        world.ask("second", None, PROMPT, 6)
        world.run()
        assert world.ended("second").reason is Reason.CANCELLED
        assert len(world.tokens("second")) == 2
        world.check_greedy(PROMPT, world.tokens("second"), ())
        assert len(world.tokens("first")) == 6


def test_one_whose_end_another_one_brings_about_raises_for_itself_only(tmp_path: Path) -> None:
    def rude(event: Event) -> None:
        if isinstance(event, Ended):
            raise ConnectionError("the caller went away")

    with WorkerWorld(tmp_path) as world:
        ask(world, "first", at_token(1, lambda: world.loop.cancel("rude")))
        ask(world, "rude", rude)
        with pytest.raises(ConnectionError):
            world.run()
        world.run()
        assert (world.ended("first").reason, len(world.tokens("first"))) == (Reason.LENGTH, 6)


@pytest.mark.parametrize("act", ["cancel", "pause"])
def test_a_row_under_way_was_in_vain_when_its_request_let_go(tmp_path: Path, act: str) -> None:
    with WorkerWorld(tmp_path) as world:
        world.ask("a", None, PROMPT, 6)
        world.run(lambda: len(world.tokens("a")) == 2)
        getattr(world.loop, act)("a")  # while its third token is under way
        world.check_held(0)
        assert world.loop.step() is Progress.IDLE
        assert len(world.tokens("a")) == 2
        if act == "pause":
            world.loop.resume("a")
            world.run()
            world.check_greedy(PROMPT, world.tokens("a"), ())
            assert len(world.tokens("a")) == 6


def test_who_ends_itself_hears_nothing_more(tmp_path: Path) -> None:
    with WorkerWorld(tmp_path) as world:
        ask(world, "a", at_token(2, lambda: world.loop.cancel("a")))
        world.run()
        assert (world.ended("a").reason, len(world.tokens("a"))) == (Reason.CANCELLED, 3)


@pytest.mark.parametrize("act", ["cancel", "pause"])
def test_a_failure_that_ends_those_behind_it_in_line(tmp_path: Path, act: str) -> None:
    """They are loading, or about to ask, or about to run: whatever the loop has in its hands then."""
    with WorkerWorld(tmp_path) as world:
        publish(world, "a")
        behind = [f"b{number}" for number in range(3)]

        def end_all(event: Event) -> None:
            if isinstance(event, Ended):
                for name in behind:
                    getattr(world.loop, act)(name)

        ask(world, "bad", end_all, "acme/nothing")
        for name, wish in zip(behind, ("acme/a", None, "acme/a"), strict=True):
            world.ask(name, wish, PROMPT, 60)
        world.run(lambda: "bad" in world.events)
        world.run()
        if act == "pause":
            world.check_held(0)
            world.loop.close()
        assert world.ended("bad").problems[0].code is Code.NOT_FOUND
        assert [world.ended(name).reason for name in behind] == [Reason.CANCELLED] * 3


def test_a_request_that_is_sent_by_a_sink_is_answered(tmp_path: Path) -> None:
    with WorkerWorld(tmp_path) as world:
        ask(world, "a", lambda event: isinstance(event, Ended) and world.ask("b", None, PROMPT, 3))
        world.run()
        world.check_greedy(PROMPT, world.tokens("b"), ())
        assert len(world.tokens("b")) == 3


def test_a_sink_that_closes_the_loop_ends_all(tmp_path: Path) -> None:
    with WorkerWorld(tmp_path) as world:
        publish(world, "a")
        ask(world, "first", at_token(1, world.loop.close))
        world.ask("second", "acme/a", PROMPT, 6)
        world.ask("third", None, PROMPT, 6)
        world.run(lambda: world.loop.drained)
        assert {world.ended(name).reason for name in world.events} == {Reason.CANCELLED}


def test_a_step_inside_a_step_is_refused(tmp_path: Path) -> None:
    with WorkerWorld(tmp_path) as world:
        ask(world, "a", at_token(1, world.loop.step))
        world.ask("b", None, PROMPT, 6)
        with pytest.raises(RuntimeError, match="sink"):
            world.run()
        world.run()
        assert world.ended("a").reason is Reason.CANCELLED
        assert len(world.tokens("b")) == 6


@pytest.mark.parametrize("seed", range(6))
def test_whatever_sinks_do_each_request_has_its_tokens_and_one_end(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    with WorkerWorld(tmp_path, prefix=PrefixCache(16), max_rows=12) as world:
        sorts = kinds(world)
        asked: dict[str, Any] = {}
        over = list[bool]()

        def act(_: Event) -> None:
            if over:
                return
            what, names = dice.random(), list(asked)
            if what < 0.3 and len(asked) < 12:
                send()
            verb = dice.choice(["cancel", "pause", "resume", "resume"])
            try:
                getattr(world.loop, verb)(dice.choice(names))
            except NotFound:  # it is over
                return

        def send() -> None:
            name, (wish, parts) = f"r{len(asked)}", dice.choice(sorts)
            asked[name] = parts
            tenant = "globex" if wish == "globex/code" else "acme"

            def sink(event: Event, name: str = name) -> None:
                world.events[name].append(event)
                act(event)

            world.loop.submit(Request(name, tenant, wish, PROMPT, dice.randint(1, 9)), sink)

        for _ in range(4):
            send()
        world.run()
        over.append(True)
        world.loop.close()  # whoever was left paused
        for name, parts in asked.items():
            assert world.ended(name).reason in {Reason.LENGTH, Reason.CANCELLED}
            world.check_greedy(PROMPT, world.tokens(name), parts)
        assert any(world.tokens(name) for name in asked)


# A step that fails when it is over


class Unmarked(LoRAEngine[Any]):
    """Its step number `fails` ends in a fault, after the model has run. `meanwhile` is done before."""

    fails = -1
    meanwhile: Callable[[], object] = staticmethod(lambda: None)

    def check(self, lease: Any) -> None:
        """It may be a step, too, but no model runs in it."""
        fails, self.fails = self.fails, -1
        super().check(lease)
        self.fails = fails

    def step(self, rows: Iterable[tuple[Any, int]], *, shape: LaunchShape | None = None) -> Step[Any]:
        return _Unmarked(self, tuple(rows), shape)


class _Unmarked(Step[Any]):
    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)
        engine = self._engine
        assert isinstance(engine, Unmarked)
        engine.fails -= 1
        if engine.fails == 0:
            engine.meanwhile()
            raise RuntimeError("no mark could be recorded")


def test_a_step_that_fails_behind_the_model_takes_the_guilty_and_nothing_from_the_others(tmp_path: Path) -> None:
    """The others had keys and values of rows whose tokens they never got: no step could take them any more."""
    with WorkerWorld(tmp_path, engine=Unmarked) as world:
        publish(world, "a", "leaks")
        wanted = world.answer("acme/a", PROMPT, 30)
        for name, wish in (("a", "acme/a"), ("leaks", "acme/leaks"), ("base", None)):
            world.ask(name, wish, PROMPT, 30)
        world.run(lambda: all(world.tokens(name) for name in ("a", "leaks", "base")))
        engine = world.engine
        assert isinstance(engine, Unmarked)
        engine.meanwhile = lambda: world.cache.revoke(Revocation("acme", adapter="leaks"))  # type: ignore[method-assign]
        engine.fails = 1
        world.run()
        assert world.ended("leaks").problems[0].code is Code.VERSION_REVOKED
        assert world.tokens("a") == wanted
        world.check_greedy(PROMPT, world.tokens("base"), ())
        assert len(world.tokens("base")) == 30


def test_a_step_that_fails_behind_the_model_for_nobodys_fault_ends_all_that_were_in_it(tmp_path: Path) -> None:
    with WorkerWorld(tmp_path, engine=Unmarked) as world:
        world.ask("a", None, PROMPT, 6)
        world.run(lambda: len(world.tokens("a")) == 2)
        assert isinstance(world.engine, Unmarked)
        world.engine.fails = 1
        world.ask("late", None, PROMPT, 2)
        world.run()
        assert world.ended("a").problems[0].code is Code.DEVICE_ERROR
        assert world.loop.step() is Progress.IDLE
        assert len(world.answer(None, PROMPT, 2)) == 2
