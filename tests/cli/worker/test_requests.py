"""Requests one by one: what is refused, paused, resumed, cancelled and stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from adapterd.cli.worker.requests import Reason
from adapterd.gpu_cache.revocation import Revocation
from adapterd.loader.errors import AdapterdError, Code
from fakes.worker_world import ALL, MIB, WorkerWorld

PROMPT = [3, 1, 4, 1, 5]


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"prompt": []}, Code.REQUEST_INVALID),
        ({"prompt": [256]}, Code.REQUEST_INVALID),
        ({"prompt": [-1]}, Code.REQUEST_INVALID),
        ({"most": 0}, Code.REQUEST_INVALID),
        ({"most": 510}, Code.REQUEST_INVALID),
        ({"temperature": -1.0}, Code.REQUEST_INVALID),
        ({"temperature": float("nan")}, Code.REQUEST_INVALID),
        ({"seed": 1 << 63}, Code.REQUEST_INVALID),
        ({"tenant": "No Tenant"}, Code.REF_INVALID),
        ({"name": "open"}, Code.ALREADY_EXISTS),
        ({"name": "third"}, Code.QUEUE_FULL),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(tmp_path: Path, fields: dict[str, Any], code: Code) -> None:
    with WorkerWorld(tmp_path, max_open=1 + (code is not Code.QUEUE_FULL)) as world:
        world.ask("open", None, PROMPT)
        with pytest.raises(AdapterdError) as caught:
            world.ask(**{"name": "new", **fields})
        assert caught.value.code is code
        world.run()
        assert list(world.events) == ["open"] or not world.events["new"]


def test_what_is_not_open_is_not_found(tmp_path: Path) -> None:
    with WorkerWorld(tmp_path) as world:
        world.answer(None, PROMPT)
        for act in (world.loop.cancel, world.loop.pause, world.loop.resume):
            with pytest.raises(AdapterdError) as caught:
                act("alone-0")
            assert caught.value.code is Code.NOT_FOUND


def test_a_stop_token_ends_the_answer_and_is_part_of_it(tmp_path: Path) -> None:
    with WorkerWorld(tmp_path) as world:
        whole = world.answer(None, PROMPT, 8)
        stopped = world.answer(None, PROMPT, 8, stop=frozenset({whole[2]}))
        assert stopped == whole[: whole.index(whole[2]) + 1]
        assert world.ended("alone-1").reason is Reason.STOP


def test_cancel_in_the_middle_keeps_what_was_told(tmp_path: Path) -> None:
    with WorkerWorld(tmp_path) as world:
        world.ask("a", None, PROMPT, 8)
        world.run(lambda: len(world.tokens("a")) == 3)
        world.loop.cancel("a")
        ended = world.ended("a")
        assert (ended.reason, ended.tokens, ended.problems) == (Reason.CANCELLED, 3, ())
        world.check_held(0)


def test_however_a_request_ends_its_adapter_may_go_for_the_next(tmp_path: Path) -> None:
    """VRAM is as large as one adapter: who keeps a lease keeps everybody else out."""
    with WorkerWorld(tmp_path, vram=MIB) as world:
        reasons = [Reason.LENGTH, Reason.STOP, Reason.CANCELLED, Reason.FAILED, Reason.LENGTH]
        for number, reason in enumerate(reasons):
            name, ref = f"a{number}", f"acme/n{number}"
            world.publisher.publish("acme", f"n{number}", modules=ALL, rank=4, alpha=8, seed=number + 1)
            world.ask(name, ref, PROMPT, 6, stop=frozenset(range(256)) if reason is Reason.STOP else frozenset())
            world.run(lambda name=name: bool(world.tokens(name)))  # type: ignore[misc]
            if reason is Reason.CANCELLED:
                world.loop.cancel(name)
            if reason is Reason.FAILED:
                world.cache.revoke(Revocation("acme", adapter=f"n{number}"))
            world.run()
            assert world.ended(name).reason is reason
            world.check_held(0)
        assert world.cache.statistics().misses == len(reasons)


def test_a_paused_request_holds_nothing_and_goes_on_with_its_version(tmp_path: Path) -> None:
    with WorkerWorld(tmp_path) as world:
        publish = world.publisher.publish
        older = publish("acme", "finance", modules=ALL, rank=4, alpha=8, seed=1)
        world.ask("a", "acme/finance", PROMPT, 8)
        world.run(lambda: len(world.tokens("a")) == 3)
        for _ in range(2):
            world.loop.pause("a")
            world.check_held(0)
        newer = publish("acme", "finance", 2, modules=ALL, rank=4, alpha=8, seed=2)
        assert len(world.tokens("a")) == 3
        world.check_greedy(PROMPT, world.answer("acme/finance", PROMPT), [(newer, 2.0, 1.0)])
        for _ in range(2):
            world.loop.resume("a")
        world.run()
        assert len(world.tokens("a")) == 8
        world.check_greedy(PROMPT, world.tokens("a"), [(older, 2.0, 1.0)])


def test_sampling_goes_on_after_a_pause_where_it_was(tmp_path: Path) -> None:
    with WorkerWorld(tmp_path) as world:
        warm = {"temperature": 1.0, "seed": 3, "most": 8}
        whole = world.answer(None, PROMPT, **warm)
        world.ask("a", None, PROMPT, **warm)
        world.run(lambda: len(world.tokens("a")) == 3)
        world.loop.pause("a")
        world.loop.resume("a")
        world.run()
        assert world.tokens("a") == whole


def test_a_composition_goes_on_with_its_versions_after_a_pause(tmp_path: Path) -> None:
    """It must not go on with another adapter than it began with."""
    with WorkerWorld(tmp_path) as world:
        publish = world.publisher.publish
        for seed, name in enumerate(("finance", "legal"), 1):
            publish("acme", name, modules=ALL, rank=4, alpha=8, seed=seed)
        both = (("acme/finance", 0.5), ("acme/legal", 0.5))
        whole = world.answer(both, PROMPT, 8)
        world.ask("a", both, PROMPT, 8)
        world.run(lambda: len(world.tokens("a")) == 3)
        world.loop.pause("a")
        publish("acme", "legal", 2, modules=ALL, rank=4, alpha=8, seed=9)
        world.loop.resume("a")
        world.run()
        assert world.tokens("a") == whole
        assert world.answer(both, PROMPT, 8) != whole


def test_the_last_event_says_what_ran(tmp_path: Path) -> None:
    with WorkerWorld(tmp_path) as world:
        world.publisher.publish("acme", "finance", modules=ALL, rank=4, alpha=8, seed=1)
        world.ask("a", (("acme/finance", 0.5),), PROMPT)
        world.ask("b", None, PROMPT)
        world.run()
        ((digest, weight),) = world.ended("a").applied
        assert len(digest) == 64 and weight == 0.5
        assert world.ended("b").applied == ()
