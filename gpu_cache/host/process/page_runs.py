"""Pages of a slab as runs, in bytes: reading them costs the engine's process the same for one run and for hundreds.

4 bytes   first page of a run, little-endian
4 bytes   how many pages
"""

from __future__ import annotations

from collections.abc import Sequence

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
    """The `wanted` pages that `runs_of` has written, of a slab of `most`. Raises Garbled for anything else."""
    if not runs or len(runs) % RUN_BYTES:
        raise Garbled(f"{len(runs)} bytes are no runs of pages")
    firsts, lengths = np.frombuffer(runs, _CELL).astype(np.int64).reshape(-1, 2).T
    if firsts.min() < 0 or lengths.min() < 1 or (firsts + lengths).max() > most:
        raise Garbled("an image lies outside of the slab")
    if lengths.sum() != wanted:
        raise Garbled("an image is not as large as its layout")
    before = np.cumsum(lengths) - lengths
    return tuple((np.repeat(firsts - before, lengths) + np.arange(wanted)).tolist())
