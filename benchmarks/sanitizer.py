"""The cache's churn and the engine's kernels under NVIDIA's `compute-sanitizer`, if it is on this machine.

    python -m benchmarks.sanitizer cache [--rows 20000]
    python -m benchmarks.sanitizer kernels [--tool memcheck|racecheck|synccheck]

Exit status 0: clean; 1: not clean; 3: there is none here, or none for this device. memcheck looks for accesses
outside of memory, racecheck for hazards in shared memory: the cache has no kernel of its own, so that one is for the
engine's. initcheck is not offered: `expand` reads lanes of a plane that nobody wrote, and lets none of them through.
Races of copies and kernels are what `tests/gpu/test_cache_churn.py` looks for.

The kernels' steps are shared out among several processes, each under a tool of its own: most of the time goes into
compiling. `--jobs` says how many.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from adapterd.loader.layout import Dtype

TOOL = "compute-sanitizer"
PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/opt/cuda/bin")
NOT_HERE = 3


def find_tool() -> str | None:
    """From PATH, or from CUDA's folder."""
    homes = [str(Path(os.environ[name]) / "bin") for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    return shutil.which(TOOL) or shutil.which(TOOL, path=os.pathsep.join([*homes, *PLACES]))


@dataclass(frozen=True)
class Share:
    """What one process does: `rows` of the churn; of the kernels' steps every `of`th, from `index` on."""

    rows: int
    index: int = 0
    of: int = 1


def churn(share: Share) -> int:
    """Cache: leases, copies, evictions and rows that are compared."""
    import torch
    from benchmarks import cache_common  # noqa: F401 - makes the fakes importable

    from adapterd.gpu_cache import AdapterCache, CacheConfig
    from fakes.adapters import PAGE_BYTES, MemoryLoader
    from fakes.cache_world import host_over
    from fakes.churn import Churn
    from fakes.delayed_cuda import DelayedCuda

    loader = MemoryLoader()
    versions = [loader.publish(f"acme/a{i}", 3) for i in range(40)]
    config = CacheConfig(
        device="cuda:0", vram_bytes=36 * PAGE_BYTES, host_bytes=72 * PAGE_BYTES, page_bytes=PAGE_BYTES
    )  # fmt: skip
    device = DelayedCuda(cycles=20_000)
    host = host_over(loader, config, device)
    with (
        torch.cuda.stream(torch.cuda.Stream()),
        AdapterCache(config, base=loader.base, host=host, device=device) as cache,
    ):
        outcome = Churn(cache, versions, active=6, ahead=4, cycles=20_000).run(share.rows)
    device.close()
    print(outcome, flush=True)
    return int(outcome.wrong > 0)


KernelCase = tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
KERNELS: tuple[KernelCase, ...] = (
    # widths of the parts, ranks of the adapters, adapter of each row: both regimes, whole and ragged tiles
    (576, (130, 33), (1, 5, 24, 64), (3, -1, 0, 1, 2, 2)),
    (576, (130, 33), (1, 5, 24, 64), tuple(i % 5 - 1 for i in range(150))),
    (1024, (512, 256, 256), (16, 64, 128), (2, -1, 0, 1, 1)),
    (1024, (512, 256, 256), (16, 64, 128), tuple(i % 4 - 1 for i in range(150))),
    (1024, (512, 256, 256), (16, 64, 128), tuple(i // 250 for i in range(750))),
)


def kernels(share: Share) -> int:
    """Engine: steps of both regimes, with and without early launch, against float64."""
    steps = list(product(KERNELS, ("BF16", "F16", "F32"), (False, True)))[share.index :: share.of]
    for step in steps:
        _kernel_step(*step)
    print(f"{len(steps)} steps equal float64", flush=True)
    return 0


def _kernel_step(case: KernelCase, adapter: Dtype, pdl: bool) -> None:
    import torch
    from benchmarks import cache_common  # noqa: F401 - makes the fakes importable

    from fakes.one_linear import OneLinear, alone, close

    layers: dict[Dtype, torch.dtype] = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
    width, parts, ranks, owners = case
    world = OneLinear(
        width, parts, [[rank] * len(parts) for rank in ranks], layers[adapter], adapter, "cuda:0",
        page_bytes=1 << 18, n_pages=40, engine_options={"pdl": pdl},
    )  # fmt: skip
    x, y = world.inputs(len(owners))
    got, receipt = world.run(x, y, alone(owners))
    close(got, world.wanted(x, y, alone(owners)))
    if receipt.fallback or not receipt.kernel.startswith("triton:"):
        raise SystemExit(f"not the kernels: {receipt}")


SUBJECTS: Mapping[str, Callable[[Share], int]] = {"cache": churn, "kernels": kernels}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subject", choices=tuple(SUBJECTS))
    parser.add_argument("--tool", default="memcheck", choices=("memcheck", "racecheck", "synccheck"))
    parser.add_argument("--rows", type=int, default=20_000, help="of the cache's churn")
    parser.add_argument("--timeout", type=float, default=240, help="seconds")
    parser.add_argument("--api-errors", default="explicit", choices=("explicit", "no", "all"), help="those to report")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1), help="processes for the kernels")
    parser.add_argument("--child", type=int, nargs=2, metavar=("INDEX", "OF"), help="a share alone, without the tool")
    asked = parser.parse_args()
    if asked.child:
        return SUBJECTS[asked.subject](Share(asked.rows, *asked.child))
    tool = find_tool()
    if tool is None:
        print(f"{TOOL} is not on this machine: neither on PATH nor in CUDA's folder")
        return NOT_HERE
    command = [tool, "--tool", asked.tool, "--error-exitcode", "1", "--print-limit", "20"]
    command += ["--report-api-errors", asked.api_errors]
    command += [sys.executable, "-m", "benchmarks.sanitizer", asked.subject, "--rows", str(asked.rows), "--child"]
    jobs = max(1, asked.jobs) if asked.subject == "kernels" else 1
    began = time.monotonic()
    said, status = watched([[*command, str(index), str(jobs)] for index in range(jobs)], asked.timeout)
    print("\n".join(said))
    if any("Device not supported" in text for text in said):
        print(f"{TOOL} cannot watch this device")
        return NOT_HERE
    seconds = time.monotonic() - began
    told = "clean" if status == 0 else f"status {status}"
    print(f"{TOOL} {asked.subject} {asked.tool}: {told}, {seconds:.0f} s")
    return int(status != 0)


def watched(commands: Sequence[Sequence[str]], timeout: float) -> tuple[list[str], int]:
    """(the last lines of each, the worst status) of processes side by side; what is not done in time has failed."""
    # Memory that torch keeps in pools of its own would hide accesses beyond a tensor.
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    with ThreadPoolExecutor(len(commands)) as threads:
        done = list(threads.map(lambda command: _ran(command, env, timeout), commands))
    return [text for text, _ in done], max(status for _, status in done)


def _ran(command: Sequence[str], env: Mapping[str, str], timeout: float) -> tuple[str, int]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return f"{TOOL} was not done after {timeout:.0f} s", 1
    return "\n".join((done.stdout + done.stderr).strip().splitlines()[-30:]), abs(done.returncode)


if __name__ == "__main__":
    sys.exit(main())
