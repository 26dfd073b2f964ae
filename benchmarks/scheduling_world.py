"""What `benchmarks.scheduling` plays on: traces of requests, and one GPU with its loader, in simulated time.

Figures marked "measured" come from one H200; the others are assumed, and the page says so. Bytes are those of
adapters for all linears of an 8B model in 16 bits.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

from adapterd.gpu_cache import Place
from adapterd.gpu_cache.selector import Selection
from adapterd.gpu_cache.step_budget import AdapterKey, StepLimits
from adapterd.gpu_cache.whereabouts import Whereabouts

GIB = 1 << 30
MIB = 1 << 20
RANKS = (8, 16, 32, 64)
BYTES_PER_RANK = 32 * 81920 * 2  # layers; widths of the seven linears in and out together; bytes a value: 84 MB at 16
BLOCK_TOKENS = 16


@dataclass(frozen=True)
class Costs:
    """Seconds and bytes a second."""

    load_decoding: float = 22e9  # measured: host to VRAM, copies issued between the steps
    load_idle: float = 52e9  # measured: the same with nothing else to do
    verify: float = 84e6 / 0.011  # measured: 10 to 12 ms for 84 MB, chunks hashed by 8 threads
    memory: float = 3.8e12  # measured: what kernels read VRAM with
    step: float = 1.0e-3  # assumed: launch, sampling, the scheduler
    weights: float = 16.1e9  # bytes of the base, read once a step
    row: float = 0.027e-3  # assumed: 16 GFLOP a row at 600 TFLOP/s
    token_bytes: float = 131072  # of KV cache, read for every running request

    def step_seconds(self, rows: int, adapter_bytes: int, tokens: int) -> float:
        """Reading the weights hides behind computing or the other way round; the rest adds up."""
        read = (adapter_bytes + tokens * self.token_bytes) / self.memory
        return self.step + max(self.weights / self.memory, rows * self.row) + read


@dataclass(eq=False, slots=True)
class SimRequest:
    """A request and what became of it. Times in seconds; `rows` is its prompt at first, then 1."""

    id: str
    number: int  # by arrival
    tenant: str
    adapters: tuple[str, ...]
    at: float
    prompt: int
    output: int
    arrived: int = 0
    rows: int = 0
    left: int = 0
    first_token: float | None = None
    passes: int = 0

    @property
    def kv_blocks(self) -> int:
        return -(-(self.prompt + self.output) // BLOCK_TOKENS)


@dataclass(frozen=True)
class Trace:
    """Poisson arrivals; adapters by a Zipf law; lengths from log-normal laws. One tenant adds a burst."""

    exponent: float
    seconds: float
    rate: float = 50.0  # requests a second
    adapters: int = 2000
    tenants: int = 8
    base_share: float = 0.1
    burst: int = 200
    seed: int = 1

    def sizes(self) -> dict[AdapterKey, int]:
        dice = random.Random(f"{self.seed} sizes")
        return {self.key(n): dice.choice(RANKS) * BYTES_PER_RANK for n in range(self.adapters)}

    def key(self, number: int) -> AdapterKey:
        return f"tenant-{number % self.tenants}", f"{number:04}"

    def requests(self) -> list[SimRequest]:
        dice = random.Random(f"{self.seed} requests")
        weights = list(accumulate((n + 1) ** -self.exponent for n in range(self.adapters)))
        made: list[tuple[float, int | None]] = []
        at = dice.expovariate(self.rate)
        while at < self.seconds:
            made.append((at, bisect_left(weights, dice.random() * weights[-1])))
            at += dice.expovariate(self.rate)
        mine = range(0, self.adapters, self.tenants)  # tenant-0's
        made += [(self.seconds / 3 + n * 1e-4, dice.choice(mine)) for n in range(self.burst)]
        return [self._request(n, at, adapter, dice) for n, (at, adapter) in enumerate(sorted(made))]

    def _request(self, number: int, at: float, adapter: int | None, dice: random.Random) -> SimRequest:
        assert adapter is not None
        tenant, digest = self.key(adapter)
        return SimRequest(
            id=f"r{number:06}",
            number=number,
            tenant=tenant,
            adapters=() if dice.random() < self.base_share else (digest,),
            at=at,
            prompt=min(1536, max(16, round(dice.lognormvariate(5.5, 0.8)))),
            output=min(512, max(8, round(dice.lognormvariate(4.6, 0.7)))),
        )


class Policy(Protocol):
    """What `Selector` is, and the two it is compared with."""

    def select(
        self,
        waiting: Sequence[SimRequest],
        running: Sequence[SimRequest],
        residency: dict[AdapterKey, Whereabouts],
        *,
        tick: int,
    ) -> Selection[SimRequest]: ...


@dataclass
class Memory:
    """Arena, host slab and the two stages of a load: verify (cold ones only), then copy. Each takes one at a time."""

    sizes: dict[AdapterKey, int]
    arena: int
    slab: int
    costs: Costs
    resident: OrderedDict[AdapterKey, None] = field(default_factory=OrderedDict)  # least recently used first
    host: OrderedDict[AdapterKey, None] = field(default_factory=OrderedDict)
    cold: deque[list[object]] = field(default_factory=deque)
    copies: deque[list[object]] = field(default_factory=deque)
    loads: int = 0
    cold_loads: int = 0

    def __post_init__(self) -> None:
        self.residency = {key: Whereabouts(Place.ABSENT, size) for key, size in self.sizes.items()}
        self._used = self._host_used = 0

    def load(self, key: AdapterKey, held: frozenset[AdapterKey]) -> None:
        size = self.sizes[key]
        for victim in list(self.resident):
            if self._used + size <= self.arena:
                break
            if victim not in held:
                del self.resident[victim]
                self._used -= self.sizes[victim]
                self._note(victim, Place.HOST if victim in self.host else Place.ABSENT)
        assert self._used + size <= self.arena, "the policy promised room that is not there"
        self._used += size
        self.loads += 1
        self.cold_loads += key not in self.host
        (self.copies if key in self.host else self.cold).append([key, float(size)])
        self._note(key, Place.STAGING)

    def advance(self, seconds: float, idle: bool) -> None:
        for key in self._through(self.cold, self.costs.verify * seconds):
            self._into_host(key)
            self.copies.append([key, float(self.sizes[key])])
        rate = self.costs.load_idle if idle else self.costs.load_decoding
        for key in self._through(self.copies, rate * seconds):
            self.resident[key] = None
            self._note(key, Place.RESIDENT)

    def touch(self, keys: set[AdapterKey]) -> None:
        for key in sorted(keys):  # a set's own order differs from run to run
            self.resident.move_to_end(key)
            if key in self.host:
                self.host.move_to_end(key)

    def _through(self, queue: deque[list[object]], nbytes: float) -> list[AdapterKey]:
        done: list[AdapterKey] = []
        while queue and nbytes > 0:
            key, left = queue[0]
            assert isinstance(left, float) and isinstance(key, tuple)
            queue[0][1] = left - nbytes
            nbytes -= left
            if nbytes >= 0:
                queue.popleft()
                done.append(key)
        return done

    def _into_host(self, key: AdapterKey) -> None:
        while self.host and self._host_used + self.sizes[key] > self.slab:
            gone, _ = self.host.popitem(last=False)
            self._host_used -= self.sizes[gone]
            if self.residency[gone].place is Place.HOST:
                self._note(gone, Place.ABSENT)
        self.host[key] = None
        self._host_used += self.sizes[key]

    def _note(self, key: AdapterKey, place: Place) -> None:
        self.residency[key] = Whereabouts(place, self.sizes[key])


@dataclass
class Played:
    """What came of one trace under one policy. `tokens` were made while requests still came."""

    requests: list[SimRequest]
    memory: Memory
    tokens: int
    steps: int
    segments: float  # a step, on average
    most_waiting: int


def play(trace: Trace, policy: Policy, limits: StepLimits, costs: Costs, slab: int = 64 * GIB) -> Played:
    """Every request of the trace, to its end."""
    requests = trace.requests()
    memory = Memory(trace.sizes(), limits.adapter_bytes, slab, costs)
    coming, waiting, running = deque(requests), list[SimRequest](), list[SimRequest]()
    now, tick, tokens, segments, most = 0.0, 0, 0, 0, 0
    while coming or waiting or running:
        while coming and coming[0].at <= now:
            request = coming.popleft()
            request.arrived, request.rows, request.left = tick, request.prompt, request.output
            waiting.append(request)
        most = max(most, len(waiting))
        chosen = policy.select(waiting, running, memory.residency, tick=tick)
        assert not chosen.refused, chosen.refused
        if chosen.started:
            started = set(chosen.started)
            waiting = [request for request in waiting if request not in started]
            running += chosen.started
            _count_passes(waiting, chosen.started)
        for key in chosen.loads:
            memory.load(key, chosen.held)
        used = {(r.tenant, digest) for r in chosen.run for digest in r.adapters}
        memory.touch(used)
        seconds = _seconds(chosen, used, memory, running, costs)
        memory.advance(seconds, idle=not chosen.run)
        now, tick = now + seconds, tick + 1
        segments += len(used) + any(not r.adapters for r in chosen.run)
        for request in chosen.run:
            request.rows, request.left = 1, request.left - 1
            request.first_token = now if request.first_token is None else request.first_token
        running = [request for request in running if request.left]
        tokens += len(chosen.run) if now <= trace.seconds else 0
    return Played(requests, memory, tokens, tick, segments / max(1, tick), most)


def _seconds(
    chosen: Selection[SimRequest], used: set[AdapterKey], memory: Memory, running: list[SimRequest], costs: Costs
) -> float:
    if not chosen.run:
        return costs.step
    tokens = sum(request.prompt + request.output - request.left for request in running)
    return costs.step_seconds(sum(r.rows for r in chosen.run), sum(memory.sizes[key] for key in used), tokens)


def _count_passes(waiting: list[SimRequest], started: tuple[SimRequest, ...]) -> None:
    """A request is passed over when a later one of its own tenant starts."""
    latest: dict[str, int] = {}
    for request in started:
        latest[request.tenant] = max(request.number, latest.get(request.tenant, -1))
    for request in waiting:
        request.passes += latest.get(request.tenant, -1) > request.number
