"""A loader that is there and does nothing: stopped by a signal, or hanging. Nobody waits for ever."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from adapterd.gpu_cache.host.interface import Failure
from adapterd.gpu_cache.host.process.client import HostClient
from adapterd.gpu_cache.host.process.silence import Silence
from adapterd.gpu_cache.host.process.spawn import StartedLoader
from adapterd.loader.errors import Code
from contracts.host_user import SECONDS, HostUser, held_bytes
from fakes.adapters import PAGE_BYTES, MemoryLoader, image_bytes
from fakes.devices import Barrier
from fakes.leftovers import threads_and_files
from fakes.loader_thread import SOURCE, LoadersTrust, LoaderThread

TESTS = Path(__file__).parents[3]
LOADER = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from fakes.adapters import MemoryLoader
from fakes.loader_thread import LoaderThread
loader = MemoryLoader()
for _ in range(2):
    loader.publish("acme/a", 2)
serving = LoaderThread(Path(sys.argv[2]), loader)
print("serving", flush=True)
sys.stdin.read()
serving.stop()
"""
VERSION = MemoryLoader().publish("acme/a", 2)


class Seconds:
    """Moves when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Processes:
    """Starter of loaders over a memory loader, in processes of their own."""

    def __init__(self, path: Path) -> None:
        self.path, self.started = path, list[StartedLoader]()

    def start(self, _readable: object) -> StartedLoader:
        ours, its = socket.socketpair()
        with its:
            process = subprocess.Popen(
                [sys.executable, "-c", LOADER, str(TESTS), str(self.path)], stdin=its, stdout=subprocess.PIPE
            )
        assert process.stdout is not None
        assert process.stdout.readline() == b"serving\n"
        process.stdout.close()
        self.started.append(StartedLoader(process, ours))
        return self.started[-1]


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "run").mkdir(mode=0o700)
    before = threads_and_files()
    yield tmp_path / "run" / "s"
    assert threads_and_files() == before


def _client(path: Path, clock: Seconds, starter: object = None) -> HostClient:
    """It looks at the clock every 10 ms while an answer is owed; the clock is the test's."""
    loader = MemoryLoader()
    return HostClient(
        path, base=loader.base, dtype="auto", page_bytes=PAGE_BYTES, source=SOURCE, trust=LoadersTrust(loader),
        starter=starter, shared=False, silence=Silence(clock, ask_after=0.01, patience=0.01),  # type: ignore[arg-type]
    )  # fmt: skip


def _pass_time(clock: Seconds, until: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not until():
        assert time.monotonic() < end, "it waits for ever"
        clock.now += 0.01
        os.sched_yield()


def test_a_stopped_loader_is_ended_and_another_one_answers(path: Path) -> None:
    """What is held stays readable, and what was asked is asked again."""
    starter, clock = Processes(path), Seconds()
    client = _client(path, clock, starter)
    user = HostUser(client)
    held = user.fetch(VERSION.resolved)
    (image,) = held.answer()
    os.kill(starter.started[0].process.pid, signal.SIGSTOP)
    waiting = user.fetch(VERSION.resolved)
    _pass_time(clock, lambda: len(starter.started) == 2)
    (again,) = waiting.answer()
    assert again.slab is client.slab is not image.slab
    assert held_bytes(image) == held_bytes(again) == image_bytes(VERSION.digest, 2)
    assert starter.started[0].process.returncode == -signal.SIGKILL
    client.close(SECONDS)


def test_a_stopped_loader_of_somebody_else_fails_requests_until_it_goes_on(path: Path) -> None:
    starter, clock = Processes(path), Seconds()
    process = starter.start(None).process
    client = _client(path, clock)
    user = HostUser(client)
    os.kill(process.pid, signal.SIGSTOP)
    waiting = [user.resolve("acme/a"), user.fetch(VERSION.resolved)]
    _pass_time(clock, lambda: not waiting[1].silent)
    for asked in waiting:
        problem = asked.problem()
        assert problem.code is Code.LOADER_UNAVAILABLE
        assert "no sign of life" in problem.message
        assert "stopped, or hangs" in problem.hint
    os.kill(process.pid, signal.SIGCONT)
    while isinstance(user.resolve("acme/a").answer(), Failure):
        pass
    assert held_bytes(user.fetch(VERSION.resolved).answer()[0]) == image_bytes(VERSION.digest, 2)
    client.close(SECONDS)
    starter.started[0].close(SECONDS, shared=False)


def test_a_loader_that_loads_for_long_is_asked_and_answers(path: Path) -> None:
    """Its serving thread says that it is there, however long a source takes."""
    loader, clock = MemoryLoader(), Seconds()
    serving = LoaderThread(path, loader)
    client = _client(path, clock)
    version = loader.publish("acme/a", 2)
    barrier = loader.barriers["prepare acme/a"] = Barrier()
    slow = HostUser(client).fetch(version.resolved)
    barrier.await_arrival()
    slab = client.slab
    for _ in range(5):
        clock.now += 0.01
        assert HostUser(client).resolve("acme/a").answer()  # it has looked at the clock, and heard
    del loader.barriers["prepare acme/a"]
    barrier.open()
    assert held_bytes(slow.answer()[0]) == image_bytes(version.digest, 2)
    assert client.slab is slab
    client.close(SECONDS)
    serving.stop()


def test_one_that_owes_nothing_is_not_asked() -> None:
    clock = Seconds()
    silence = Silence(clock, ask_after=10, patience=30)
    assert silence.left(owes=False) is None
    clock.now = 1000
    assert silence.left(owes=True) == 10


def test_it_is_asked_once_and_then_given_up() -> None:
    clock = Seconds()
    silence = Silence(clock, ask_after=10, patience=30)
    assert silence.left(owes=True) == 10
    clock.now = 4
    assert silence.left(owes=True) == 6
    clock.now = 12
    assert silence.left(owes=True) == 0
    assert silence.ask()
    assert silence.left(owes=True) == 30
    clock.now = 41
    assert silence.left(owes=True) == 1
    clock.now = 50
    assert silence.left(owes=True) == 0
    assert not silence.ask()


def test_whatever_is_heard_ends_the_silence() -> None:
    clock = Seconds()
    silence = Silence(clock, ask_after=10, patience=30)
    silence.left(owes=True)
    clock.now = 10
    assert silence.ask()
    silence.heard()
    assert silence.left(owes=True) == 10
    clock.now = 20
    assert silence.ask()
    assert silence.left(owes=False) is None
    assert silence.left(owes=True) == 10
