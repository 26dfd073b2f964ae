"""Sweeping again and again while the server runs: beside the requests, so that none pays for what another left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from anyio import CapacityLimiter, to_thread

SWEEP_SECONDS = 600.0
"""By a clock that nobody sets."""


@asynccontextmanager
async def sweeping(
    sweep: Callable[[], object], failed: Callable[[Exception], None], every: float = SWEEP_SECONDS
) -> AsyncIterator[None]:
    """Call `sweep` in a thread, `every` so many seconds, until the block ends. What it raises is told, once each."""
    task = asyncio.create_task(_repeat(sweep, failed, every))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _repeat(sweep: Callable[[], object], failed: Callable[[Exception], None], every: float) -> None:
    while True:
        await asyncio.sleep(every)
        try:
            await to_thread.run_sync(sweep, limiter=CapacityLimiter(1), abandon_on_cancel=True)
        except Exception as caught:  # noqa: BLE001 - also a bug must not end the sweeping
            with suppress(Exception):  # on a full disk not even the log can be written
                failed(caught)
