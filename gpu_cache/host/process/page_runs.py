"""Pages of a slab as runs, in bytes: reading them costs the engine's process the same for one run and for hundreds.

4 bytes   first page of a run, little-endian
4 bytes   how many pages
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import chain
from operator import add

import numpy as np

from adapterd.gpu_cache.host.process.frames import Garbled

_CELL = np.dtype("<i4")
RUN_BYTES = 2 * _CELL.itemsize


def runs_of(pages: Sequence[int]) -> bytes:
    """In the order of `pages`."""
    every = np.array(pages, _CELL)
    begins = np.flatnonzero(np.diff(every, prepend=every[:1] - 2) != 1)
    lengths = np.diff(begins, append=len(every))
    return np.stack((every[begins], lengths), axis=1).astype(_CELL).tobytes()


def pages_of(runs: bytes, wanted: int, most: int) -> tuple[int, ...]:
    """The `wanted` pages that `runs_of` has written, of a slab of `most`. Raises Garbled for anything else.

    Python that runs beside decode: no loop of its own, and no library that one run would have to warm up.
    """
    if not runs or len(runs) % RUN_BYTES:
        raise Garbled(f"{len(runs)} bytes are no runs of pages")
    cells = struct.unpack(f"<{len(runs) // _CELL.itemsize}i", runs)
    firsts, lengths = cells[::2], cells[1::2]
    ends = list(map(add, firsts, lengths))
    if min(firsts) < 0 or min(lengths) < 1 or max(ends) > most:
        raise Garbled("an image lies outside of the slab")
    if sum(lengths) != wanted:
        raise Garbled("an image is not as large as its layout")
    return tuple(chain.from_iterable(map(range, firsts, ends)))
