"""`python -m adapterd.gpu_cache.host.process`: one loader process, for all workers of this user on this machine."""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from adapterd.gpu_cache.host.host_cache import HostCache
from adapterd.gpu_cache.host.loading import StoreLoader
from adapterd.gpu_cache.host.pool import FairPool
from adapterd.gpu_cache.host.process.house import Bases, House
from adapterd.gpu_cache.host.process.server import LoaderServer
from adapterd.gpu_cache.host.process.settings import MAX_SETTINGS_BYTES, LoaderSettings
from adapterd.gpu_cache.host.process.slab import OwnedSlab
from adapterd.gpu_cache.host.process.sockets import Listener
from adapterd.gpu_cache.host.process.trust_watch import TrustWatch
from adapterd.loader.base_model import BaseSpec
from adapterd.loader.errors import AdapterdError, Code, error
from adapterd.loader.parallel import Helpers, default_threads
from adapterd.loader.scratch import scratch_folder, shared_folder
from adapterd.loader.store import VerifiedStore
from adapterd.loader.store_key import StoreKey

_LOG = logging.getLogger("adapterd.loader_process")


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0 after SIGTERM or when nobody wants it any more, else that of the problem."""
    options = _parser().parse_args(arguments)
    # On the stderr of a worker that started it, what is no news of the worker's would only disturb.
    level = logging.INFO if options.starter_fd is None else logging.WARNING
    logging.basicConfig(level=level, format="%(asctime)s adapterd loader: %(levelname)s %(message)s")
    # Its connection per request is no news.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    starter = None if options.starter_fd is None else socket.socket(fileno=options.starter_fd)
    try:
        with ExitStack() as cleanup:
            settings = _settings(options.config)
            _serve(settings, options.socket.absolute(), starter, keep=options.keep, cleanup=cleanup)
    except AdapterdError as failure:
        _say(starter, {"problems": [problem.as_json() for problem in failure.problems]})
        _LOG.error("%s", failure)
        return failure.exit_status
    return 0


def _serve(
    settings: LoaderSettings, path: Path, starter: socket.socket | None, *, keep: bool, cleanup: ExitStack
) -> None:
    """The composition of a loader process. The socket comes first: a second loader must not take a second slab."""
    if settings.remove_folder:
        cleanup.enter_context(shared_folder(path.parent))
        cleanup.callback(shutil.rmtree, path.parent, ignore_errors=True)
    listener = Listener(path)
    cleanup.callback(listener.close)
    watch = TrustWatch(settings.trust, time.monotonic)
    source = settings.source.open()
    cleanup.callback(source.close)
    store = _store(settings, watch, cleanup)
    slab = OwnedSlab(settings.pages * settings.page_bytes, settings.page_bytes)
    cleanup.callback(slab.close)
    loader = StoreLoader(source, store, page_bytes=settings.page_bytes, recheck=settings.recheck)
    hosts = _Hosts(settings, slab, loader)
    cleanup.callback(hosts.close)
    house = House(hosts.host_for, settings.source.identity, watch, slab.nbytes, settings.page_bytes, Bases())
    server = LoaderServer(
        listener.socket, house, slab.descriptor, hosts.present, starter=starter, keep=keep, clock=time.monotonic
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.end())
    signal.signal(signal.SIGHUP, lambda *_: server.reread_trust())
    _say(starter, {"ready": True})
    _LOG.info("serving %s with %d pages", path, settings.pages)
    server.run()
    _LOG.info("ends")


class _Hosts:
    """The one host, which needs a base to begin with: that of the first worker."""

    def __init__(self, settings: LoaderSettings, slab: OwnedSlab, loader: StoreLoader) -> None:
        self._settings, self._slab, self._loader = settings, slab, loader
        self._host: HostCache | None = None

    def host_for(self, base: BaseSpec) -> HostCache:
        settings = self._settings
        if self._host is None:
            self._host = HostCache(
                self._slab.slab,
                base,
                loader=self._loader,
                pool=FairPool.of(settings.threads, settings.tenants, settings.default_budget),
                tenants=settings.tenants,
                default_budget=settings.default_budget,
                keep_host=settings.keep_host,
            )
        return self._host

    def present(self) -> HostCache | None:
        return self._host

    def close(self) -> None:
        if self._host is not None:
            self._host.close(self._settings.close_seconds)


def _settings(source: str) -> LoaderSettings:
    try:
        with open(int(source) if source.isdecimal() else source, "rb") as file:  # noqa: PTH123 - or a descriptor
            return LoaderSettings.parse(file.read(MAX_SETTINGS_BYTES + 1), source)
    except OSError as cause:
        raise error(Code.SETTINGS_INVALID, "--config", f"cannot be read: {cause.strerror}") from cause


def _store(settings: LoaderSettings, watch: TrustWatch, cleanup: ExitStack) -> VerifiedStore:
    root = _store_folder(settings, cleanup)
    helpers = Helpers(default_threads() - 1)
    cleanup.callback(helpers.close, settings.close_seconds)
    return VerifiedStore(
        root,
        watch.store,
        settings.limits,
        max_bytes=settings.store_bytes,
        store_key=None if settings.store_key is None else StoreKey.load(settings.store_key, outside=root),
        helpers=helpers,
    )


def _store_folder(settings: LoaderSettings, cleanup: ExitStack) -> Path:
    if settings.store is not None:
        return settings.store
    return cleanup.enter_context(scratch_folder("store"))


def _say(starter: socket.socket | None, what: object) -> None:
    """One line. A starter that is gone by now is noticed by the server."""
    if starter is not None:
        try:
            starter.sendall(json.dumps(what).encode() + b"\n")
        except OSError:
            _LOG.info("who started this loader is gone")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m adapterd.gpu_cache.host.process", description=__doc__)
    parser.add_argument("--config", required=True, metavar="FILE|FD", help="the settings, as JSON")
    parser.add_argument("--socket", required=True, type=Path, metavar="PATH", help="where workers find it")
    parser.add_argument("--keep", action="store_true", help="stay when all workers are gone")
    parser.add_argument("--starter-fd", type=int, metavar="FD", help="a socket; the loader does not outlive its end")
    return parser


if __name__ == "__main__":
    os.umask(0o077)
    sys.exit(main())
