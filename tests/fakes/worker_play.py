"""Random schedules of a worker: arrivals, cancels, pauses and resumes between the steps, and whoever runs next."""

from __future__ import annotations

import random
from collections.abc import Sequence

from torch import Tensor, testing

from adapterd.cli.worker.requests import Reason, Wish
from adapterd.cli.worker.scheduling import C, Choice, FirstComeFirstServed, Scheduler
from adapterd.cli.worker.selected import Selected
from adapterd.cli.worker.tally import Progress
from adapterd.gpu_cache.step_budget import StepBudget, StepLimits
from fakes.worker_world import ALL, MIB, PATIENCE, TOLERANCE, Part, WorkerWorld

REQUESTS = 14


class Unruly:
    """A scheduler that takes anybody, in any order, for any number of rows. `names`: its last choice, in row order."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.names: list[str] = []

    def admit(self, waiting: Sequence[C], idle: Sequence[C]) -> Sequence[C]:
        return self._random.sample(waiting, self._random.randint(0 if idle else 1, len(waiting)))

    def choose(self, ready: Sequence[C], max_rows: int) -> Choice[C]:
        able = [each for each in ready if each.pending]
        picked = self._random.sample(able, self._random.randint(1, len(able))) if able else []
        self.names = [each.id for each in picked]
        return Choice([(each, self._random.randint(1, min(each.pending, 9))) for each in picked])


def kinds(world: WorkerWorld) -> list[tuple[Wish, tuple[Part, ...]]]:
    """Published adapters, as asked for and as they must be merged."""
    publish = world.publisher.publish
    finance = publish("acme", "finance", modules=ALL, rank=5, alpha=10, seed=1)
    legal = publish("acme", "legal", modules=["q_proj", "up_proj"], rank=2, alpha=2, seed=2)
    code = publish("globex", "code", modules=["v_proj", "down_proj"], rank=8, alpha=8, seed=3)
    return [
        (None, ()),
        ("acme/finance", ((finance, 2.0, 1.0),)),
        ("acme/legal", ((legal, 1.0, 1.0),)),
        ("globex/code", ((code, 1.0, 1.0),)),
        ((("acme/finance", 0.5), ("acme/legal", -1.0)), ((finance, 2.0, 0.5), (legal, 1.0, -1.0))),
    ]


class Watched:
    """Another scheduler, and who it chose."""

    def __init__(self, inner: Scheduler) -> None:
        self._inner = inner
        self.names: list[str] = []

    def admit(self, waiting: Sequence[C], idle: Sequence[C]) -> Sequence[C]:
        return self._inner.admit(waiting, idle)

    def choose(self, ready: Sequence[C], max_rows: int) -> Choice[C]:
        choice = self._inner.choose(ready, max_rows)
        self.names = [each.id for each, _ in choice.run]
        return choice


def selected(kv_blocks: int = 64, rows: int = 64) -> Selected:
    limits = StepLimits(kv_blocks=kv_blocks, rows=rows, adapter_bytes=8 * MIB, load_slots=1, load_bytes=MIB)
    return Selected(StepBudget(limits), ahead=4)


def scheduler_of(seed: int) -> Unruly | Watched:
    """Mostly the unruly one."""
    real: dict[int, Scheduler] = {0: FirstComeFirstServed(seats=3, ahead=2), 1: selected(kv_blocks=12)}
    return Watched(real[seed]) if seed in real else Unruly(seed)


class Play:
    """One random schedule: arrivals, cancels, pauses and resumes between the steps."""

    def __init__(self, world: WorkerWorld, scheduler: Unruly | Watched, seed: int) -> None:
        self.world, self.scheduler, self.random = world, scheduler, random.Random(seed)
        self.kinds = kinds(world)
        self.asked: dict[str, tuple[list[int], tuple[Part, ...]]] = {}
        self.logits: dict[str, dict[int, Tensor]] = {}
        self.paused: set[str] = set()
        self.cancels = REQUESTS // 2  # some end by themselves, however many steps pass until a loader thread is through

    def open(self) -> list[str]:
        return [name for name in self.asked if not any(hasattr(e, "reason") for e in self.world.events[name])]

    def arrive(self) -> None:
        wish, parts = self.random.choice(self.kinds)
        stem = [7, 3] * self.random.randint(0, 20)  # prefixes that others share
        prompt = stem + [self.random.randrange(256) for _ in range(self.random.randint(1, 12))]
        name = f"r{len(self.asked)}"
        self.asked[name] = prompt, parts
        self.world.ask(name, wish, prompt, self.random.randint(1, 12))

    def act(self) -> None:
        """Something happens between two steps, or nothing."""
        if len(self.asked) < REQUESTS and self.random.random() < 0.4:
            self.arrive()
        names, what = self.open(), self.random.random()
        if names and what < 0.06 and self.cancels:
            self.cancels -= 1
            self.world.loop.cancel(self.random.choice(names))
        elif names and what < 0.2:
            name = self.random.choice(names)
            self.world.loop.pause(name)
            self.paused.add(name)
        elif (self.paused and what < 0.4) or len(self.asked) == REQUESTS:
            for name in self.paused & set(names):
                self.world.loop.resume(name)
            self.paused.clear()

    def step(self) -> Progress:
        self.world.flat.last, self.scheduler.names = (), []
        progress = self.world.loop.step()
        for name, (length, logits) in zip(self.scheduler.names, self.world.flat.last, strict=True):
            self.logits.setdefault(name, {})[length] = logits
        return progress

    def run(self) -> None:
        for _ in range(PATIENCE):
            self.act()
            if self.step() is Progress.IDLE and len(self.asked) == REQUESTS and not self.open():
                return
        raise AssertionError("the schedule does not come to an end")

    def check(self) -> None:
        """Each request has given what it gives alone on merged weights."""
        reasons = {self.world.ended(name).reason for name in self.asked}
        assert reasons <= {Reason.LENGTH, Reason.CANCELLED} and Reason.LENGTH in reasons
        for name, (prompt, parts) in self.asked.items():
            tokens = self.world.tokens(name)
            self.world.check_greedy(prompt, tokens, parts)
            wanted = self.world.logits(parts, [*prompt, *tokens])
            for length, logits in self.logits.get(name, {}).items():
                testing.assert_close(logits.double(), wanted[length - 1], rtol=0, atol=TOLERANCE)
        assert self.world.loop.statistics().rows > len(self.asked)
