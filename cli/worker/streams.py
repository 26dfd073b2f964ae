"""The worker for coroutines: a thread runs the loop, an async iterator brings each request's tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from threading import Lock, Thread
from types import TracebackType
from typing import Self

from adapterd.cli.worker.inbox import Command, Inbox
from adapterd.cli.worker.loop import ServingLoop
from adapterd.cli.worker.requests import Ended, Event, Reason, Request
from adapterd.loader.errors import AdapterdError, Code, NotFound, error, error_from

Answer = Event | AdapterdError


class AsyncWorker:
    """Runs `loop` on a thread of its own while the context is open; leaving it ends what is open.

    Args:
        loop: not used by anybody else meanwhile.
    """

    def __init__(self, loop: ServingLoop) -> None:
        self._loop, self._inbox = loop, Inbox()
        self._thread = Thread(target=self._serve, name="adapterd-worker")
        self._fault: BaseException | None = None
        self._lock, self._over = Lock(), False

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, _kind: type[BaseException] | None, _e: BaseException | None, _tb: TracebackType | None) -> None:
        """Raises what ended the thread before its time."""
        self._put(ServingLoop.close)
        self._thread.join()
        if self._fault is not None:
            raise self._fault

    async def generate(self, request: Request) -> AsyncGenerator[int, None]:
        """The request's token ids as they come. Leaving the iteration early cancels the request.

        Raises:
            AdapterdError: what `ServingLoop.submit` raises; the request's failure; LEASE_CANCELLED if somebody
                else cancelled it, or the worker ended.
        """
        events: asyncio.Queue[Answer] = asyncio.Queue()
        here = asyncio.get_running_loop()

        def tell(event: Answer) -> None:
            with suppress(RuntimeError):  # nobody listens: the event loop was closed
                here.call_soon_threadsafe(events.put_nowait, event)

        self._put(_submission(request, tell))
        over = False
        try:
            while not over:
                event = await events.get()
                over = isinstance(event, Ended | AdapterdError)
                if isinstance(event, AdapterdError):
                    raise event
                if isinstance(event, Ended):
                    _check(event)
                    return
                yield event.token
        finally:
            if not over:
                self._put(_quietly(lambda loop: loop.cancel(request.id)))

    def pause(self, name: str) -> None:
        """See `ServingLoop.pause`; a request that is over by then is left alone."""
        self._put(_quietly(lambda loop: loop.pause(name)))

    def resume(self, name: str) -> None:
        """See `ServingLoop.resume`."""
        self._put(_quietly(lambda loop: loop.resume(name)))

    def cancel(self, name: str) -> None:
        """See `ServingLoop.cancel`."""
        self._put(_quietly(lambda loop: loop.cancel(name)))

    def _put(self, command: Command) -> None:
        """To the loop, as long as it runs; to the closed one after that, which answers, too."""
        with self._lock:
            if not self._over:
                self._inbox.put(command)
                return
        command(self._loop)

    def _serve(self) -> None:
        try:
            with self._loop:
                self._inbox.serve(self._loop)
        except BaseException as fault:  # noqa: BLE001 - handed to whoever leaves the context
            self._fault = fault
        with self._lock:
            self._over = True
        self._inbox.flush(self._loop)


def _submission(request: Request, tell: Callable[[Answer], None]) -> Command:
    def submit(loop: ServingLoop) -> None:
        try:
            loop.submit(request, tell)
        except AdapterdError as refusal:
            tell(refusal)

    return submit


def _quietly(command: Command) -> Command:
    """`command`, for a request that may be over by the time it runs."""

    def run(loop: ServingLoop) -> None:
        with suppress(NotFound):
            command(loop)

    return run


def _check(event: Ended) -> None:
    """Raises why there are no more tokens, unless the answer is whole."""
    if event.problems:
        raise error_from(event.problems)
    if event.reason is Reason.CANCELLED:
        raise error(Code.LEASE_CANCELLED, event.id, "the request was cancelled", "Ask again.")
