"""The daemon with its own thread and socket, and the client at the other end."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

import pytest

from adapterd.gpu_cache import Place
from adapterd.gpu_cache.daemon import Daemon, DaemonClient
from adapterd.gpu_cache.daemon.messages import (
    DrainAnswer,
)
from adapterd.gpu_cache.daemon.wire import answer_line
from adapterd.loader.errors import AdapterdError, Code, Unavailable
from adapterd.loader.identity import Ref
from fakes.served import PAGE, FakeServed, row

SECONDS = 60.0


@pytest.fixture
def cache() -> FakeServed:
    return FakeServed()


@pytest.fixture
def path(folder: Path) -> Path:
    return folder / "s"


@pytest.fixture
def daemon(cache: FakeServed, path: Path) -> Iterator[Daemon]:
    before = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    with Daemon(cache, path, metrics_port=0) as daemon:
        yield daemon
    assert (set(threading.enumerate()), len(os.listdir("/proc/self/fd"))) == before
    assert not path.exists()


@pytest.fixture
def client(daemon: Daemon) -> Iterator[DaemonClient]:
    with DaemonClient(daemon.path, SECONDS) as client:
        yield client


def code(action: Callable[[], object]) -> Code:
    with pytest.raises(AdapterdError) as refused:
        action()
    return refused.value.code


def test_the_socket_is_its_users_alone(daemon: Daemon) -> None:
    assert stat.S_IMODE(daemon.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(daemon.path.parent.stat().st_mode) == 0o700


def test_everything_that_can_be_asked(client: DaemonClient, cache: FakeServed) -> None:
    known = Ref.parse("acme/known")
    assert client.status().vram.total == 8 * PAGE
    assert client.prefetch(known, "host").ref == known
    assert client.pin(known).ref == known
    assert client.unpin(known).was_pinned
    assert client.evict(known).freed_bytes == PAGE
    assert client.drain(True).draining
    assert "adapterd_cache_draining 1.0" in client.metrics().text
    assert code(lambda: client.pin(Ref.parse("acme/nothing"))) is Code.NOT_FOUND
    assert cache.threads == {"adapterd-daemon"}  # and never the caller's


def test_a_watch_comes_when_there_is_something(client: DaemonClient, cache: FakeServed) -> None:
    first = client.residency()
    assert client.watch(first, wait_seconds=0).adapters == ()
    cache.rows = (row("acme", "a"),)
    second = client.watch(first, wait_seconds=SECONDS)
    assert [(each.adapters, each.tier) for each in second.adapters] == [(("a",), Place.RESIDENT)]
    cache.rows = ()
    assert [each.digest for each in client.watch(second, wait_seconds=SECONDS).gone] == [row("acme", "a").digest]


def test_metrics_by_http_are_on_loopback(daemon: Daemon, cache: FakeServed) -> None:
    url = daemon.metrics_url
    assert url is not None
    assert url.startswith("http://127.0.0.1:")
    with urllib.request.urlopen(url, timeout=SECONDS) as answer:
        assert b"adapterd_cache_hits_total 7.0" in answer.read()
    with socket.create_connection(("127.0.0.1", int(url.split(":")[2].split("/")[0])), SECONDS) as garbage:
        garbage.sendall(b"\xff\xfe\0" * 100 + b"\r\n\r\n")
        garbage.shutdown(socket.SHUT_WR)
        while garbage.recv(4096):
            pass
    with urllib.request.urlopen(url, timeout=SECONDS) as answer:
        assert answer.status == 200


def test_a_port_that_is_taken_is_said_and_leaves_nothing(daemon: Daemon, cache: FakeServed, folder: Path) -> None:
    assert daemon.metrics_url is not None
    taken = int(daemon.metrics_url.split(":")[2].split("/")[0])
    for port in (taken, 1 << 20):
        with pytest.raises(AdapterdError) as refused, Daemon(cache, folder / "other", metrics_port=port):
            pass
        assert refused.value.code is Code.PORT_IN_USE
    assert not (folder / "other").exists()


# --- Where it may listen


def _enter(daemon: AbstractContextManager[object]) -> None:
    with daemon:
        pass


def test_one_daemon_a_socket(daemon: Daemon, client: DaemonClient, cache: FakeServed) -> None:
    with pytest.raises(AdapterdError) as taken:
        _enter(Daemon(cache, daemon.path))
    assert taken.value.code is Code.CONFLICT
    assert "daemon" in str(taken.value)
    assert client.status().hits == 7


def test_a_killed_workers_socket_is_replaced(cache: FakeServed, path: Path) -> None:
    program = (
        "import sys, time\nfrom pathlib import Path\n"
        "from adapterd.gpu_cache.host.process.sockets import Listener\n"
        "listening = Listener(Path(sys.argv[1]), 'daemon')\nprint('up', flush=True)\nsys.stdin.read()"
    )
    killed = subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert killed.stdout is not None
    assert killed.stdin is not None
    assert killed.stdout.readline() == "up\n"
    assert code(lambda: _enter(Daemon(cache, path))) is Code.CONFLICT
    killed.send_signal(signal.SIGKILL)
    killed.wait(SECONDS)
    killed.stdout.close()
    killed.stdin.close()
    assert path.exists()
    assert code(lambda: DaemonClient(path)) is Code.SERVER_UNREACHABLE
    with Daemon(cache, path), DaemonClient(path, SECONDS) as client:
        assert client.status().hits == 7


def test_a_path_that_is_not_ours_is_refused(cache: FakeServed, folder: Path, tmp_path: Path) -> None:
    (folder / "file").write_text("somebody's")
    assert code(lambda: _enter(Daemon(cache, folder / "file"))) is Code.SETTINGS_INVALID
    assert (folder / "file").read_text() == "somebody's"
    assert code(lambda: _enter(Daemon(cache, folder / ("x" * 120)))) is Code.SETTINGS_INVALID
    tmp_path.chmod(0o755)
    assert code(lambda: _enter(Daemon(cache, tmp_path / "s"))) is Code.SETTINGS_INVALID
    if os.geteuid() != 0:
        assert code(lambda: _enter(Daemon(cache, Path("/proc/s")))) is Code.SETTINGS_INVALID


# --- The client, and who is at the other end


class Impostor:
    """Listens where a daemon should, and says what the test wants, once, to each of its callers."""

    def __init__(self, path: Path, words: bytes, *, hang_up: bool = True) -> None:
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(path))
        self._listening.listen()
        self._words, self._hang_up = words, hang_up
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        peer, _ = self._listening.accept()
        with peer:
            peer.recv(4096)
            peer.sendall(self._words)
            if not self._hang_up:
                self._done.wait(SECONDS)

    def __enter__(self) -> Impostor:
        self._thread.start()
        return self

    def __exit__(self, _kind: type[BaseException] | None, _e: BaseException | None, _tb: TracebackType | None) -> None:
        self._done.set()
        self._thread.join(SECONDS)
        self._listening.close()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", Code.SERVER_ERROR),
        (answer_line(DrainAnswer(draining=True, drained=False)), Code.SERVER_ERROR),
        (b"half an ans", Code.SERVER_UNREACHABLE),
        (b"", Code.SERVER_UNREACHABLE),
    ],
)
def test_a_stranger_at_the_other_end_is_a_typed_error(path: Path, words: bytes, expected: Code) -> None:
    with Impostor(path, words), DaemonClient(path, SECONDS) as client:
        assert code(client.status) is expected


def test_an_answer_that_does_not_come_is_given_up(path: Path) -> None:
    """The clock says when; the socket's own limit is what is left of it."""
    now = [0.0]

    def clock() -> float:
        now[0] += 4.0
        return now[0]

    with Impostor(path, b"half", hang_up=False), DaemonClient(path, 10.0, clock=clock) as client:
        assert code(client.status) is Code.SERVER_UNREACHABLE


