"""What all workers of one loader process share."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from adapterd.gpu_cache.host.host_cache import HostCache
from adapterd.gpu_cache.host.process.frames import Garbled
from adapterd.gpu_cache.host.process.trust_watch import TrustWatch
from adapterd.loader.base_model import BaseSpec
from adapterd.loader.errors import AdapterdError
from adapterd.loader.identity import BasePin

MAX_BASES = 64


class Bases:
    """Module tables that workers have brought, by pin: the second rank of a model need not bring its own."""

    def __init__(self) -> None:
        self._known: OrderedDict[BasePin, BaseSpec] = OrderedDict()
        self._served: Counter[BasePin] = Counter()

    def get(self, pin: BasePin) -> BaseSpec | None:
        return self._known.get(pin)

    def enter(self, pin: BasePin) -> None:
        """One more worker serves it."""
        self._served[pin] += 1

    def leave(self, pin: BasePin) -> bool:
        """One worker less; whether that was the last."""
        self._served[pin] -= 1
        if self._served[pin]:
            return False
        del self._served[pin]
        return True

    def add(self, table: bytes) -> BaseSpec:
        """Raises Garbled."""
        try:
            base = BaseSpec.from_json(json.loads(table))
        except (ValueError, RecursionError, AdapterdError) as e:
            raise Garbled(f"no table of a base model: {e}") from e
        self._known[base.pin] = base
        if len(self._known) > MAX_BASES:
            self._known.popitem(last=False)
        return base


@dataclass(frozen=True, slots=True)
class House:
    """What all sessions of a loader share.

    Attributes:
        host_for: the host, which is made with the first base that somebody brings.
        source: digest of the source's identity.
        watch: of the trust file.
        slab_bytes, page_bytes: of the slab.
    """

    host_for: Callable[[BaseSpec], HostCache]
    source: str
    watch: TrustWatch
    slab_bytes: int
    page_bytes: int
    bases: Bases

    @property
    def trust(self) -> str:
        """Digest of what is trusted."""
        return self.watch.store.digest
