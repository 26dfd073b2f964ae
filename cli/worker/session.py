"""From options to a running worker, and from its ending to a report."""

from __future__ import annotations

import errno
import importlib.util
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from adapterd.cli.boundary import EXIT_BROKEN_PIPE
from adapterd.cli.connection import load_trust, open_source
from adapterd.cli.output import EXIT_INTERRUPTED, EXIT_OK, Report, note
from adapterd.loader.errors import Code, error

if TYPE_CHECKING:
    from torch import nn

    from adapterd.cli.worker.forward import FlatModel
    from adapterd.cli.worker.inbox import Inbox
    from adapterd.cli.worker.loop import ServingLoop
    from adapterd.gpu_cache import AdapterCache
    from adapterd.loader.base_model import BaseSpec
    from adapterd.loader.sources import FolderSource, RegistrySource
    from adapterd.loader.trust.policy import TrustStore

LoaderKind = Literal["thread", "process"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line says; sizes are bytes. None is the environment's or the model's own."""

    model: str
    device: str
    vram: int
    host: int
    loader: LoaderKind
    max_rows: int
    kv_blocks: int
    prefix_blocks: int
    source: str | None = None
    trust: Path | None = None
    base: str | None = None
    store: Path | None = None
    store_key: Path | None = None
    store_bytes: int | None = None
    loader_socket: Path | None = None
    socket: Path | None = None
    metrics_port: int | None = None
    graphs: bool = True


def run_worker(options: Options) -> Report:
    """Serves stdin until it ends, or a signal.

    Raises:
        AdapterdError: SETTINGS_INVALID, PATH_NOT_FOUND, DEVICE_ERROR, BASE_TABLE_INVALID, TRUST_NOT_CONFIGURED,
            TRUST_FILE_INVALID, UNAUTHENTICATED, LOADER_UNAVAILABLE; CONFLICT and PORT_IN_USE for socket and port.
            Nothing is read from stdin then.
    """
    _need_extras()
    from adapterd.cli.worker.collector import seldom_collected
    from adapterd.cli.worker.loop import ServingLoop
    from adapterd.cli.worker.models import load_model
    from adapterd.cli.worker.prefix import PrefixCache
    from adapterd.cli.worker.rows import ROW_BUCKETS
    from adapterd.cli.worker.selected import Selected
    from adapterd.gpu_cache import Lease
    from adapterd.gpu_cache.engine import LoRAEngine
    from adapterd.gpu_cache.step_budget import StepBudget, StepLimits

    trust = load_trust(options.trust)
    limits = StepLimits(
        kv_blocks=options.kv_blocks, rows=options.max_rows, adapter_bytes=options.vram, load_slots=1,
        load_bytes=options.vram,
    )  # fmt: skip
    with ExitStack() as stack:
        source = _source(options.source)
        stack.enter_context(source)
        loaded = load_model(options.model, options.device)
        base = base_of(options, loaded.model)
        flat = _flat(options, loaded.model)
        stack.callback(flat.close)
        cache = stack.enter_context(_cache(options, base, source, trust))
        engine: LoRAEngine[Lease | None] = stack.enter_context(LoRAEngine(loaded.model, cache))
        engine.warm_up({*ROW_BUCKETS, options.max_rows})
        loop = stack.enter_context(
            ServingLoop(
                flat, engine, cache, max_rows=options.max_rows,
                scheduler=Selected(StepBudget(limits), residency=cache.residency),
                prefix=PrefixCache(options.prefix_blocks),
            )
        )  # fmt: skip
        for place in _doors(options, cache, lambda: engine.table_bytes, stack):
            note(f"==> worker: {place}")
        stack.enter_context(seldom_collected())
        note(f"==> worker: serving {base.id}@{base.revision} on {options.device}, requests as JSON lines on stdin")
        status = _serve(loop, loaded.text, loaded.stop)
        return _report(loop, cache, status)


def _flat(options: Options, model: nn.Module) -> FlatModel:
    from adapterd.cli.worker.forward import FlatModel
    from adapterd.cli.worker.graphs import runner_for

    runner = runner_for(next(model.parameters()).device, graphs=options.graphs)
    return FlatModel(model, kv_blocks=options.kv_blocks, runner=runner)


def base_of(options: Options, model: nn.Module) -> BaseSpec:
    """What adapters must have been admitted for: a table file, or the live model's table under ID@REVISION.

    Raises Failed: SETTINGS_INVALID if nothing is named, REF_INVALID, BASE_TABLE_INVALID.
    """
    from adapterd.cli.inputs import split_pinned
    from adapterd.cli.worker.models import TINY, TINY_ID, TINY_REVISION
    from adapterd.loader.base_model import BaseSpec

    if options.base is None:
        if options.model != TINY:
            raise error(
                Code.SETTINGS_INVALID, "--base", "a model directory does not say which base model it is",
                "Give ID@REVISION as registered, or the file of `adapterctl base export`.",
            )  # fmt: skip
        return BaseSpec.from_module(model, id=TINY_ID, revision=TINY_REVISION)
    if Path(options.base).is_file():
        return BaseSpec.load(Path(options.base))
    name, revision = split_pinned(options.base)
    return BaseSpec.from_module(model, id=name, revision=revision)


def _need_extras() -> None:
    missing = [m for m in ("torch", "transformers") if importlib.util.find_spec(m) is None]
    if missing:
        raise error(
            Code.SETTINGS_INVALID, "worker", f"{' and '.join(missing)} must be installed",
            "Install adapterd[worker,transformers].",
        )  # fmt: skip


def _source(named: str | None) -> FolderSource | RegistrySource:
    from adapterd.loader.sources import FolderSource

    if named is None or named.startswith(("http://", "https://")):
        return open_source(named)
    if not Path(named).is_dir():
        raise error(
            Code.PATH_NOT_FOUND, named, "there is no such folder",
            "A source is a registry's URL or a folder of versions, as `adapterctl pull` writes it.",
        )  # fmt: skip
    return FolderSource(named)


def _cache(options: Options, base: BaseSpec, source: FolderSource | RegistrySource, trust: TrustStore) -> AdapterCache:
    from adapterd.gpu_cache import AdapterCache, CacheConfig

    config = CacheConfig(
        device=options.device, vram_bytes=options.vram, host_bytes=options.host,
        loader=options.loader, loader_socket=options.loader_socket,
        store=options.store, store_key=options.store_key, store_bytes=options.store_bytes,
    )  # fmt: skip
    return AdapterCache(config, base=base, source=source, trust=trust)


def _doors(options: Options, cache: AdapterCache, table_bytes: Callable[[], int], stack: ExitStack) -> list[str]:
    """Opens what was asked for beside stdin, for operators and routers. Says where."""
    if options.socket is None:
        if options.metrics_port is not None:
            raise error(Code.SETTINGS_INVALID, "--metrics-port", "needs --socket", "Name a socket's path, too.")
        return []
    from adapterd.gpu_cache.daemon import Daemon

    daemon = stack.enter_context(
        Daemon(cache, options.socket, metrics_port=options.metrics_port, table_bytes=table_bytes)
    )
    told = [f"the cache's socket is {daemon.path}"]
    return told if daemon.metrics_url is None else [*told, f"metrics are at {daemon.metrics_url}"]


def _serve(loop: ServingLoop, text: object, stop: frozenset[int]) -> int:
    """Until stdin ends or a signal comes, and all that is open has ended. Returns the exit status."""
    from adapterd.cli.worker.clients import LineClient
    from adapterd.cli.worker.inbox import Inbox
    from adapterd.cli.worker.stdin import LineReader

    inbox = Inbox()
    client = LineClient(inbox, sys.stdout, text, stop)  # type: ignore[arg-type]
    with _signals(inbox) as ending, LineReader(sys.stdin.fileno(), client.on_line, client.on_end):
        inbox.serve(loop)
    if client.lost is not None:
        if client.lost.errno == errno.EPIPE:
            return EXIT_BROKEN_PIPE
        raise OSError(client.lost.errno, client.lost.strerror, "stdout")
    return EXIT_INTERRUPTED if ending == [signal.SIGINT] else EXIT_OK


@contextmanager
def _signals(inbox: Inbox) -> Iterator[list[int]]:
    """The first SIGINT or SIGTERM drains, the second one ends what is open. Yields the first one's number.

    A third one ends the process: the loop may be held up for good by a client that does not read its answers.
    """
    from adapterd.cli.worker.loop import ServingLoop

    seen: list[int] = []

    def handle(number: int, _frame: object) -> None:
        if seen:
            for each in (signal.SIGINT, signal.SIGTERM):
                signal.signal(each, signal.SIG_DFL)
            inbox.put(ServingLoop.close)
            return
        seen.append(number)
        note("==> worker: taking no more requests, finishing what is open; once more to end at once")
        inbox.put(ServingLoop.drain)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _report(loop: ServingLoop, cache: AdapterCache, status: int) -> Report:
    served, held = loop.statistics(), cache.statistics()
    ended = {reason.value: count for reason, count in sorted(served.ended.items())}
    told = ", ".join(f"{count} {reason}" for reason, count in ended.items()) or "no request"
    note(f"==> worker: {told}; {served.rows} rows in {served.steps} steps, {served.prefix_tokens} from prefixes")
    adapters = {"hits": held.hits, "host_hits": held.host_hits, "misses": held.misses, "leaked": held.leaked_leases}
    body = {
        "ended": ended, "steps": served.steps, "rows": served.rows, "prefix_tokens": served.prefix_tokens,
        "adapters": adapters, "graphs": asdict(served.graphs),
    }  # fmt: skip
    return Report(body, status=status)
