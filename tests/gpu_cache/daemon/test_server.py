"""What clients may do to a daemon: nothing that another client, or the worker, would notice."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from adapterd.gpu_cache import Place
from adapterd.gpu_cache.daemon import connection, desk, pace, server
from adapterd.gpu_cache.daemon.messages import MAX_LINE_BYTES
from adapterd.loader.errors import Code, error, reject
from fakes.daemon_world import FEED, DaemonWorld
from fakes.served import PAGE, row


def test_each_request_reaches_the_cache(world: DaemonWorld) -> None:
    caller = world.caller()
    assert caller.ask("prefetch", ref="acme/known", to="host")["ok"]
    assert caller.ask("pin", ref="acme/known:prod")["ref"] == "acme/known:prod"
    assert caller.ask("unpin", ref="acme/known")["was_pinned"] is True
    assert caller.ask("evict", ref="acme/known")["freed_bytes"] == PAGE
    assert caller.ask("drain", on=True)["draining"] is True
    assert caller.ask("status")["draining"] is True
    assert "adapterd_cache_hits_total 7.0" in caller.ask("metrics")["text"]
    assert caller.ask("residency")["complete"] is True
    did = [call for call in world.cache.calls if call not in {"pump", "statistics", "residency"}]
    assert did == [
        "prefetch acme/known host", "pin acme/known:prod", "unpin acme/known", "evict acme/known", "drain True"
    ]  # fmt: skip


def test_the_status_says_who_has_what_in_which_state(world: DaemonWorld) -> None:
    world.cache.rows = (
        row("acme", "used", leases=2, pinned=True),
        row("acme", "pinned", pinned=True),
        row("acme", "idle", bytes=2 * PAGE),
        row("blue", "coming", tier=Place.STAGING, generation=None, priority=5),
        row("blue", "host", tier=Place.HOST, generation=None),
        row("blue", "known of", tier=Place.ABSENT, generation=None, bytes=0),
    )
    status = world.caller().ask("status")
    assert [tuple(use.values()) for use in status["tenants"]] == [
        ("acme", PAGE, PAGE, 2 * PAGE, 0, 2 * PAGE, 6 * PAGE, 0),
        ("blue", 0, 0, 0, PAGE, 0, 8 * PAGE, PAGE),
    ]
    assert status["vram"] == {"total": 8 * PAGE, "free": 3 * PAGE}
    assert [held["tier"] for held in status["adapters"]] == ["resident"] * 3 + ["staging", "host"]
    assert (status["adapters"][0]["leases"], status["adapters"][3]["priority"]) == (2, 5)
    assert status["leases"]["waiting"] == 3


def test_a_refusal_of_the_cache_is_the_answer_and_the_client_goes_on(world: DaemonWorld) -> None:
    caller = world.caller()
    refused = caller.ask("pin", ref="acme/nothing")
    assert (refused["ok"], refused["problems"][0]["code"]) == (False, Code.NOT_FOUND)
    assert caller.ask("pin", ref="acme/known")["ok"]


@pytest.mark.parametrize("failure", [RuntimeError("a bug"), error(Code.CACHE_CLOSED, "cache", "closed")])
def test_a_cache_that_fails_breaks_no_connection(world: DaemonWorld, failure: Exception) -> None:
    caller, watching = world.caller(), world.caller()
    start = watching.ask("residency")["sequence"]
    watching.say({"request": "watch", "feed": FEED, "since": start, "wait_seconds": 5.0})
    world.cache.broken = failure
    code = getattr(failure, "code", Code.INTERNAL)
    for request in ("status", "residency", "metrics"):
        assert caller.ask(request)["problems"][0]["code"] == code
    world.now += 1
    assert watching.hear() == []
    world.cache.broken = None
    assert caller.ask("status")["ok"]
    world.now += 5
    assert [answer["ok"] for answer in watching.hear()] == [True]


# --- Waiting


def test_who_waits_for_an_adapter_hears_when_it_is_there(world: DaemonWorld) -> None:
    caller = world.caller()
    assert caller.ask("prefetch", ref="acme/slow")["ready"] is False  # not asked to wait
    caller.say({"request": "pin", "ref": "acme/slow", "wait_seconds": 5.0})
    assert caller.hear() == []
    world.cache.kept.ready = True
    world.now += server.LOOK_SECONDS
    assert [answer["ready"] for answer in caller.hear()] == [True]


def test_who_waits_for_an_adapter_hears_why_it_will_not_come(world: DaemonWorld) -> None:
    caller = world.caller()
    caller.say({"request": "prefetch", "ref": "acme/slow", "wait_seconds": 5.0})
    assert caller.hear() == []
    world.cache.kept.problems = (reject(Code.SIGNATURE_INVALID, "acme/slow", "no"),)
    assert caller.codes() == [Code.SIGNATURE_INVALID]
    assert caller.ask("status")["ok"]


def test_a_wait_that_is_over_is_no_failure(world: DaemonWorld) -> None:
    caller = world.caller()
    caller.say({"request": "prefetch", "ref": "acme/slow", "wait_seconds": 5.0})
    world.now += 5
    assert [(answer["ok"], answer["ready"]) for answer in caller.hear()] == [(True, False)]


def test_a_watch_is_answered_when_something_changes(world: DaemonWorld) -> None:
    watching, other = world.caller(), world.caller()
    first = watching.ask("residency")
    cursor = {"feed": first["feed"], "since": first["sequence"]}
    watching.say({"request": "watch", **cursor})
    assert watching.hear() == []
    world.cache.rows = (row("acme", "a"),)
    assert watching.hear() == []  # not looked again yet
    assert other.ask("status")["ok"]
    world.now += server.LOOK_SECONDS
    (told,) = watching.hear()
    assert [each["adapters"] for each in told["adapters"]] == [["a"]]
    assert (told["complete"], told["gone"]) == (False, [])


def test_a_watch_ends_with_nothing_to_tell_when_its_time_is_up(world: DaemonWorld) -> None:
    watching = world.caller()
    first = watching.ask("residency")
    watching.say({"request": "watch", "feed": first["feed"], "since": first["sequence"], "wait_seconds": 2.0})
    world.now += 1.9
    assert watching.hear() == []
    world.now += 0.2
    (told,) = watching.hear()
    assert (told["adapters"], told["sequence"]) == ([], first["sequence"])


def test_who_watches_costs_a_look_a_quarter_second_and_no_more(world: DaemonWorld) -> None:
    callers = [world.caller() for _ in range(10)]
    start = callers[0].ask("residency")
    for each in callers:
        each.say({"request": "watch", "feed": start["feed"], "since": start["sequence"]})
    before = world.cache.calls.count("pump"), world.cache.calls.count("residency")
    for _ in range(40):
        world.now += server.LOOK_SECONDS / 10
        world.turn(5)
    assert world.cache.calls.count("pump") - before[0] <= 4
    assert world.cache.calls.count("residency") == before[1]  # no tier has changed


def test_a_change_that_is_none_of_tier_is_noticed_a_little_later(world: DaemonWorld) -> None:
    watching = world.caller()
    world.cache.rows = (row("acme", "a"),)
    start = watching.ask("residency")
    watching.say({"request": "watch", "feed": start["feed"], "since": start["sequence"]})
    world.cache.rows = (row("acme", "a", pinned=True),)
    world.now += server.LOOK_SECONDS
    assert watching.hear() == []
    world.now += desk.WHOLE_LOOK_SECONDS
    (told,) = watching.hear()
    assert [each["pinned"] for each in told["adapters"]] == [True]


def test_what_was_done_here_is_noticed_at_once(world: DaemonWorld) -> None:
    caller = world.caller()
    world.cache.rows = (row("acme", "known"),)
    caller.ask("residency")
    world.cache.rows = (row("acme", "known", pinned=True),)
    assert caller.ask("residency")["adapters"][0]["pinned"] is False
    caller.ask("pin", ref="acme/known")
    assert caller.ask("residency")["adapters"][0]["pinned"] is True


def test_a_watcher_that_leaves_is_forgotten(world: DaemonWorld) -> None:
    watching = world.caller()
    first = watching.ask("residency")
    watching.say({"request": "watch", "feed": first["feed"], "since": first["sequence"]})
    watching.socket.close()
    world.turn()
    assert world.server.clients == 0


# --- Bad input


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"GET / HTTP/1.1\r",
        b"\xff" * 64,
        b"\0",
        b"[" * 5000,
        b"null",
        b"{}",
        b'{"protocol": 2, "request": "status"}',
        b'{"protocol": 1, "request": "shutdown"}',
        b'{"protocol": 1, "request": "status", "more": 1}',
        b'{"protocol": 1, "request": "drain", "on": "yes"}',
        b'{"protocol": 1, "request": "drain"}',
        b'{"protocol": 1, "request": "pin", "ref": 7}',
        b'{"protocol": 1, "request": "pin", "ref": "../etc"}',
        b'{"protocol": 1, "request": "prefetch", "ref": "acme/known", "to": "disk"}',
        b'{"protocol": 1, "request": "watch", "wait_seconds": 1e9}',
        b'{"protocol": 1, "request": "watch", "wait_seconds": NaN}',
        b'{"protocol": 1, "request": "residency", "since": -1}',
        b'{"protocol": 1, "request": "residency", "since": ' + b"9" * 4000 + b"}",
    ],
)
def test_what_is_not_understood_gets_a_problem_and_the_client_goes_on(world: DaemonWorld, line: bytes) -> None:
    caller = world.caller()
    caller.say(line + b"\n")
    (answer,) = caller.hear()
    assert answer["ok"] is False
    assert {p["code"] for p in answer["problems"]} <= {Code.REQUEST_INVALID, Code.REF_INVALID}
    assert caller.ask("status")["ok"]
    assert not any(call.startswith(("pin", "prefetch", "drain")) for call in world.cache.calls)


def test_one_that_only_talks_nonsense_is_hung_up_on(world: DaemonWorld) -> None:
    caller, other = world.caller(), world.caller()
    caller.say(b"nonsense\n" * 500)
    world.turn(500)
    assert len(caller.codes()) == connection.MAX_MISTAKES
    assert caller.hung_up
    assert other.ask("status")["ok"]


def test_a_line_without_an_end_is_refused_before_it_is_held(world: DaemonWorld) -> None:
    caller, other = world.caller(), world.caller()
    caller.say(b"x" * (MAX_LINE_BYTES * 100))
    assert caller.codes() == [Code.REQUEST_INVALID]
    assert caller.hung_up
    assert other.ask("status")["ok"]


def test_a_line_that_is_too_long_is_refused_with_its_end_too(world: DaemonWorld) -> None:
    caller = world.caller()
    caller.say(b" " * (MAX_LINE_BYTES + 1) + b"\n")
    assert caller.codes() == [Code.REQUEST_INVALID]
    assert caller.hung_up


def test_half_a_line_holds_up_nobody_and_not_for_ever(world: DaemonWorld) -> None:
    half, other = world.caller(), world.caller()
    half.say(b'{"protocol": 1, "requ')
    assert other.ask("status")["ok"]
    world.now += connection.LINE_SECONDS - 1
    half.say(b"est")  # a drip does not help
    assert not half.hung_up
    world.now += 2
    assert half.hung_up
    assert other.ask("status")["ok"]


def test_half_a_line_and_then_its_end(world: DaemonWorld) -> None:
    caller = world.caller()
    line = json.dumps({"protocol": 1, "request": "status"}).encode() + b"\n"
    for byte in line:
        caller.say(bytes([byte]))
    assert [answer["ok"] for answer in caller.hear()] == [True]


def test_one_who_asks_nothing_makes_room(world: DaemonWorld) -> None:
    idle = world.caller()
    world.now += connection.IDLE_SECONDS + 1
    assert idle.hung_up


def test_one_who_does_not_read_is_dropped_and_others_are_served(world: DaemonWorld) -> None:
    world.cache.rows = tuple(row("acme", str(n)) for n in range(3000))
    deaf, other = world.caller(), world.caller()
    deaf.say(b'{"protocol": 1, "request": "residency"}\n' * 200)
    world.turn(20)
    asked = world.cache.calls.count("residency")
    assert asked <= 2  # nothing more is begun while an answer is not taken
    assert other.ask("metrics")["ok"]
    world.now += connection.SEND_SECONDS + 1
    world.turn()
    assert world.server.clients == 1
    assert other.ask("metrics")["ok"]


def test_a_thousand_connections_are_turned_away_or_served(world: DaemonWorld) -> None:
    first = world.caller()
    turned_away = 0
    for _ in range(1000):
        late = world.caller()
        if world.server.clients == server.MAX_CLIENTS and late.codes() == [Code.QUEUE_FULL]:
            turned_away += 1
            late.socket.close()
    assert turned_away == 1001 - server.MAX_CLIENTS
    assert first.ask("status")["ok"]


def test_one_who_floods_is_answered_at_the_pace_and_in_turn(world: DaemonWorld) -> None:
    flooding, other = world.caller(), world.caller()
    flooding.say(b'{"protocol": 1, "request": "status"}\n' * 400)
    world.turn(400)
    answered = len(flooding.hear())
    assert answered <= pace.BURST
    other.say({"request": "status"})
    assert other.hear() == []
    world.now += 3 / pace.REQUESTS_PER_SECOND
    assert len(other.hear()) == 1
    world.now += 10
    flooding.hear()
    assert other.ask("status")["ok"]


def test_another_users_process_is_hung_up_on(folder: Path) -> None:
    asked: list[socket.socket] = []

    def allowed(peer: socket.socket) -> bool:
        asked.append(peer)
        return len(asked) > 1

    with DaemonWorld(folder, allowed=allowed) as world:
        stranger, friend = world.caller(), world.caller()
        stranger.say({"request": "drain", "on": True})
        assert stranger.hung_up
        assert friend.ask("status")["draining"] is False


class Exhausted:
    """A listening socket of a process without descriptors."""

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self.tries, self.left = 0, 1

    def fileno(self) -> int:
        return self._listening.fileno()

    def accept(self) -> tuple[socket.socket, Any]:
        self.tries += 1
        if self.left == 0:
            raise OSError(24, "Too many open files")
        self.left -= 1
        return self._listening.accept()


def test_descriptors_that_run_out_do_not_make_it_spin(folder: Path) -> None:
    """The listener is left alone for a while, and the others are served."""
    made: list[Exhausted] = []

    def listening(real: socket.socket) -> Exhausted:
        made.append(Exhausted(real))
        return made[0]

    with DaemonWorld(folder, listening=listening) as world:
        caller = world.caller()
        world.now += server.TICK_SECONDS
        late = world.caller()
        tries = made[0].tries
        world.turn(50)
        assert made[0].tries == tries
        assert caller.ask("status")["ok"]
        made[0].left = 1
        world.now += server.TICK_SECONDS
        assert late.ask("status")["ok"]
