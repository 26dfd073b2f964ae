"""Time that stands still until a test moves it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta


class FakeClock:
    """A `Clock` of the registry: call it for the time, `advance` it."""

    def __init__(self, now: datetime = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)) -> None:
        self.now = now

    def __call__(self) -> datetime:
        return self.now

    def advance(self, **by: float) -> None:
        """By a `timedelta`'s keywords: `advance(days=1)`."""
        self.now += timedelta(**by)
