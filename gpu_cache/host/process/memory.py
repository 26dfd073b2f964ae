"""How much memory the machine, or the container around this process, has left."""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("proc/meminfo")
_GROUPS = (
    (Path("sys/fs/cgroup/memory.max"), Path("sys/fs/cgroup/memory.current")),
    (Path("sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("sys/fs/cgroup/memory/memory.usage_in_bytes")),
)
"""(limit, use) of the container, as cgroups v2 and v1 show them inside of it."""


def available_bytes(root: Path = Path("/")) -> int | None:
    """The least that any of them says; None where nothing can be read."""
    found = [
        *_of_machine(root / _MEMINFO),
        *(left for most, used in _GROUPS for left in _left(root / most, root / used)),
    ]
    return min(found, default=None)


def _of_machine(meminfo: Path) -> list[int]:
    try:
        lines = meminfo.read_text().splitlines()
        return [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    except (OSError, ValueError, IndexError):
        return []


def _left(most: Path, used: Path) -> list[int]:
    try:
        return [max(0, int(most.read_text()) - int(used.read_text()))]
    except (OSError, ValueError):  # `max`: no limit
        return []
