"""`adapterctl cache …` against a daemon over a fake cache."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from adapterd.gpu_cache import Place
from adapterd.gpu_cache.daemon import Daemon
from adapterd.gpu_cache.host.interface import Progress, Stage
from adapterd.loader.errors import Code, error
from adapterd.loader.identity import VersionKey
from fakes.commands import INTERRUPTIBLE, Commands
from fakes.served import PAGE, FakeServed, row

HEAVY = ("torch", "numpy", "prometheus_client", "rich.live", "adapterd.gpu_cache")


@pytest.fixture
def cache() -> FakeServed:
    cache = FakeServed()
    cache.rows = (
        row("acme", "finance", leases=2, bytes=2 * PAGE),
        row("acme", "legal", pinned=True),
        row("blue", "new", tier=Place.STAGING, generation=None),
        row("blue", "old", tier=Place.HOST, generation=None),
    )
    return cache


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run/s"


@pytest.fixture
def worker(cache: FakeServed, path: Path, shell: Commands) -> Iterator[Commands]:
    """A shell that knows the socket of a running daemon."""
    with Daemon(cache, path, table_bytes=lambda: 3 * PAGE):
        yield shell.with_variables(ADAPTERD_CACHE_SOCKET=str(path))


def test_the_status_is_a_table_of_bars(worker: Commands) -> None:
    shown = worker.run("cache", "status").stdout
    assert "test/base@" + "a" * 40 in shown
    assert "4.0 MiB of 8.0 MiB (50 %)" in shown
    assert re.search(r"tables +3.0 MiB", shown)
    lines = {line.split()[0]: line for line in shown.splitlines() if line.strip()}
    assert re.search(r"acme +█{8}▓{4}·{20} +2.0 MiB +1.0 MiB +- +- +2.0 MiB +6.0 MiB +-", lines["acme"])
    assert re.search(r"blue +▒{4}·{28} +- +- +1.0 MiB +- +- +8.0 MiB +1.0 MiB", lines["blue"])
    assert "finance" not in shown
    assert "finance" in worker.run("cache", "status", "--adapters").stdout


def test_the_status_as_an_object_and_as_ids(worker: Commands, cache: FakeServed) -> None:
    body = worker.json("cache", "status")
    assert body["schema"] == "adapterctl.cache.status/1"
    assert [use["tenant"] for use in body["tenants"]] == ["acme", "blue"]
    assert body["vram"] == {"total": 8 * PAGE, "free": 4 * PAGE}
    assert body["table_bytes"] == 3 * PAGE
    ids = worker.run("cache", "status", "-q").stdout.splitlines()
    assert ids == [f"{each.tenant}@sha256:{each.digest}" for each in cache.rows]


def test_the_status_says_how_far_loads_are(worker: Commands, cache: FakeServed) -> None:
    keys = [VersionKey("acme", cache.base.pin, digit * 64) for digit in "abc"]
    stages = (Progress(Stage.VERIFY, 0, 0), Progress(Stage.VERIFY, PAGE, 4 * PAGE), Progress(Stage.PACK, 0, 3 * PAGE))
    cache.under_way = dict(zip(keys, stages, strict=True))
    shown = worker.run("cache", "status").stdout
    assert re.search(r"acme +sha256:a{64} +verify +-", shown)
    assert re.search(r"acme +sha256:b{64} +verify +1.0 MiB of 4.0 MiB", shown)
    assert re.search(r"acme +sha256:c{64} +pack +3.0 MiB", shown)
    loading = worker.json("cache", "status")["loading"]
    assert loading[1] == {"tenant": "acme", "digest": "b" * 64, "stage": "verify", "done": PAGE, "total": 4 * PAGE}


def test_each_command_asks_for_what_it_says(worker: Commands, cache: FakeServed) -> None:
    assert worker.json("cache", "prefetch", "acme/known", "acme/known:prod", "--to", "host")["adapters"] == [
        {"ref": "acme/known", "ready": True}, {"ref": "acme/known:prod", "ready": True}
    ]  # fmt: skip
    assert worker.run("cache", "pin", "acme/known", "-q").stdout == "acme/known\n"
    assert worker.json("cache", "unpin", "acme/known")["adapters"] == [{"ref": "acme/known", "was_pinned": True}]
    assert "1.0 MiB" in worker.run("cache", "evict", "acme/known").stdout
    assert worker.run("cache", "drain").stdout == "draining\n"
    assert worker.json("cache", "status")["draining"] is True
    assert worker.run("cache", "drain", "--off").stdout == "serving\n"
    assert "adapterd_cache_hits_total 7.0\n" in worker.run("cache", "metrics").stdout
    assert "adapterd_cache_hits_total 7.0\n" in worker.json("cache", "metrics")["text"]
    did = [call for call in cache.calls if call not in {"pump", "statistics", "residency"}]
    assert did == [
        "prefetch acme/known host", "prefetch acme/known:prod host", "pin acme/known", "unpin acme/known",
        "evict acme/known", "drain True", "drain False",
    ]  # fmt: skip


def test_one_that_is_refused_stops_no_other_and_decides_the_status(worker: Commands) -> None:
    body = worker.json("cache", "pin", "acme/nothing", "acme/known", status=5)
    assert [each["ref"] for each in body["adapters"]] == ["acme/known"]
    assert [problem["code"] for problem in body["problems"]] == [Code.NOT_FOUND]


def test_one_that_does_not_come_in_time_is_said_and_one_that_need_not_is_fine(worker: Commands) -> None:
    assert worker.codes("cache", "pin", "acme/slow", "--wait", "0.001", status=8) == [Code.LEASE_TIMEOUT]
    assert worker.json("cache", "pin", "acme/slow", "--wait", 0)["adapters"] == [{"ref": "acme/slow", "ready": False}]


def test_a_word_that_is_no_reference_is_refused_before_anything_is_done(worker: Commands, cache: FakeServed) -> None:
    assert worker.codes("cache", "evict", "acme/known", "Acme", status=1) == [Code.REF_INVALID]
    assert not any(call.startswith("evict") for call in cache.calls)


def test_a_watch_prints_what_is_there_and_then_changes(worker: Commands, cache: FakeServed) -> None:
    lines = worker.run("cache", "watch", "--count", 3).stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [["resident", "acme"], ["resident", "acme"], ["staging", "blue"]]
    assert "finance  2.0 MiB  rank 8" in lines[0]
    ids = worker.run("cache", "watch", "--count", 1, "-q").stdout
    assert ids == f"acme@sha256:{cache.rows[0].digest}\n"
    (change,) = worker.json("cache", "watch", "--count", 1)["changes"]
    assert (change["tier"], change["rank"], change["generation"]) == ("resident", 8, 1)


def test_following_the_status_without_a_terminal_is_a_watch(worker: Commands, path: Path) -> None:
    following = subprocess.Popen(
        [*INTERRUPTIBLE, sys.executable, "-m", "adapterd.cli", "cache", "status", "--watch", "--socket", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert following.stdout is not None
    assert [following.stdout.readline().split()[0] for _ in range(4)] == ["resident", "resident", "staging", "host"]
    following.send_signal(signal.SIGINT)
    _, said = following.communicate(timeout=60)
    assert (following.returncode, said) == (130, "interrupted\n")


def test_on_a_terminal_it_is_a_live_view(worker: Commands, path: Path) -> None:
    ours, its = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "160", "LINES": "40", "PYTHONIOENCODING": "utf-8"}
    following = subprocess.Popen(
        [*INTERRUPTIBLE, sys.executable, "-m", "adapterd.cli", "cache", "status", "--watch", "--socket", str(path)],
        stdin=its, stdout=its, stderr=subprocess.PIPE, env=environment,
    )  # fmt: skip
    os.close(its)
    seen = b""
    while "█".encode() not in seen or b"serving" not in seen or b"in use" not in seen:
        seen += os.read(ours, 4096)
    following.send_signal(signal.SIGINT)
    _drain_terminal(ours)
    assert following.stderr is not None
    assert following.stderr.read() == b"interrupted\n"
    following.stderr.close()
    assert following.wait(60) == 130


def _drain_terminal(descriptor: int) -> None:
    try:
        while os.read(descriptor, 4096):
            pass
    except OSError:  # its other end is closed
        pass
    os.close(descriptor)


@pytest.mark.parametrize("words", [["status"], ["pin", "acme/known"], ["drain"], ["metrics"], ["watch"]])
def test_where_nothing_listens_it_says_what_to_do(shell: Commands, path: Path, words: list[str]) -> None:
    assert shell.codes("cache", *words, "--socket", path, status=8) == [Code.SERVER_UNREACHABLE]
    said = shell.run("cache", *words, "--socket", path).stderr
    assert "nothing listens there" in said
    assert "ADAPTERD_CACHE_SOCKET" in said


def test_without_a_socket_it_says_how_to_name_one(shell: Commands) -> None:
    assert shell.codes("cache", "status", status=1) == [Code.SETTINGS_INVALID]
    assert "ADAPTERD_CACHE_SOCKET" in shell.run("cache", "status").stderr


def test_what_the_cache_refuses_is_said_as_everywhere(worker: Commands, cache: FakeServed) -> None:
    cache.broken = error(Code.CACHE_CLOSED, "cache", "the cache is not open")
    assert worker.codes("cache", "status", status=1) == [Code.CACHE_CLOSED]


def test_no_name_paints_on_the_terminal(worker: Commands, cache: FakeServed) -> None:
    cache.rows = (row("acme\x1b[2J", "evil\x1b[31m"),)
    for words in (["status", "--adapters"], ["status", "-q"], ["watch", "--count", "1"], ["watch", "--count=1", "-q"]):
        assert "\x1b" not in worker.run("cache", *words).stdout


@pytest.mark.parametrize("words", [["cache", "--help"], ["cache", "status", "--help"], ["cache", "watch", "--help"]])
def test_help_loads_nothing_heavy(words: list[str]) -> None:
    code = (
        "import sys\n"
        "from adapterd.cli.main import app\n"
        f"status = app({words!r}, standalone_mode=False)\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules], status, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr.strip() == "[] 0"


def test_the_commands_need_no_torch(worker: Commands, path: Path) -> None:
    code = (
        "import sys\n"
        "from adapterd.cli.main import app\n"
        f"app(['cache', 'status', '--socket', {str(path)!r}], standalone_mode=False)\n"
        "print('torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr.strip() == "False"
