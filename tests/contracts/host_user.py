"""Who asks a host for a tenant, as a cache does; and what the parts of its contract stand on."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from adapterd.gpu_cache import TenantBudget
from adapterd.gpu_cache.host.interface import Failure, Host, Image, Progress
from adapterd.loader.errors import Problem
from adapterd.loader.identity import Ref, VersionKey
from adapterd.loader.sources import Resolved
from fakes.adapters import MemoryLoader

SECONDS = 20.0
"""After which a test gives up."""


@dataclass
class Asked:
    """One request, and its answers as they come. `heard` gets the request itself with each."""

    heard: queue.SimpleQueue[Asked]
    number: int = 0
    answers: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)

    def settle(self, outcome: Any) -> None:
        self.answers.put(outcome)
        self.heard.put(self)

    def answer(self) -> Any:
        return self.answers.get(timeout=SECONDS)

    def problem(self) -> Problem:
        outcome = self.answer()
        assert isinstance(outcome, Failure), outcome
        return outcome.problems[0]

    @property
    def silent(self) -> bool:
        return self.answers.empty()


class HostUser:
    """Asks a host for a tenant, as a cache does."""

    def __init__(self, host: Host, tenant: str = "acme") -> None:
        self.host, self.tenant = host, tenant
        self.heard: queue.SimpleQueue[Asked] = queue.SimpleQueue()

    def resolve(self, *refs: str) -> Asked:
        asked = Asked(self.heard)
        asked.number = self.host.resolve([Ref.parse(ref) for ref in refs], self.tenant, asked.settle)
        return asked

    def verify(self, resolved: Resolved) -> Asked:
        asked = Asked(self.heard)
        asked.number = self.host.verify(resolved, self.tenant, asked.settle)
        return asked

    def fetch(self, *wanted: Resolved, priority: int = 0) -> Asked:
        asked = Asked(self.heard)
        asked.number = self.host.fetch(wanted, self.tenant, asked.settle, priority=priority)
        return asked

    def images(self, *wanted: Resolved) -> tuple[Image, ...]:
        """Fetched, and released at once: they stay until room is needed."""
        asked = self.fetch(*wanted)
        images = asked.answer()
        assert not isinstance(images, Failure), images
        self.host.release(asked.number)
        return images  # type: ignore[no-any-return]


def held_bytes(image: Image) -> bytes:
    """What the slab holds at the image's pages."""
    memory, size = memoryview(image.slab.memory).cast("B"), image.slab.page_bytes
    return b"".join(bytes(memory[page * size : (page + 1) * size]) for page in image.pages)


class HostBench:
    """Subclasses give `make`; `MemoryLoader` may live in another thread of this process, never elsewhere."""

    def make(
        self, loader: MemoryLoader, *, pages: int, tenants: Mapping[str, TenantBudget], keep_host: bool, threads: int
    ) -> Host:
        """A host over `loader` whose slab has `pages` pages of `PAGE_BYTES`; base and page size are the loader's."""
        raise AssertionError("subclasses make their host")

    @pytest.fixture
    def loader(self) -> MemoryLoader:
        return MemoryLoader()

    @pytest.fixture
    def hosts(self) -> Iterator[list[Host]]:
        """Those to close."""
        hosts: list[Host] = []
        before = set(threading.enumerate())
        yield hosts
        for host in hosts:
            host.close(SECONDS)
        assert set(threading.enumerate()) <= before, "threads are left over"

    def open(
        self,
        loader: MemoryLoader,
        hosts: list[Host],
        *,
        pages: int = 8,
        tenants: Mapping[str, TenantBudget] | None = None,
        keep_host: bool = True,
        threads: int = 2,
    ) -> HostUser:
        host = self.make(loader, pages=pages, tenants=tenants or {}, keep_host=keep_host, threads=threads)
        hosts.append(host)
        return HostUser(host)

    def says(self, user: HostUser, wanted: Mapping[VersionKey, Progress | None]) -> None:
        """`loading` comes to say that; None: whatever it says of the version."""

        def holds() -> bool:
            found = user.host.loading()
            return found.keys() == wanted.keys() and all(how in {None, found[key]} for key, how in wanted.items())

        self.ends(holds)

    def ends(self, holds: Callable[[], bool]) -> None:
        """Another thread, or the loader, makes it so, and tells nobody."""
        end = time.monotonic() + SECONDS
        while not holds():
            assert time.monotonic() < end, "it never came to pass"
            os.sched_yield()

    def eventually(self, user: HostUser, tenants: Mapping[str, int]) -> None:
        """What is in use becomes that: what a released request held goes when the loader has noticed."""
        last: Sequence[object] = ()
        for _ in range(200):
            last = (user.host.usage().tenants,)
            if last == (tenants,):
                return
            user.resolve("acme/none").answer()  # a job after those that run
        raise AssertionError(f"{last} is not {tenants}")
