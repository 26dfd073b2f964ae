"""A process that has no descriptor left waits for one: it neither spins nor gives up for ever."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from adapterd.gpu_cache.host.process.link import Link
from adapterd.gpu_cache.host.process.reaching import Reach
from adapterd.loader.base_model import BaseSpec
from contracts.host_user import SECONDS, HostUser, held_bytes
from fakes.adapters import MemoryLoader, image_bytes
from fakes.loader_thread import LoaderThread


class Starved(socket.socket):
    """A listening socket whose process has no descriptor left, `refusals` times."""

    refusals = 0
    asked = 0

    def accept(self) -> tuple[socket.socket, object]:
        self.asked += 1
        if self.asked <= self.refusals:
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


@pytest.fixture
def starved(monkeypatch: pytest.MonkeyPatch) -> type[Starved]:
    monkeypatch.setattr("adapterd.gpu_cache.host.process.sockets.socket.socket", Starved)
    monkeypatch.setattr(Starved, "refusals", 0)
    return Starved


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "run").mkdir(mode=0o700)
    yield tmp_path / "run"


def test_a_loader_without_descriptors_asked_for_a_worker_again_and_again(
    folder: Path, starved: type[Starved], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a tick, though the worker stands at the door all the time; whoever is in is served meanwhile."""
    monkeypatch.setattr("adapterd.gpu_cache.host.process.server.TICK_SECONDS", 1000.0)
    loader = MemoryLoader()
    version = loader.publish("acme/a", 2)
    serving = LoaderThread(folder / "s", loader)
    listener = serving.server._listener
    assert isinstance(listener, Starved)
    worker = serving.worker(loader.base)
    assert listener.asked == 1
    starved.refusals = 1000
    with socket.socket(socket.AF_UNIX) as late:
        late.connect(str(serving.path))
        for _ in range(10):
            HostUser(worker).images(version.resolved)
    assert listener.asked == 2
    worker.close(SECONDS)
    serving.stop()


class Poor(Reach):
    """Has no descriptor for its first ways to a loader."""

    poor = 2

    def connect(self, hello: object, base: BaseSpec) -> Link:
        if self.poor:
            self.poor -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().connect(hello, base)  # type: ignore[arg-type]


def test_a_worker_without_descriptors_gave_up_its_loader_for_ever(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adapterd.gpu_cache.host.process.client.Reach", Poor)
    loader = MemoryLoader()
    version = loader.publish("acme/a", 2)
    serving = LoaderThread(folder / "s", loader)
    worker = serving.worker(loader.base)
    (image,) = HostUser(worker).images(version.resolved)
    assert held_bytes(image) == image_bytes(version.digest, 2)
    worker.close(SECONDS)
    serving.stop()
