"""Tokens for coroutines."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest

from adapterd.cli.worker.loop import ServingLoop
from adapterd.cli.worker.requests import Request
from adapterd.cli.worker.streams import AsyncWorker
from adapterd.loader.errors import AdapterdError, Code
from fakes.worker_world import ALL, WorkerWorld

PROMPT = [3, 1, 4, 1, 5]


def request(name: str, wish: str | None = None, most: int = 6) -> Request:
    return Request(name, "acme", wish, PROMPT, most)


async def collect(worker: AsyncWorker, one: Request) -> list[int]:
    return [token async for token in worker.generate(one)]


async def failure(worker: AsyncWorker, one: Request) -> Code:
    with pytest.raises(AdapterdError) as caught:
        await collect(worker, one)
    return caught.value.code


def test_many_at_once_and_one_that_fails(tmp_path: Path) -> None:
    async def main(worker: AsyncWorker) -> None:
        asked = [request("base"), request("finance", "acme/finance"), request("base 2")]
        base, finance, again = await asyncio.gather(*(collect(worker, one) for one in asked))
        assert base == again
        world.check_greedy(PROMPT, base, ())
        world.check_greedy(PROMPT, finance, [(package, 2.0, 1.0)])
        assert await failure(worker, request("x", "acme/nothing")) is Code.NOT_FOUND
        assert await failure(worker, Request("y", "acme", None, [], 1)) is Code.REQUEST_INVALID

    with WorkerWorld(tmp_path) as world:
        package = world.publisher.publish("acme", "finance", modules=ALL, rank=4, alpha=8, seed=1)
        with AsyncWorker(world.loop) as worker:
            asyncio.run(main(worker))


def test_who_stops_listening_cancels(tmp_path: Path) -> None:
    async def main(worker: AsyncWorker) -> None:
        async with aclosing(worker.generate(request("a", most=500))) as tokens:
            assert isinstance(await anext(tokens), int)
        task = asyncio.create_task(collect(worker, request("b", most=500)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with aclosing(worker.generate(request("c", most=500))) as tokens:
            await anext(tokens)
            worker.pause("c")
            worker.resume("c")
            worker.cancel("c")
            with pytest.raises(AdapterdError) as caught:
                async for _ in tokens:
                    pass
            assert caught.value.code is Code.LEASE_CANCELLED
        worker.cancel("c")  # over already
        assert len(await collect(worker, request("d"))) == 6

    with WorkerWorld(tmp_path) as world, AsyncWorker(world.loop) as worker:
        asyncio.run(main(worker))
        worker._put(ServingLoop.drain)
        assert asyncio.run(failure(worker, request("late"))) is Code.CACHE_CLOSED


def test_what_ends_the_loop_is_raised_where_the_worker_is_left(tmp_path: Path) -> None:
    def broken(_: ServingLoop) -> None:
        raise LookupError("a bug")

    async def main(worker: AsyncWorker) -> Code:
        async with aclosing(worker.generate(request("a", most=500))) as tokens:
            await anext(tokens)
            worker._put(broken)
            with pytest.raises(AdapterdError) as caught:
                async for _ in tokens:
                    pass
            return caught.value.code

    with WorkerWorld(tmp_path) as world, pytest.raises(LookupError), AsyncWorker(world.loop) as worker:
        assert asyncio.run(main(worker)) is Code.LEASE_CANCELLED
