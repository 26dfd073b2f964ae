"""A source that hangs when it is asked for a statement, until the test lets it go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager

from adapterd.loader.identity import Ref
from adapterd.loader.sources import Resolved, Source

from .devices import Barrier


class HangingSource:
    """Source; everything else is the inner one's."""

    def __init__(self, inner: Source) -> None:
        self._inner, self.barrier = inner, Barrier()

    def resolve(self, ref: Ref, tenant: str) -> Resolved:
        return self._inner.resolve(ref, tenant)

    def statement(self, version: Resolved) -> bytes:
        self.barrier.stop()
        return self._inner.statement(version)

    def signature(self, version: Resolved) -> bytes | None:
        return self._inner.signature(version)

    def read(self, version: Resolved, path: str, offset: int = 0) -> AbstractContextManager[Iterator[bytes]]:
        return self._inner.read(version, path, offset)

    def close(self) -> None:
        self._inner.close()
