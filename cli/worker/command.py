"""`adapterctl worker`, as the shell sees it."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from adapterd.cli.boundary import command
from adapterd.cli.inputs import parse_size
from adapterd.cli.output import Report


class Loader(StrEnum):
    """Where downloads, checks and packing run."""

    THREAD = "thread"
    PROCESS = "process"


# What each option is, in the order of `--help`.
Model = Annotated[str, typer.Option(help="Local model directory, or `tiny` for a small random Llama.")]
Source = Annotated[str | None, typer.Option(help="Registry URL, or folder of versions; by default ADAPTERD_URL.")]
Trust = Annotated[Path | None, typer.Option(help="Trust file; by default ADAPTERD_TRUST.", show_default=False)]
Base = Annotated[str | None, typer.Option(help="ID@REVISION of the model, or its table file. `tiny` has its own.")]
Device = Annotated[str, typer.Option(help="cpu, or cuda:0 and so on.")]
Vram = Annotated[str, typer.Option(help="Adapters in device memory, such as 8GiB.")]
Host = Annotated[str, typer.Option(help="Adapters in host memory, such as 32GiB.")]
LoaderOption = Annotated[Loader, typer.Option(help="Where downloads and checks run.")]
Store = Annotated[
    Path | None, typer.Option(help="Folder of verified versions; else a temporary one.", show_default=False)
]
StoreKey = Annotated[
    Path | None,
    typer.Option(help="Key file under which the store keeps packed forms, too; made if missing.", show_default=False),
]
StoreBytes = Annotated[
    str | None, typer.Option(help="The most that the store may take, such as 100GiB.", show_default=False)
]
LoaderSocket = Annotated[
    Path | None, typer.Option(help="Share the loader process of this socket with other workers.", show_default=False)
]
Socket = Annotated[
    Path | None,
    typer.Option(help="Where `adapterctl cache` reaches this worker; by default nowhere.", show_default=False),
]
MetricsPort = Annotated[
    int | None,
    typer.Option(min=0, max=65535, help="Metrics by HTTP on 127.0.0.1; 0 takes a free port.", show_default=False),
]
MaxRows = Annotated[int, typer.Option(min=1, help="Token rows of one step, at most.")]
KvBlocks = Annotated[
    int, typer.Option(min=1, help="Blocks of 16 tokens of keys and values that requests hold, at most.")
]
PrefixBlocks = Annotated[int, typer.Option(min=0, help="Blocks of 16 tokens that the prefix cache keeps, at most.")]
NoGraphs = Annotated[
    bool, typer.Option("--no-graphs", help="On CUDA, launch every step's kernels one by one, without CUDA graphs.")
]


def register(app: typer.Typer) -> None:
    """Put the command on `app`."""
    command(app, "worker")(worker)


def worker(
    *,
    model: Model,
    source: Source = None,
    trust: Trust = None,
    base: Base = None,
    device: Device = "cpu",
    vram: Vram = "256MiB",
    host: Host = "256MiB",
    loader: LoaderOption = Loader.THREAD,
    store: Store = None,
    store_key: StoreKey = None,
    store_bytes: StoreBytes = None,
    loader_socket: LoaderSocket = None,
    socket: Socket = None,
    metrics_port: MetricsPort = None,
    max_rows: MaxRows = 512,
    kv_blocks: KvBlocks = 4096,
    prefix_blocks: PrefixBlocks = 1024,
    no_graphs: NoGraphs = False,
) -> Report:
    """Serve requests from stdin, tokens to stdout, both as JSON lines (docs/worker.md)."""
    sizes = {name: parse_size(text, name) for name, text in (("--vram", vram), ("--host", host))}
    from adapterd.cli.worker.session import Options, run_worker

    return run_worker(
        Options(
            model=model, source=source, trust=trust, base=base, device=device, vram=sizes["--vram"],
            host=sizes["--host"], loader=loader.value, store=store, store_key=store_key,
            store_bytes=None if store_bytes is None else parse_size(store_bytes, "--store-bytes"),
            loader_socket=loader_socket, max_rows=max_rows, kv_blocks=kv_blocks, prefix_blocks=prefix_blocks,
            socket=socket, metrics_port=metrics_port, graphs=not no_graphs,
        )
    )  # fmt: skip
