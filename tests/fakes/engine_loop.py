"""An engine's loop and a cache with real capacity, in steps: what `Selector` decides is done, and checked."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import pairwise

from adapterd.gpu_cache import Place
from adapterd.gpu_cache.selector import Selection, Selector
from adapterd.gpu_cache.step_budget import AdapterKey, Resource, StepBudget, StepLimits
from adapterd.gpu_cache.whereabouts import Whereabouts


@dataclass(frozen=True, slots=True)
class FakeRequest:
    """`steps`: how many steps with rows it takes from its start to its end."""

    id: str
    tenant: str = "acme"
    adapters: tuple[str, ...] = ()
    arrived: int = 0
    kv_blocks: int = 1
    rows: int = 1
    steps: int = 1

    @property
    def keys(self) -> set[AdapterKey]:
        return {(self.tenant, digest) for digest in self.adapters}


@dataclass
class FakeEngine:
    """Loads take `load_steps`; adapters stay until room is needed, longest unused first.

    Room is counted as the cache would: an arena of `limits.adapter_bytes` that can never hold more.
    """

    limits: StepLimits
    sizes: dict[AdapterKey, int]
    patience: int
    load_steps: int = 1
    tick: int = 0
    waiting: list[FakeRequest] = field(default_factory=list)
    running: dict[str, FakeRequest] = field(default_factory=dict)
    left: Counter[str] = field(default_factory=Counter)
    resident: dict[AdapterKey, int] = field(default_factory=dict)  # by last use
    staging: dict[AdapterKey, int] = field(default_factory=dict)  # by tick of arrival
    finished: dict[str, int] = field(default_factory=dict)
    started_at: dict[str, int] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.budget = StepBudget(self.limits)
        self.selector = Selector[FakeRequest](self.budget, patience=self.patience)

    @property
    def residency(self) -> dict[AdapterKey, Whereabouts]:
        return {key: Whereabouts(self.place(key), size) for key, size in self.sizes.items()}

    def place(self, key: AdapterKey) -> Place:
        return Place.RESIDENT if key in self.resident else Place.STAGING if key in self.staging else Place.ABSENT

    def step(self) -> Selection[FakeRequest]:
        running = [replace(request, rows=1) for request in self.running.values()]
        chosen = self.selector.select(self.waiting, running, self.residency, tick=self.tick)
        self._check(chosen)
        for request, _ in chosen.refused:
            self.waiting.remove(request)
            self.refused.append(request.id)
        for request in chosen.started:
            self.waiting.remove(request)
            self.running[request.id] = request
            self.left[request.id] = request.steps
            self.started_at[request.id] = self.tick
        for key in chosen.loads:
            self._load(key, chosen.held)
        for request in chosen.run:
            self._run(request)
        self.tick += 1
        for key in [key for key, at in self.staging.items() if at <= self.tick]:
            del self.staging[key]
            self.resident[key] = self.tick
        return chosen

    def drain(self, most: int) -> None:
        """Steps until nothing waits or runs. Fails after `most`: somebody starves."""
        for _ in range(most):
            if not self.waiting and not self.running:
                break
            self.step()
        else:
            raise AssertionError(f"after {most} steps {self.waiting} wait and {list(self.running)} run")
        while self.staging:
            self.step()
        self.step()

    def cancel(self, request_id: str) -> None:
        self.running.pop(request_id, None)
        self.waiting = [request for request in self.waiting if request.id != request_id]

    def _run(self, request: FakeRequest) -> None:
        for key in request.keys:
            self.resident[key] = self.tick
        self.left[request.id] -= 1
        if not self.left[request.id]:
            del self.running[request.id], self.left[request.id]
            self.finished[request.id] = self.tick

    def _load(self, key: AdapterKey, held: frozenset[AdapterKey]) -> None:
        assert self.place(key) is Place.ABSENT, f"{key} is {self.place(key)} already"
        victims = sorted(self.resident.keys() - held, key=lambda k: (self.resident[k], k))
        while self._in_use() + self._pages(key) > self.limits.adapter_bytes:
            assert victims, f"no room for {key}: the selector promised what is not there"
            del self.resident[victims.pop(0)]
        self.staging[key] = self.tick + self.load_steps

    def _check(self, chosen: Selection[FakeRequest]) -> None:
        for resource in Resource:
            assert 0 <= self.budget.taken(resource) <= self.budget.limit(resource), resource
        for request in chosen.run:
            assert request.keys <= self.resident.keys(), f"{request} runs without its adapter"
            assert request.keys <= chosen.held
        assert {*self.staging, *chosen.loads} <= chosen.held
        assert sum(request.rows for request in chosen.run) <= self.limits.rows
        segments = [(r.tenant if r.adapters else "", r.adapters) for r in chosen.run]
        breaks = sum(a != b for a, b in pairwise(segments))
        assert not segments or breaks == len(set(segments)) - 1, "rows with the same adapter stand apart"

    def _in_use(self) -> int:
        return sum(self._pages(key) for key in (*self.resident, *self.staging))

    def _pages(self, key: AdapterKey) -> int:
        return -(-self.sizes[key] // self.limits.page_bytes) * self.limits.page_bytes
