"""A base model as it is listed."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from adapterd.loader.identity import BasePin


@dataclass(frozen=True, slots=True)
class BaseModelInfo:
    """One registered base model and the number of modules in its table."""

    pin: BasePin
    modules: int
    created_at: datetime
