"""Work in a process of its own, with its time and its peak memory."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """What a process took.

    Attributes:
        peak_bytes: largest resident memory, the interpreter's own included.
        said: what it wrote to stdout.
    """

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    status: int
    said: str


def command(words: Sequence[str], env: dict[str, str] | None = None) -> Cost:
    """Run this interpreter with `words`; bytecode is kept, as for what is installed."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    began = time.perf_counter()
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen([sys.executable, *words], stdout=out, env={**kept, **(env or {})})
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        took = time.perf_counter() - began
        out.seek(0)
        said = out.read().decode()
    cpu = usage.ru_utime + usage.ru_stime
    return Cost(took, cpu, usage.ru_maxrss * 1024, process.returncode, said)


def forked(work: Callable[[], str]) -> Cost:
    """Run `work` in a fork of this process; `peak_bytes` counts what this process has already, too."""
    began = time.perf_counter()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.write(write, work().encode()[:4000])
            status = 0
        except BaseException:  # noqa: BLE001 - a child must never return into the parent's code
            traceback.print_exc()
        os._exit(status)
    os.close(write)
    _, status, usage = os.wait4(pid, 0)
    took = time.perf_counter() - began
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read().decode()
    cpu = usage.ru_utime + usage.ru_stime
    return Cost(took, cpu, usage.ru_maxrss * 1024, os.waitstatus_to_exitcode(status), said)
