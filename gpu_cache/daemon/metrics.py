"""Metrics, from the cache's own statistics at the moment somebody asks: there are no second books."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from adapterd.gpu_cache.daemon.served import Served
from adapterd.gpu_cache.host.interface import Origin
from adapterd.gpu_cache.records import LeaseState
from adapterd.gpu_cache.statistics import CacheStatistics

PREFIX = "adapterd_cache_"
OTHER = "other"
"""Stands for all tenants that the configuration does not name: labels must stay few. Not a tenant's label alone:
one that is called so is counted with them."""
LIVE = tuple(state for state in LeaseState if state is not LeaseState.RELEASED)


class CacheCollector(Collector):
    """What `CacheStatistics` says, in the words of Prometheus. Any thread."""

    def __init__(self, cache: Served) -> None:
        self._cache = cache

    def collect(self) -> Iterator[Metric]:
        self._cache.pump()
        now = self._cache.statistics()
        yield from _finding(now)
        yield from _loading(now)
        yield from _holding(now, frozenset(self._cache.config.tenants))
        yield from _working(now, draining=self._cache.draining)


def registry_of(cache: Served) -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(CacheCollector(cache))
    return registry


def text_of(registry: CollectorRegistry) -> str:
    return generate_latest(registry).decode()


def _finding(now: CacheStatistics) -> Iterator[Metric]:
    yield CounterMetricFamily(PREFIX + "hits", "Adapters that were in VRAM, or on the way there.", now.hits)
    yield _counters("misses", "Adapters that were not, by where they were found.", "found_in", now.origins.items())


def _loading(now: CacheStatistics) -> Iterator[Metric]:
    yield _counters("loads", "Loads into VRAM, by where the bytes were.", "found_in", now.loads.items())
    seconds = SummaryMetricFamily(
        PREFIX + "load_seconds",
        "Time of loads by stage; steady: the packed bytes were in host memory, cold: they were not.",
        labels=("temperature", "stage"),
    )
    steady = now.loads[Origin.HOST]
    counts = {"steady": steady, "cold": sum(now.loads.values()) - steady}
    for temperature, stages in now.load_seconds.items():
        for stage, total in sorted(stages.items()):
            seconds.add_metric((temperature, stage), counts[temperature], total)
    yield seconds
    yield CounterMetricFamily(PREFIX + "copied_bytes", "Bytes that loads have copied into VRAM.", now.copied_bytes)
    yield _counters("evictions", "Adapters that left VRAM.", "cause", now.evictions.items())
    faults = "Times that the eviction policy failed and the least recently used went instead."
    yield CounterMetricFamily(PREFIX + "policy_faults", faults, now.policy_faults)


def _holding(now: CacheStatistics, named: frozenset[str]) -> Iterator[Metric]:
    used = GaugeMetricFamily(PREFIX + "used_bytes", "Bytes in use; whole pages.", labels=("memory", "tenant"))
    free = GaugeMetricFamily(PREFIX + "free_bytes", "Bytes that nobody uses.", labels=("memory",))
    memories = (("vram", now.vram_bytes, now.vram_free_bytes), ("host", now.host_bytes, now.host_free_bytes))
    for memory, tenants, rest in memories:
        for tenant, nbytes in sorted(_few(tenants, named).items()):
            used.add_metric((memory, tenant), nbytes)
        free.add_metric((memory,), rest)
    yield used
    yield free
    adapters = GaugeMetricFamily(PREFIX + "adapters", "Versions by place.", labels=("place",))
    for place, number in now.adapters.items():
        adapters.add_metric((place,), number)
    yield adapters


def _few(tenants: Mapping[str, int], named: frozenset[str]) -> Counter[str]:
    few = Counter(dict.fromkeys((*named, OTHER), 0))
    for tenant, nbytes in tenants.items():
        few[tenant if tenant in named else OTHER] += nbytes
    return few


def _working(now: CacheStatistics, *, draining: bool) -> Iterator[Metric]:
    leases = GaugeMetricFamily(
        PREFIX + "leases", "Leases that are not released; resolving, waiting and copying ones queue.", labels=("state",)
    )
    for state in LIVE:
        leases.add_metric((state,), now.leases.get(state, 0))
    yield leases
    released = now.leases.get(LeaseState.RELEASED, 0)
    yield CounterMetricFamily(PREFIX + "released_leases", "Leases that were released.", released)
    leaked = "Leases that were dropped without a release, and found."
    yield CounterMetricFamily(PREFIX + "leaked_leases", leaked, now.leaked_leases)
    yield GaugeMetricFamily(PREFIX + "steps_in_flight", "Steps that have not ended.", now.steps_in_flight)
    pinned = "Versions that a pin or a route is on."
    yield GaugeMetricFamily(PREFIX + "pinned_adapters", pinned, now.pinned_adapters)
    yield GaugeMetricFamily(PREFIX + "draining", "1 while new leases are refused.", int(draining))


def _counters(name: str, help_: str, label: str, values: Iterable[tuple[str, int]]) -> Metric:
    family = CounterMetricFamily(PREFIX + name, help_, labels=(label,))
    for key, value in values:
        family.add_metric((str(key),), value)
    return family
