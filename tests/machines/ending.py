"""The end of a machine: everything comes back, or the cache is closed in the middle. A part of `cache_machine`."""

from __future__ import annotations

import gc
from dataclasses import dataclass

from adapterd.gpu_cache import AdapterCache, LeaseState, StepTicket
from adapterd.gpu_cache.slots import Resident
from adapterd.loader.errors import Code
from fakes.cache_world import World, pages
from machines.books import Books
from machines.flaky import FlakyDevice
from machines.operators import User
from machines.rows import Rows

VRAM = 8


@dataclass(eq=False)
class OpenStep:
    ticket: StepTicket
    rows: list[tuple[Resident, ...]]


class Ending:
    """Its world, books and users are those of `CacheMachine`."""

    world: World
    cache: AdapterCache
    device: FlakyDevice
    books: Books
    rows: Rows
    users: list[User]
    steps: list[OpenStep]
    dropped: int

    def teardown(self) -> None:
        if not hasattr(self, "rows"):
            return
        try:
            if self.rows.read % 3 == 2:
                self.close_in_the_middle()
            else:
                self.drain()
                self.everything_comes_back()
        finally:
            self.users.clear()
            self.steps.clear()

    def close_in_the_middle(self) -> None:
        live = [user.lease for user in self.users if not user.lease.failed]
        self.world.__exit__(None, None, None)
        for lease in live:
            assert lease.problem is not None
            assert lease.problem.code is Code.CACHE_CLOSED
        for step in self.steps:
            self.end(step)
        self.device.drain()
        for user in self.users:
            user.lease.release()
        assert self.cache.statistics().steps_in_flight == 0
        assert self.rows.wrong == []

    def drain(self) -> None:
        """As others release what they hold, every waiting lease becomes ready or has a reason."""
        self.world.loader.failures.clear()
        self.device.refusals = self.device.refuse_waits = 0
        for step in self.steps:
            self.end(step)
        self.steps.clear()
        self.end_operations()
        self.world.settle()
        self.revoked_bytes_are_gone()
        while self.users:
            oldest_first = sorted(self.users, key=lambda user: user.lease.record.seq)
            done = [user for user in oldest_first if user.lease.ready or user.lease.failed or user.lease.paused]
            if not done and self.books.lost_pages:
                break  # what is left needs pages that the device has lost
            assert done, f"stuck: {[user.lease for user in oldest_first]}"
            for user in done:
                self.users.remove(user)
                user.lease.release()
            self.world.settle()
            self.books.check()
            self.every_lease_is_what_was_asked_for()

    def everything_comes_back(self) -> None:
        self.users.clear()
        gc.collect()
        self.cache.rebind(self.cache.base)
        self.world.settle()
        self.books.check()
        statistics, lost = self.cache.statistics(), self.books.lost_pages
        assert sum(statistics.vram_bytes.values()) == pages(lost)
        assert lost or statistics.host_bytes == {}
        assert statistics.leaked_leases <= self.dropped
        assert not any(n for state, n in statistics.leases.items() if state is not LeaseState.RELEASED)
        assert statistics.steps_in_flight == 0
        assert statistics.vram_free_bytes == pages(VRAM - lost)
        self.world.__exit__(None, None, None)
        assert self.rows.wrong == []
