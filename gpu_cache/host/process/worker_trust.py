"""What a worker trusts, as its loader has to: the digest that it names, and for a loader of its own the file."""

from __future__ import annotations

from pathlib import Path

from adapterd.loader.errors import AdapterdError
from adapterd.loader.trust.policy import TrustStore


class WorkerTrust:
    """The worker's trust store.

    A loader of the worker's own reads `copy`, which follows the worker's store. A shared loader has a trust file;
    if the worker's store says what a file says, too, the file as it is now is what the worker goes by.
    """

    def __init__(self, trust: TrustStore, copy: Path | None) -> None:
        self._trust, self._copy = trust, copy

    @property
    def changes(self) -> int:
        return self._trust.changes

    def digest(self) -> str:
        """What the loader must trust. Raises Unavailable (STORAGE_UNAVAILABLE) if the copy cannot be written."""
        if self._copy is not None:
            shown = TrustStore.from_json(self._trust.as_json())
            self._copy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            shown.save(self._copy)
            return shown.digest
        if self._trust.path is not None:
            try:
                return TrustStore.load(self._trust.path).digest
            except AdapterdError:
                return self._trust.digest
        return self._trust.digest
