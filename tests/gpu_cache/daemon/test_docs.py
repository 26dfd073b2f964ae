"""docs/cache.md says what the daemon does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest

from adapterd.gpu_cache import Place
from adapterd.gpu_cache.daemon import connection, desk, feed, messages, pace, server
from adapterd.gpu_cache.daemon.metrics import registry_of, text_of
from fakes.daemon_world import FEED, DaemonWorld
from fakes.served import FakeServed, row

PAGE = (Path(__file__).resolve().parents[3] / "docs/cache.md").read_text()


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def _example() -> list[dict[str, Any]]:
    (block,) = re.findall(r"```json\n(.*?)```", section("Residency feed"), re.S)
    return [json.loads(line) for line in block.splitlines()]


def _shortened(answer: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """An answer with the example's digests and feed."""
    text = json.dumps(answer)
    for ours, its in names.items():
        text = text.replace(ours, its)
    found = json.loads(text)
    assert isinstance(found, dict)
    return found


def test_the_example_of_the_feed_is_what_happens(world: DaemonWorld) -> None:
    ask_all, all_, ask_changes, changes = _example()
    finance, new = row("acme", "finance"), row("blue", "new", tier=Place.HOST, generation=None)
    shown = [each["digest"] for each in all_["adapters"]]
    names = {finance.digest: shown[0], new.digest: shown[1], FEED: all_["feed"]}
    caller = world.caller()
    world.cache.rows = (finance, new)
    caller.say(ask_all)
    assert [_shortened(answer, names) for answer in caller.hear()] == [all_]
    world.cache.rows = (row("blue", "new", generation=3),)
    caller.say({**ask_changes, "feed": FEED})
    assert [_shortened(answer, names) for answer in caller.hear()] == [changes]


def test_every_request_and_its_fields_are_listed() -> None:
    listed = {line.split("|")[1].strip(" `"): line for line in section("Protocol").splitlines() if line[:3] == "| `"}
    requests = {each.model_fields["request"].default: each for each in get_args(messages.Request)}
    assert listed.keys() == requests.keys()
    for name, line in listed.items():
        fields = requests[name].model_fields.keys() - {"protocol", "request"}
        assert fields <= set(re.findall(r"`(\w+)`", line)), name


def test_every_metric_is_listed() -> None:
    listed = set(re.findall(r"`(adapterd_cache_\w+)`", section("Metrics")))
    served = set(re.findall(r"^# TYPE (\S+) ", text_of(registry_of(FakeServed())), re.M))
    assert listed == served


@pytest.mark.parametrize(
    ("words", "number"),
    [
        (r"(\d+) clients are served", server.MAX_CLIENTS),
        (r"(\d+) requests a\s+second", pace.REQUESTS_PER_SECOND),
        (r"after (\d+) such requests", connection.MAX_MISTAKES),
        (r"unfinished for (\d+) seconds", connection.LINE_SECONDS),
        (r"taken within\s+(\d+) seconds", connection.SEND_SECONDS),
        (r"after (\d+) minutes without", connection.IDLE_SECONDS / 60),
        (r"told within (\d+) seconds", desk.WHOLE_LOOK_SECONDS),
        (r"the last (\d+) versions that left", feed.KEPT_GONE),
        (r"at most (\d+) KiB a request", messages.MAX_LINE_BYTES / 1024),
    ],
)
def test_every_bound_is_the_codes_own(words: str, number: float) -> None:
    found = re.search(words, PAGE)
    assert found is not None
    assert float(found[1]) == number
