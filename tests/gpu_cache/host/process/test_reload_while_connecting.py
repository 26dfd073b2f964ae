"""A base that is reloaded while the worker connects to a loader is the base of that connection."""

from __future__ import annotations

from pathlib import Path

from adapterd.gpu_cache.host.process.client import HostClient
from contracts.host_user import SECONDS, HostUser, held_bytes
from fakes.adapters import PAGE_BYTES, MemoryLoader, image_bytes, make_base
from fakes.loader_thread import SOURCE, LoadersTrust, LoaderThread


class Reloading:
    """Starts the next loader; while it does, the worker's base is reloaded."""

    def __init__(self, path: Path, loader: MemoryLoader) -> None:
        self.path, self.loader, self.started = path, loader, list[LoaderThread]()
        self.worker: HostClient | None = None
        self.new = make_base("b" * 40)

    def start(self, _readable: object) -> None:
        self.started.append(LoaderThread(self.path, self.loader))
        if self.worker is not None:
            self.worker.rebase(self.new)


def test_a_reload_while_the_worker_connected_was_lost(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    path, loader = tmp_path / "run" / "s", MemoryLoader()
    starter = Reloading(path, loader)
    worker = HostClient(
        path, base=loader.base, dtype="auto", page_bytes=PAGE_BYTES, source=SOURCE, trust=LoadersTrust(loader),
        starter=starter,  # type: ignore[arg-type]
    )  # fmt: skip
    starter.worker = worker
    before = worker.trust_changes
    starter.started[0].stop()  # the next one is started, and the base reloaded meanwhile
    loader.base = starter.new
    for_the_new = loader.publish("acme/a", 2)
    while worker.trust_changes == before:
        HostUser(worker).resolve("acme/a").answer()
    (image,) = HostUser(worker).images(for_the_new.resolved)
    assert (image.key.base, held_bytes(image)) == (starter.new.pin, image_bytes(for_the_new.digest, 2))
    worker.close(SECONDS)
    starter.started[1].stop()
