"""A base model as it is listed."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from adapterd.loader.identity import BasePin


@dataclass(frozen=True, slots=True)
class BaseModelInfo:
    """One registered base model.

    Attributes:
        pin: its identity.
        modules: in its table.
        created_at: when it was registered.
        alternatives: names of its alternative tables.
        weights_digest: of its weights, if somebody asked for it.
    """

    pin: BasePin
    modules: int
    created_at: datetime
    alternatives: tuple[str, ...] = ()
    weights_digest: str | None = None
