"""A worker killed in the middle of a copy, a loader in the middle of a pack: nobody else loses anything by it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from adapterd.gpu_cache.host.process.client import HostClient
from contracts.host_user import SECONDS, HostUser, held_bytes
from fakes.adapters import PAGE_BYTES, MemoryLoader, image_bytes
from fakes.loader_thread import SOURCE, LoadersTrust, LoaderThread

PAGES = 8
TESTS = Path(__file__).resolve().parents[3]

WORKER = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from adapterd.gpu_cache import AdapterCache, CacheConfig
from adapterd.gpu_cache.host.process.client import HostClient
from fakes.adapters import PAGE_BYTES, MemoryLoader
from fakes.devices import HeldDevice
from fakes.loader_thread import SOURCE, LoadersTrust

loader, device = MemoryLoader(), HeldDevice()
host = HostClient(
    Path(sys.argv[2]), base=loader.base, dtype="auto", page_bytes=PAGE_BYTES, source=SOURCE, trust=LoadersTrust(loader)
)
config = CacheConfig(vram_bytes=8 * PAGE_BYTES, host_bytes=8 * PAGE_BYTES, page_bytes=PAGE_BYTES)
device.hold()
with AdapterCache(config, base=loader.base, host=host, device=device) as cache:
    lease = cache.acquire("acme/a", tenant="acme")
    while not device.copies_queued:
        cache.pump()
    print(lease.record.state, flush=True)
    sys.stdin.read()
"""

LOADER = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from adapterd.loader.image import PackedImage
from fakes.adapters import MemoryLoader, TaggedImage
from fakes.loader_thread import LoaderThread

class Half(TaggedImage):
    def fill(self, out):
        if self.version.resolved.adapter == "late":
            for part in PackedImage(self.layout, out).parts(0, self.layout.nbytes // 2):
                part[:] = bytes([255]) * len(part)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().fill(out)

class Deadly(MemoryLoader):
    def prepare(self, resolved, serving, cancelled, told):
        image = super().prepare(resolved, serving, cancelled, told)
        return Half(image.version, self, image.origin)

loader = Deadly()
for name in ("a", "late"):
    loader.publish(f"acme/{name}", 4)
serving = LoaderThread(Path(sys.argv[2]), loader)
print("serving", flush=True)
sys.stdin.read()
"""


@contextmanager
def process(program: str, path: Path, says: str) -> Iterator[subprocess.Popen[str]]:
    """Runs a program that says one word when it is where it is to be killed, or listens."""
    running = subprocess.Popen(
        [sys.executable, "-c", program, str(TESTS), str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert running.stdout is not None
        assert running.stdout.readline().strip() == says
        yield running
    finally:
        running.kill()
        running.communicate()


def folder(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir(mode=0o700)
    return tmp_path / "run"


def test_what_a_worker_killed_in_the_middle_of_a_copy_held_goes_to_others(tmp_path: Path) -> None:
    loader = MemoryLoader()
    mine, large = loader.publish("acme/a", 4), loader.publish("acme/large", 6)
    serving = LoaderThread(folder(tmp_path) / "s", loader, pages=PAGES)
    other = serving.worker(loader.base)
    user = HostUser(other)
    with process(WORKER, serving.path, "copying") as worker:
        waiting = user.fetch(large.resolved)
        assert held_bytes(user.images(mine.resolved)[0]) == image_bytes(mine.digest, 4)  # it is there, and held
        assert waiting.silent
        worker.kill()
        (image,) = waiting.answer()
        assert held_bytes(image) == image_bytes(large.digest, 6)
    other.release(waiting.number)
    other.close(SECONDS)
    serving.stop()


class Next:
    """Starts a loader in this process, when there is none."""

    def __init__(self, path: Path, loader: MemoryLoader) -> None:
        self.path, self.loader, self.started = path, loader, list[LoaderThread]()

    def start(self, _readable: object) -> None:
        self.started.append(LoaderThread(self.path, self.loader))


def test_a_loader_killed_in_the_middle_of_a_pack_leaves_no_half_of_it(tmp_path: Path) -> None:
    loader, path = MemoryLoader(), folder(tmp_path) / "s"
    there, late = loader.publish("acme/a", 4), loader.publish("acme/late", 4)
    starter = Next(path, loader)
    with process(LOADER, path, "serving") as first:
        worker = HostClient(
            path, base=loader.base, dtype="auto", page_bytes=PAGE_BYTES, source=SOURCE, trust=LoadersTrust(loader),
            starter=starter,  # type: ignore[arg-type]
        )  # fmt: skip
        user = HostUser(worker)
        held = user.fetch(there.resolved)
        (image,) = held.answer()
        waiting = user.fetch(late.resolved)
        (packed,) = waiting.answer()
        assert first.wait(SECONDS) == -9
    assert held_bytes(packed) == image_bytes(late.digest, 4)
    assert held_bytes(image) == image_bytes(there.digest, 4)
    assert packed.slab is not image.slab and len(starter.started) == 1
    worker.close(SECONDS)
    starter.started[0].stop()
