"""The server sweeps again and again, also after a sweep that failed."""

from __future__ import annotations

import asyncio
import threading

from adapterd.registry.sweeping import sweeping


def test_it_goes_on_after_a_failure_and_stops_with_the_server() -> None:
    swept, told = [], []
    third = threading.Event()

    def sweep() -> None:
        swept.append(1)
        if len(swept) == 2:
            raise ValueError("a bug")
        if len(swept) >= 3:
            third.set()

    async def serve() -> None:
        async with sweeping(sweep, told.append, every=0.0):
            assert await asyncio.to_thread(third.wait, 60)

    asyncio.run(serve())
    assert [str(fault) for fault in told] == ["a bug"]
    assert len(swept) >= 3


def test_it_goes_on_though_nothing_can_be_told() -> None:
    calls: list[int] = []

    def sweep() -> None:
        calls.append(1)
        raise RuntimeError("no")

    def failed(_: Exception) -> None:
        raise OSError("the log's disk is full")

    async def run() -> None:
        async with sweeping(sweep, failed, every=0.0):
            while len(calls) < 3:
                await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(run(), 10))
