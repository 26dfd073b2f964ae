"""Metrics by HTTP on loopback, for a Prometheus that knows no Unix sockets. One request at a time."""

from __future__ import annotations

import threading
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import make_wsgi_app

from adapterd.gpu_cache.host.process.forks import keep_from_children
from adapterd.loader.errors import Code, error

LOOPBACK = "127.0.0.1"
REQUEST_SECONDS = 5.0
"""For each read and write of a request."""


class MetricsServer:
    """Serves from when it is made until `close`.

    Raises:
        Failed: PORT_IN_USE.
    """

    def __init__(self, registry: CollectorRegistry, port: int) -> None:
        try:
            self._server = make_server(LOOPBACK, port, make_wsgi_app(registry), _Server, _Handler)
        except (OSError, OverflowError) as cause:
            raise error(
                Code.PORT_IN_USE, f"{LOOPBACK}:{port}", f"metrics cannot be served there: {cause}",
                "Choose another metrics_port; 0 takes a free one.",
            ) from cause  # fmt: skip
        keep_from_children(self._server.socket)
        self._thread = threading.Thread(target=self._server.serve_forever, name="adapterd-metrics", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self._server.server_port}/metrics"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(WSGIServer):
    def server_bind(self) -> None:
        """As of its base, without asking the network what this machine is called."""
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = LOOPBACK, self.server_address[1]
        self.setup_environ()

    def handle_error(self, *_: Any) -> None:
        """A client that went away, or that is too slow, is nobody's trouble but its own."""


class _Handler(WSGIRequestHandler):
    timeout = REQUEST_SECONDS

    def log_message(self, *_: Any) -> None:
        """A scrape is no news."""
