from __future__ import annotations

import re

from prometheus_client.parser import text_string_to_metric_families

from adapterd.gpu_cache import Place
from adapterd.gpu_cache.daemon.metrics import PREFIX, registry_of, text_of
from fakes.served import PAGE, FakeServed, row


def samples(cache: FakeServed) -> dict[tuple[str, ...], float]:
    """By name and label values, without the prefix."""
    found = {}
    for family in text_string_to_metric_families(text_of(registry_of(cache))):
        assert family.name.startswith(PREFIX)
        assert family.documentation
        for sample in family.samples:
            key = (sample.name.removeprefix(PREFIX), *sample.labels.values())
            assert key not in found
            found[key] = sample.value
    return found


def test_the_numbers_are_those_of_the_statistics() -> None:
    found = samples(FakeServed())
    assert found["hits_total",] == 7
    assert (found["misses_total", "host"], found["misses_total", "source"]) == (2, 1)
    assert found["loads_total", "packed"] == 0
    assert found["load_seconds_sum", "verify", "cold"] == 0.5
    assert (found["load_seconds_count", "copy", "cold"], found["load_seconds_sum", "copy", "cold"]) == (1, 0.25)
    assert (found["load_seconds_count", "copy", "steady"], found["load_seconds_sum", "copy", "steady"]) == (2, 0.125)
    assert (found["evictions_total", "room"], found["policy_faults_total",]) == (4, 5)
    assert (found["leases", "waiting"], found["released_leases_total",]) == (3, 9)
    assert (found["leaked_leases_total",], found["steps_in_flight",], found["draining",]) == (1, 1, 0)
    assert found["free_bytes", "vram"] == 8 * PAGE


def test_tenants_that_nobody_configured_are_one_label() -> None:
    cache = FakeServed()
    names = [f"stranger-{n}" for n in range(100)]
    cache.rows = (row("acme", "a"), *(row(name, "a", tier=Place.HOST) for name in names), row("other", "x"))
    found = samples(cache)
    tenants = {key[2]: value for key, value in found.items() if key[:2] == ("used_bytes", "host")}
    assert tenants == {"acme": 0, "other": 100 * PAGE}
    assert (found["used_bytes", "vram", "acme"], found["used_bytes", "vram", "other"]) == (PAGE, PAGE)
    assert not any("stranger" in label for key in found for label in key)


def test_names_follow_the_habits_of_prometheus() -> None:
    text = text_of(registry_of(FakeServed()))
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M):
        assert name.endswith("_total") == (kind == "counter"), name
        assert re.fullmatch(r"adapterd_cache_[a-z_]+", name)
