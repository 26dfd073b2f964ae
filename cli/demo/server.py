"""The demo's server: `adapterctl serve` as a process of its own, on a loopback port."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import tenacity

from adapterd.loader.errors import Code, error

STOP_SECONDS = 10
START_SECONDS = 60


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True, slots=True)
class Server:
    """A server process that has been started; `wait` until it answers."""

    url: str
    log: Path
    process: subprocess.Popen[bytes]

    def wait(self) -> str:
        """Poll `/readyz`; returns the URL.

        Raises:
            Unavailable: SERVER_ERROR with the server's last words if it ends or does not come up.
        """
        attempts = tenacity.Retrying(
            stop=tenacity.stop_after_delay(START_SECONDS),
            wait=tenacity.wait_fixed(0.1),
            retry=tenacity.retry_if_exception_type((httpx.TransportError, _NotReady)),
        )
        try:
            attempts(self._ask)
        except (tenacity.RetryError, _Ended) as given_up:
            words = self.log.read_text(errors="replace").strip().splitlines()[-3:]
            raise error(
                Code.SERVER_ERROR, self.url, f"the server did not come up; it said: {' / '.join(words)}"
            ) from given_up
        return self.url

    def _ask(self) -> None:
        if self.process.poll() is not None:
            raise _Ended
        if httpx.get(f"{self.url}/readyz").status_code != httpx.codes.OK:
            raise _NotReady


class _NotReady(Exception):
    """The server answers, but not yet with 200."""


class _Ended(Exception):
    """The server's process is gone."""


@contextmanager
def running_server(data_dir: Path, port: int) -> Iterator[Server]:
    """Start the server over `data_dir`, and stop it at the end."""
    log = data_dir / "server.log"
    words = [sys.executable, "-m", "adapterd.cli", "serve", "--host", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(words, env=environment(data_dir), stdout=output, stderr=subprocess.STDOUT)  # noqa: S603
    try:
        yield Server(f"http://127.0.0.1:{port}", log, process)
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def environment(data_dir: Path) -> Mapping[str, str]:
    """This process's environment, with the registry's settings pointing at `data_dir` only."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("ADAPTERD_")}
    return {**kept, "ADAPTERD_DATA_DIR": str(data_dir)}
