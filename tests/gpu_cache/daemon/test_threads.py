"""Everything at once: a worker that serves, its daemon's thread, and clients that behave as they like."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

from adapterd.gpu_cache import AdapterCache, CacheConfig
from adapterd.gpu_cache.cpu_device import CpuDevice
from adapterd.gpu_cache.daemon import Daemon, DaemonClient
from adapterd.loader.errors import AdapterdError, Code
from adapterd.loader.identity import Ref
from fakes.adapters import PAGE_BYTES, MemoryLoader
from fakes.cache_world import host_over

SECONDS = 60.0
ROUNDS = 40


def test_a_worker_serves_while_clients_do_what_they_like(folder: Path) -> None:
    loader, device = MemoryLoader(), CpuDevice()
    for name in "abcdef":
        loader.publish(f"acme/{name}", 2)
    config = CacheConfig(vram_bytes=8 * PAGE_BYTES, host_bytes=16 * PAGE_BYTES, page_bytes=PAGE_BYTES)
    host = host_over(loader, config, device)
    cache = AdapterCache(config, base=loader.base, host=host, device=device)
    failures: list[BaseException] = []

    def asks(number: int) -> None:
        try:
            with DaemonClient(folder / "s", SECONDS) as client:
                known = None
                for turn in range(ROUNDS):
                    ref = Ref.parse(f"acme/{'abcdef'[(number + turn) % 6]}")
                    client.prefetch(ref)
                    known = client.watch(known, wait_seconds=0)
                    client.status()
                    try:
                        client.evict(ref)
                    except AdapterdError as refused:
                        assert refused.code in {Code.ADAPTER_IN_USE, Code.NOT_FOUND}
        except BaseException as e:  # noqa: BLE001 - told by the test's own thread
            failures.append(e)

    def rages() -> None:
        for _ in range(ROUNDS):
            with socket.socket(socket.AF_UNIX) as raging:
                raging.connect(str(folder / "s"))
                try:
                    raging.sendall(b"\xff\n{]\n" + b"x" * 20_000)
                except ConnectionError:
                    continue

    with cache, Daemon(cache, folder / "s"):
        threads = [threading.Thread(target=asks, args=(n,)) for n in range(3)] + [threading.Thread(target=rages)]
        for thread in threads:
            thread.start()
        for turn in range(ROUNDS):
            with cache.acquire(f"acme/{'abcdef'[turn % 6]}", tenant="acme") as lease:
                lease.wait(SECONDS)
                with cache.begin_step([lease]):
                    assert lease.composition
        for thread in threads:
            thread.join(SECONDS)
        assert not any(thread.is_alive() for thread in threads)
        assert failures == []
        with DaemonClient(folder / "s", SECONDS) as client:
            status = client.status()
        assert status.leaked_leases == 0
        assert (status.steps_in_flight, sum(held.leases for held in status.adapters)) == (0, 0)
    device.close()
