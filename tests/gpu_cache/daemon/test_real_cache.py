"""The daemon over a real cache, on a simulated device: what it says is what is so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from adapterd.gpu_cache.daemon import server
from adapterd.loader.errors import Code
from fakes.adapters import make_base
from fakes.cache_world import World, pages, shares
from fakes.daemon_world import Caller, DaemonWorld


class Served:
    """A cache, its daemon, and a client."""

    def __init__(self, cache: World, daemon: DaemonWorld) -> None:
        self.cache, self.daemon = cache, daemon
        self.caller: Caller = daemon.caller()

    def rows(self) -> dict[str, dict[str, object]]:
        """The residency by the first name of each version."""
        return {each["adapters"][0]: each for each in self.caller.ask("residency")["adapters"]}

    def waited(self) -> dict[str, object]:
        """The answer to what was asked, after everything has come to rest."""
        self.cache.settle()
        self.daemon.now += server.LOOK_SECONDS
        (answer,) = self.caller.hear()
        return answer

    def code(self, request: str, **fields: object) -> str:
        answer = self.caller.ask(request, **fields)
        assert not answer["ok"]
        return str(answer["problems"][0]["code"])


@pytest.fixture
def served(folder: Path) -> Iterator[Served]:
    with World(tenants=shares(acme=4)) as cache, DaemonWorld(folder, serving=cache.cache) as daemon:
        cache.loader.publish("acme/a", 2)
        yield Served(cache, daemon)


def test_a_prefetch_is_answered_when_the_bytes_are_in_vram(served: Served) -> None:
    served.caller.say({"request": "prefetch", "ref": "acme/a", "wait_seconds": 5.0})
    assert served.caller.hear() == []
    assert served.waited()["ready"] is True
    row = served.rows()["a"]
    assert (row["tier"], row["bytes"], row["pinned"]) == ("resident", pages(2), False)
    assert isinstance(row["generation"], int)
    assert served.caller.ask("status")["misses"] == 1


def test_a_prefetch_to_host_memory_stops_there(served: Served) -> None:
    served.caller.say({"request": "prefetch", "ref": "acme/a", "to": "host", "wait_seconds": 5.0})
    assert served.waited()["ready"] is True
    assert (served.rows()["a"]["tier"], served.rows()["a"]["generation"]) == ("host", None)


def test_a_prefetch_of_what_is_not_there_says_so(served: Served) -> None:
    served.caller.say({"request": "prefetch", "ref": "acme/nothing", "wait_seconds": 5.0})
    assert served.waited()["problems"][0]["code"] == Code.NOT_FOUND  # type: ignore[index]


def test_a_pin_keeps_and_an_eviction_frees(served: Served) -> None:
    served.caller.say({"request": "pin", "ref": "acme/a", "wait_seconds": 5.0})
    assert served.waited()["ready"] is True
    assert served.rows()["a"]["pinned"] is True
    assert served.code("evict", ref="acme/a") == Code.ADAPTER_IN_USE
    status = served.caller.ask("status")
    assert [(use["tenant"], use["pinned"], use["guaranteed"]) for use in status["tenants"]] == [
        ("acme", pages(2), pages(4))
    ]
    assert served.caller.ask("unpin", ref="acme/a")["was_pinned"] is True
    assert served.caller.ask("unpin", ref="acme/a")["was_pinned"] is False
    assert served.caller.ask("evict", ref="acme/a")["freed_bytes"] == pages(4)  # host memory, too
    assert served.rows() == {}
    assert 'adapterd_cache_evictions_total{cause="asked"} 1.0' in served.caller.ask("metrics")["text"]


def test_what_a_lease_holds_is_in_use(served: Served) -> None:
    lease = served.cache.ready("acme/a")
    assert served.code("evict", ref="acme/a") == Code.ADAPTER_IN_USE
    assert served.caller.ask("status")["tenants"][0]["in_use"] == pages(2)
    lease.release()
    assert served.caller.ask("status")["tenants"][0]["idle"] == pages(2)
    text = served.caller.ask("metrics")["text"]
    assert f"adapterd_cache_copied_bytes_total {float(pages(2))}" in text
    assert 'adapterd_cache_load_seconds_count{stage="copy",temperature="cold"} 1.0' in text


def test_draining_refuses_new_leases_and_ends_again(served: Served) -> None:
    lease = served.cache.ready("acme/a")
    assert served.caller.ask("drain", on=True)["draining"] is True
    late = served.cache.acquire("acme/a")
    served.cache.settle()
    assert late.failed
    assert lease.ready
    assert served.caller.ask("status")["drained"] is False
    lease.release()
    assert served.caller.ask("status")["drained"] is True
    assert served.caller.ask("drain", on=False)["draining"] is False
    assert served.cache.ready("acme/a").ready


def test_a_router_that_follows_the_feed_knows_of_a_base_reload(served: Served) -> None:
    served.cache.ready("acme/a").release()
    first = served.caller.ask("residency")
    served.cache.cache.rebind(make_base("b" * 40))
    served.cache.settle()
    after = served.caller.ask("residency", feed=first["feed"], since=first["sequence"])
    assert [gone["digest"] for gone in after["gone"]] == [first["adapters"][0]["digest"]]
    assert served.caller.ask("status")["base_revision"] == "b" * 40


def test_a_closed_cache_is_said_and_breaks_nothing(served: Served) -> None:
    served.cache.cache.__exit__(None, None, None)
    assert served.code("pin", ref="acme/a") == Code.CACHE_CLOSED
    assert served.caller.ask("status")["ok"]