def test_nothing_there_is_a_typed_error_with_what_to_do(folder: Path) -> None:
    with pytest.raises(Unavailable) as absent:
        DaemonClient(folder / "nothing")
    assert absent.value.code is Code.SERVER_UNREACHABLE
    assert "ADAPTERD_CACHE_SOCKET" in absent.value.problem.hint
    (folder / "file").touch()
    assert code(lambda: DaemonClient(folder / "file")) is Code.SERVER_UNREACHABLE
    assert code(lambda: DaemonClient(folder / "file" / "s")) is Code.SERVER_UNREACHABLE
    assert code(lambda: DaemonClient(folder / ("x" * 120))) is Code.SETTINGS_INVALID


def test_another_users_daemon_is_not_believed(daemon: Daemon) -> None:
    assert code(lambda: DaemonClient(daemon.path, ours=lambda _: False)) is Code.SERVER_UNREACHABLE


def test_a_client_that_was_one_too_many_hears_so(daemon: Daemon) -> None:
    clients = [DaemonClient(daemon.path, SECONDS) for _ in range(80)]
    try:
        codes = set()
        for each in clients:
            try:
                each.status()
            except AdapterdError as refused:
                codes.add(refused.code)
        assert codes == {Code.QUEUE_FULL}
    finally:
        for each in clients:
            each.close()
