"""What operators see: a log line and a measurement a request, and what became of uploads. Never a secret."""

from __future__ import annotations

import asyncio
import time
from typing import Any, TextIO

import structlog
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adapterd.loader.errors import AdapterdError, Code, error
from adapterd.registry.api.problems import problem_response
from adapterd.registry.tokens.interfaces import Caller
from adapterd.registry.uploads.interfaces import Upload

SECONDS = (0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0)
_UNMATCHED = "unmatched"
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})  # labels must stay few
_NO_ANSWER = 499  # nginx's word for a client that went away


class Observer:
    """The log and the metrics of one application. An `Announcer` of uploads.

    Args:
        log_to: where lines of JSON go.
    """

    def __init__(self, log_to: TextIO) -> None:
        self.log: Any = structlog.wrap_logger(
            structlog.WriteLogger(log_to),
            processors=[
                structlog.processors.add_log_level,
                structlog.processors.TimeStamper(fmt="iso", utc=True),
                structlog.processors.format_exc_info,
                structlog.processors.JSONRenderer(),
            ],
            wrapper_class=structlog.BoundLogger,
        )
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "adapterd_requests", "Answered requests.", ("method", "route", "status"), registry=self._registry
        )
        self._seconds = Histogram(
            "adapterd_request_seconds", "Time to the end of the answer.", ("method", "route"),
            buckets=SECONDS, registry=self._registry,
        )  # fmt: skip
        self._uploads = Counter("adapterd_uploads", "Uploads that were closed.", ("outcome",), registry=self._registry)
        self._received = Counter("adapterd_received_bytes", "Bytes of uploads taken.", registry=self._registry)

    def metrics(self) -> bytes:
        """The text format of Prometheus."""
        return generate_latest(self._registry)

    def request(self, scope: Scope, status: int, seconds: float) -> None:
        """One request is over."""
        method = scope["method"] if scope["method"] in _METHODS else "other"
        route = getattr(scope.get("route"), "path", _UNMATCHED)
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(method, route).observe(seconds)
        state = scope.get("state", {})
        caller: Caller | None = state.get("caller")
        self.log.info(
            "request", method=method, path=scope["path"], route=route, status=status, seconds=round(seconds, 4),
            code=state.get("problem_code"), token=caller.token_id if caller else None,
            **({"detail": state["problem_detail"]} if "problem_detail" in state else {}),
        )  # fmt: skip

    def failed(self, scope: Scope, caught: BaseException) -> None:
        """A bug ended a request; the log is the only place that tells what it was."""
        self.log.error("bug", method=scope["method"], path=scope["path"], exc_info=caught)

    def not_swept(self, caught: Exception) -> None:
        """The janitor could not do its work; it tries again."""
        self.log.error("sweep", exc_info=caught)

    def received(self, upload: Upload, path: str, count: int) -> None:
        """Bytes of an upload came in."""
        self._received.inc(count)
        self.log.info("upload.received", tenant=upload.tenant, upload=upload.id, file=path, bytes=count)

    def admitted(self, upload: Upload) -> None:
        """An upload became a version."""
        self._uploads.labels("admitted").inc()
        self.log.info(
            "upload.admitted",
            tenant=upload.tenant,
            upload=upload.id,
            adapter=upload.adapter,
            number=upload.number,
        )

    def refused(self, upload: Upload) -> None:
        """An upload was refused."""
        self._uploads.labels("refused").inc()
        codes = [p.code.value for p in upload.problems if p.severity == "reject"]
        self.log.info("upload.refused", tenant=upload.tenant, upload=upload.id, adapter=upload.adapter, codes=codes)


def _stopping() -> AdapterdError:
    hint = "Try again in a few seconds: what was received is kept, and what was decided is told then."
    return error(Code.SERVER_UNREACHABLE, "server", "the server stops", hint)


class Observe:
    """ASGI middleware: tells the observer of every request, also of those that end in a bug.

    Starlette answers for a bug outside of all middleware, so that this one never sees the answer's status.
    """

    def __init__(self, app: ASGIApp, observer: Observer) -> None:
        self._app = app
        self._observer = observer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun, status = time.perf_counter(), _NO_ANSWER

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except asyncio.CancelledError:
            # The server stops, and this request took longer than it waits; here its task ends anyway.
            if status == _NO_ANSWER:
                await problem_response(_stopping(), scope["path"])(scope, receive, noting)
        except Exception as caught:
            self._observer.failed(scope, caught)
            status = 500 if status == _NO_ANSWER else status
            raise
        finally:
            self._observer.request(scope, status, time.perf_counter() - begun)
