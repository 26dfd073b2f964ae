"""A short churn of the cache under NVIDIA's `compute-sanitizer`, if it is on this machine.

    python -m benchmarks.cache_sanitizer [--tool memcheck] [--rows 20000]

Exit status 0: clean; 1: not clean; 3: there is none here, or none for this device. The default, memcheck, looks
for accesses outside of memory. `racecheck` sees hazards in the shared memory of kernels, and the cache has no kernel
of its own: it is worth running once the engine has. Races of copies and kernels are what
`tests/gpu/test_cache_churn.py` looks for.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

TOOL = "compute-sanitizer"
PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/opt/cuda/bin")
NOT_HERE = 3


def find_tool() -> str | None:
    """From PATH, or from CUDA's folder."""
    homes = [str(Path(os.environ[name]) / "bin") for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    return shutil.which(TOOL) or shutil.which(TOOL, path=os.pathsep.join([*homes, *PLACES]))


def churn(rows: int) -> int:
    """For the child: what the tool watches."""
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
        outcome = Churn(cache, versions, active=6, ahead=4, cycles=20_000).run(rows)
    device.close()
    print(outcome, flush=True)
    return int(outcome.wrong > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", default="memcheck", choices=("memcheck", "racecheck", "initcheck", "synccheck"))
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--timeout", type=float, default=240, help="seconds")
    parser.add_argument("--api-errors", default="explicit", choices=("explicit", "no", "all"), help="those to report")
    parser.add_argument("--child", action="store_true", help="the churn alone, without the tool")
    asked = parser.parse_args()
    if asked.child:
        return churn(asked.rows)
    tool = find_tool()
    if tool is None:
        print(f"{TOOL} is not on this machine: neither on PATH nor in CUDA's folder")
        return NOT_HERE
    command = [tool, "--tool", asked.tool, "--error-exitcode", "1", "--print-limit", "20"]
    command += ["--report-api-errors", asked.api_errors]
    command += [sys.executable, "-m", "benchmarks.cache_sanitizer", "--child", "--rows", str(asked.rows)]
    # Memory that torch keeps in pools of its own would hide accesses beyond a tensor.
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=asked.timeout, check=False)
    except subprocess.TimeoutExpired:
        print(f"{TOOL} was not done after {asked.timeout:.0f} s")
        return 1
    print("\n".join((done.stdout + done.stderr).strip().splitlines()[-30:]))
    if "Device not supported" in done.stdout + done.stderr:
        print(f"{TOOL} cannot watch this device")
        return NOT_HERE
    print(f"{TOOL} {asked.tool}: {'clean' if done.returncode == 0 else f'status {done.returncode}'}")
    return int(done.returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
