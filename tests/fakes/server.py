"""A registry that really runs: SQLite, local blobs, uvicorn on a loopback port, in a thread."""

from __future__ import annotations

import io
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from adapterd.registry.app import create_app
from adapterd.registry.operations import initialise
from adapterd.registry.settings import Settings, load_settings

START_SECONDS = 30.0
STOP_SECONDS = 30.0


@dataclass(frozen=True)
class RunningRegistry:
    """Where it listens, the first operator's token, and the settings that it runs under."""

    url: str
    operator_token: str
    settings: Settings


class _Server(uvicorn.Server):
    """Says when it listens, so that nobody has to poll or sleep."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.settled = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.settled.set()

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            super().run(sockets=sockets)
        finally:
            self.settled.set()


@contextmanager
def running_registry(data_dir: Path, **over: Any) -> Iterator[RunningRegistry]:
    """Make a registry in `data_dir` and serve it until the block ends. `over` replaces settings."""
    settings = load_settings(**{"data_dir": data_dir, "database_url": "", "blobs": "local", **over})
    made = initialise(settings)
    with serving(settings) as url:
        yield RunningRegistry(url, made.operator_token or "", settings)


@contextmanager
def serving(settings: Settings) -> Iterator[str]:
    """Serve an initialised registry on a free loopback port; yields the URL."""
    with serving_app(create_app(settings, log_to=io.StringIO())) as url:
        yield url


@contextmanager
def serving_app(app: FastAPI) -> Iterator[str]:
    """Serve an application that is wired already."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = _Server(uvicorn.Config(app, log_config=None, lifespan="on"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="registry")
    thread.start()
    try:
        assert server.settled.wait(START_SECONDS), "the server does not start"
        assert server.started, "the server did not come up"
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(STOP_SECONDS)
        listener.close()
        assert not thread.is_alive(), "the server does not stop"
