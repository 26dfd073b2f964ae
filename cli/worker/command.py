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


def register(app: typer.Typer) -> None:
    """Put the command on `app`."""
    command(app, "worker")(worker)


def worker(
    *,
    model: Annotated[str, typer.Option(help="Local model directory, or `tiny` for a small random Llama.")],
    source: Annotated[
        str | None, typer.Option(help="Registry URL, or folder of versions; by default ADAPTERD_URL.")
    ] = None,
    trust: Annotated[
        Path | None, typer.Option(help="Trust file; by default ADAPTERD_TRUST.", show_default=False)
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="ID@REVISION of the model, or its table file. `tiny` has its own.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, or cuda:0 and so on.")] = "cpu",
    vram: Annotated[str, typer.Option(help="Adapters in device memory, such as 8GiB.")] = "256MiB",
    host: Annotated[str, typer.Option(help="Adapters in host memory, such as 32GiB.")] = "256MiB",
    loader: Annotated[Loader, typer.Option(help="Where downloads and checks run.")] = Loader.THREAD,
    store: Annotated[
        Path | None, typer.Option(help="Folder of verified versions; else a temporary one.", show_default=False)
    ] = None,
    store_key: Annotated[
        Path | None,
        typer.Option(
            help="Key file under which the store keeps packed forms, too; made if missing.", show_default=False
        ),
    ] = None,
    store_bytes: Annotated[
        str | None, typer.Option(help="The most that the store may take, such as 100GiB.", show_default=False)
    ] = None,
    loader_socket: Annotated[
        Path | None,
        typer.Option(help="Share the loader process of this socket with other workers.", show_default=False),
    ] = None,
    socket: Annotated[
        Path | None,
        typer.Option(help="Where `adapterctl cache` reaches this worker; by default nowhere.", show_default=False),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Metrics by HTTP on 127.0.0.1; 0 takes a free port.", show_default=False),
    ] = None,
    max_rows: Annotated[int, typer.Option(min=1, help="Token rows of one step, at most.")] = 512,
    kv_blocks: Annotated[
        int, typer.Option(min=1, help="Blocks of 16 tokens of keys and values that requests hold, at most.")
    ] = 4096,
    prefix_blocks: Annotated[
        int, typer.Option(min=0, help="Blocks of 16 tokens that the prefix cache keeps, at most.")
    ] = 1024,
    no_graphs: Annotated[
        bool, typer.Option("--no-graphs", help="On CUDA, launch every step's kernels one by one, without CUDA graphs.")
    ] = False,
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
