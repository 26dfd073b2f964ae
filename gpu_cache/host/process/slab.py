"""The slab that a loader process shares: anonymous memory with a descriptor, which workers map read-only.

It can neither shrink nor grow, so that no reader of a mapping ever finds its page gone (SIGBUS), and once the
loader has mapped it nobody else can map it for writing.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from dataclasses import dataclass
from typing import Self

from adapterd.gpu_cache.host.process.memory import available_bytes
from adapterd.loader.errors import AdapterdError, Code, error

F_SEAL_FUTURE_WRITE = 0x0010
"""linux/fcntl.h, since 5.1; `fcntl` has no name for it. The mappings that are there already may be written to."""
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL


@dataclass(frozen=True, slots=True, eq=False)
class SharedSlab:
    """Slab. Its memory lives until the last that refers to it is gone: an image keeps its slab.

    Attributes:
        memory: all of it; writable for the loader that made it, read-only for a worker.
        page_bytes: of a page.
    """

    memory: memoryview
    page_bytes: int

    @classmethod
    def mapped(cls, descriptor: int, nbytes: int, page_bytes: int) -> Self:
        """A worker's view of a loader's slab; the caller closes the descriptor.

        Raises Unavailable (LOADER_UNAVAILABLE) unless it is a slab of that size that stays as it is.
        """
        try:
            held = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            if os.fstat(descriptor).st_size != nbytes or SEALS & ~held:
                raise _no_slab("the descriptor is no sealed slab of the size it was announced with")
            return cls(memoryview(mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED, mmap.PROT_READ)), page_bytes)
        except (OSError, ValueError) as cause:
            raise _no_slab(f"the slab cannot be mapped: {cause}") from cause


class OwnedSlab:
    """A loader's slab: made whole, and given away by its descriptor.

    Raises:
        Unavailable: STORAGE_FULL if the machine does not have the memory.
    """

    def __init__(self, nbytes: int, page_bytes: int) -> None:
        available = available_bytes()
        # Asked first: beyond it the kernel does not refuse, but ends processes, and seldom the right one.
        if available is not None and nbytes > available:
            raise _no_memory(nbytes, f"{available} are available")
        self.nbytes = nbytes
        self.descriptor = os.memfd_create("adapterd-slab", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, nbytes)
            # Takes every page now: memory that is not there is an error here, and no SIGBUS while packing.
            os.posix_fallocate(self.descriptor, 0, nbytes)
            memory = mmap.mmap(self.descriptor, nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, SEALS)
        except OSError as cause:
            os.close(self.descriptor)
            raise _no_memory(nbytes, str(cause.strerror)) from cause
        self.slab = SharedSlab(memoryview(memory), page_bytes)

    def close(self) -> None:
        """Gives the descriptor back. The memory goes when nothing refers to it any more. Idempotent."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _no_slab(message: str) -> AdapterdError:
    return error(Code.LOADER_UNAVAILABLE, "slab", message, "Worker and loader must be of one version of adapterd.")


def _no_memory(nbytes: int, why: str) -> AdapterdError:
    message = f"cannot have {nbytes} bytes of shared memory: {why}"
    return error(Code.STORAGE_FULL, "host_bytes", message, "Lower host_bytes.")
