"""The four parts of a cold load alone, with as many threads, on the same file: read, hash, pack, copy; and a peer."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from threading import local
from typing import Any

import numpy as np
import torch
from benchmarks.cache_common import Bench, repeated, summary

from adapterd.loader.base_model import BaseSpec
from adapterd.loader.checks import examine_path
from adapterd.loader.image import PackedImage
from adapterd.loader.parallel import for_each
from adapterd.loader.placing import MOST_TURNED, placings
from adapterd.loader.planning import plan_layout
from adapterd.loader.trust.chunks import CHUNK_BYTES

THREADS = 8
PARTS = ("read", "hash", "pack", "copy")
WORKS = (*PARTS, "unverified")


class ColdParts:
    """Work on one package in `folder`."""

    def __init__(self, bench: Bench, folder: Path, base: BaseSpec) -> None:
        manifest = examine_path(folder, base).manifest
        assert manifest is not None
        self._bench, self._path = bench, folder / "adapter_model.safetensors"
        self._size = self._path.stat().st_size
        self._manifest = manifest
        self._layout = plan_layout(manifest, "BF16", bench.page_bytes)
        self._file = self._pinned(self._size)  # the file's bytes
        self._image = self._pinned(self._layout.nbytes)
        self._target = torch.empty(self._layout.nbytes, dtype=torch.uint8, device=bench.device)
        self._chunks = -(-self._size // CHUNK_BYTES)
        self._read()

    def _pinned(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=self._bench.cuda)

    def measure(self) -> dict[str, Any]:
        """Microseconds of each, and of the peer."""
        rounds = self._bench.pick(21, 3)
        found: dict[str, Any] = {}
        for name, work in zip(WORKS, (self._read, self._hash, self._pack, self._copy, self._unverified), strict=True):
            repeated(work, 2, self._bench.synchronize)
            found[name] = summary(repeated(work, rounds, self._bench.synchronize))
        found["bytes"], found["image_bytes"], found["threads"] = self._size, self._layout.nbytes, THREADS
        return found

    def _span(self, index: int) -> tuple[int, int]:
        return index * CHUNK_BYTES, min((index + 1) * CHUNK_BYTES, self._size)

    def _read(self) -> None:
        memory = self._file.numpy().data
        descriptor = os.open(self._path, os.O_RDONLY)

        def one(index: int) -> None:
            begin, end = self._span(index)
            while begin < end:
                begin += os.preadv(descriptor, [memory[begin:end]], begin)

        try:
            for_each(self._chunks, one, THREADS)
        finally:
            os.close(descriptor)

    def _hash(self) -> None:
        memory = self._file.numpy().data

        def one(index: int) -> None:
            begin, end = self._span(index)
            hashlib.sha256(memory[begin:end]).digest()

        for_each(self._chunks, one, THREADS)

    def _pack(self) -> None:
        """Bytes from the file's in memory to their places in the image, and every B turned there; nothing is read or
        hashed."""
        file = self._file.numpy()
        places = placings(self._manifest, self._layout, PackedImage(self._layout, self._image.numpy().data))
        spares = local()

        def one(index: int) -> None:
            place, done = places[index], places[index].tensor.begin
            for part in place.landing(0, place.tensor.nbytes):
                np.frombuffer(part, np.uint8)[:] = file[done : done + len(part)]
                done += len(part)
            if place.is_b:
                if not hasattr(spares, "memory"):
                    spares.memory = np.empty(2 * MOST_TURNED, np.uint8).data
                place.turn(spares.memory)

        for_each(len(places), one, THREADS)

    def _copy(self) -> None:
        self._target.copy_(self._image, non_blocking=True)

    def _unverified(self) -> None:
        from safetensors.torch import load_file

        load_file(self._path, device=self._bench.device)
