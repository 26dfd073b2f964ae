"""A child that a worker has forked does not stand in for it: neither at its loader, nor at its sockets and locks."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from adapterd.gpu_cache.host.process.sockets import Listener
from adapterd.loader.store_folder import StoreFolder
from contracts.host_user import HostUser
from fakes.adapters import MemoryLoader
from fakes.loader_thread import LoaderThread

TESTS = Path(__file__).resolve().parents[3]

WORKER = """
import os, socket, sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from adapterd.gpu_cache.host.process.client import HostClient
from adapterd.gpu_cache.host.process.sockets import Listener
from contracts.host_user import HostUser
from fakes.adapters import PAGE_BYTES, MemoryLoader
from fakes.loader_thread import SOURCE, LoadersTrust

path, loader = Path(sys.argv[2]), MemoryLoader()
version = loader.publish("acme/a", 4)
host = HostClient(
    path, base=loader.base, dtype="auto", page_bytes=PAGE_BYTES, source=SOURCE, trust=LoadersTrust(loader)
)
HostUser(host).fetch(version.resolved).answer()
mine = Listener(path.with_name("mine"), "daemon")
child = os.fork()
if not child:
    sys.stdin.read()
    os._exit(0)
print(child, flush=True)
sys.stdin.read()
"""


@contextmanager
def forked_here() -> Iterator[int]:
    """A child that does nothing, until the context ends."""
    child = os.fork()
    if not child:
        signal.pause()
    try:
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_forked_child_kept_what_its_killed_parent_had(tmp_path: Path) -> None:
    """What the worker held at the loader comes free, and its own socket can be taken, though the child lives."""
    (tmp_path / "run").mkdir(mode=0o700)
    loader = MemoryLoader()
    loader.publish("acme/a", 4)
    large = loader.publish("acme/large", 6)
    serving = LoaderThread(tmp_path / "run" / "s", loader)
    other = serving.worker(loader.base)
    waits, keeps = os.pipe()
    worker = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", WORKER, str(TESTS), str(serving.path)],
        stdin=waits, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert worker.stdout is not None
    child = int(worker.stdout.readline())
    waiting = HostUser(other).fetch(large.resolved)
    assert waiting.silent
    worker.kill()
    worker.wait()
    assert len(waiting.answer()) == 1
    os.kill(child, 0)  # it is alive
    Listener(tmp_path / "run" / "mine", "daemon").close()
    for end in (keeps, waits):
        os.close(end)
    worker.stdout.close()
    other.release(waiting.number)
    other.close(20)
    serving.stop()


def test_a_forked_child_kept_a_versions_lock(tmp_path: Path) -> None:
    store, name = StoreFolder(tmp_path / "store"), "0" * 64
    with store.locked(name):
        child = forked_here()
        child.__enter__()
    try:
        with store.held(name) as mine:
            assert mine
    finally:
        child.__exit__(None, None, None)


def test_a_forked_child_takes_nothing_of_its_parent_s_away(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    listener = Listener(tmp_path / "run" / "s")
    child = os.fork()
    if not child:
        listener.close()
        os._exit(0)
    os.waitpid(child, 0)
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(str(tmp_path / "run" / "s"))
    listener.close()
