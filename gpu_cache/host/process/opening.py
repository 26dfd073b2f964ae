"""The client that a cache's configuration asks for, with a loader of its own or one that workers share."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from adapterd.gpu_cache.config import CacheConfig
from adapterd.gpu_cache.host.process.client import HostClient
from adapterd.gpu_cache.host.process.settings import LoaderSettings, settings_of
from adapterd.gpu_cache.host.process.sockets import MAX_PATH_BYTES, check_path
from adapterd.gpu_cache.host.process.spawn import Starter
from adapterd.gpu_cache.host.process.worker_trust import WorkerTrust
from adapterd.loader.base_model import BaseSpec
from adapterd.loader.scratch import PREFIX, scratch_folder
from adapterd.loader.sources.interface import Source
from adapterd.loader.trust.policy import TrustStore

SOCKET = "loader.sock"
TRUST = "trust.json"
STORE = "store"


@contextmanager
def open_client(
    config: CacheConfig, source: Source | None, trust: TrustStore | None, base: BaseSpec
) -> Iterator[HostClient]:
    """A client that is closed with the context; the source is the loader's to ask, not this process's.

    Without `config.loader_socket` the loader is this worker's own: it trusts what `trust` says at every moment,
    and goes with the context or with this process. With it, workers share whichever loader serves the socket. One
    is started if none does, and if `trust` was read from a file: that is the file that the loader reads, too.

    Raises:
        ValueError: no source or no trust store.
        AdapterdError: as `HostClient`; SETTINGS_INVALID for a source that another process cannot be told of.
    """
    if source is None or trust is None:
        raise ValueError("a cache needs a source and a trust store, or a host")
    told = settings_of(source)
    with ExitStack() as cleanup:
        own = config.loader_socket is None
        path = Path(config.loader_socket or _folder(cleanup) / SOCKET).absolute()
        check_path(path)
        trust_file = path.with_name(TRUST) if own else trust.path
        starter = None
        if trust_file is not None:
            settings = LoaderSettings(
                source=told,
                trust=trust_file.absolute(),
                store=config.store or (path.with_name(STORE) if own else None),
                store_bytes=config.store_bytes,
                store_key=None if config.store_key is None else config.store_key.absolute(),
                slab_bytes=config.host_bytes,
                page_bytes=config.page_bytes,
                threads=config.loader_threads,
                tenants=dict(config.tenants),
                default_budget=config.default_budget,
                limits=config.limits,
                keep_host=config.keep_host,
                recheck=config.recheck,
                close_seconds=config.close_seconds,
                remove_folder=own,
            )
            starter = Starter(settings, path)
        client = HostClient(
            path,
            base=base,
            dtype=config.dtype,
            sharding=config.sharding,
            page_bytes=config.page_bytes,
            source=told.identity,
            trust=WorkerTrust(trust, trust_file if own else None),
            starter=starter,
            shared=not own,
        )
        try:
            yield client
        finally:
            # Its loader gets as long for the loads that run there.
            client.close(2 * config.close_seconds + 1)


def _folder(cleanup: ExitStack) -> Path:
    """One that nobody else may enter. The loader takes it away at its end; what both leave when they are killed is
    swept by the next one.

    Paths of sockets are short: where the temporary folder's is too long, /tmp will do.
    """
    folder = Path(tempfile.gettempdir())
    long = len(os.fsencode(folder / f"{PREFIX}loader-12345678" / SOCKET)) > MAX_PATH_BYTES
    return cleanup.enter_context(scratch_folder("loader", Path("/tmp") if long else folder))  # noqa: S108
