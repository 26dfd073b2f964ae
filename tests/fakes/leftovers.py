"""What this process has open, to be compared before and after."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

SLAB = "adapterd-slab"


def threads_and_files() -> tuple[set[threading.Thread], int]:
    """Without the slabs, which are there as long as somebody refers to them."""
    names = []
    for link in list(Path("/proc/self/fd").iterdir()):
        try:
            names.append(str(link.readlink()))
        except FileNotFoundError:
            continue  # it was that of the listing
    return set(threading.enumerate()), sum(SLAB not in name for name in names)


def mapped_slabs() -> set[str]:
    """Loaders' slabs that this process has mapped, by their address."""
    gc.collect()
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.partition(" ")[0] for line in lines if SLAB in line}
