"""From the cache's own list to what the selector wants to know."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from adapterd.gpu_cache import Place
from adapterd.gpu_cache.whereabouts import Whereabouts, whereabouts


@dataclass(frozen=True)
class Row:
    tenant: str
    digest: str
    tier: str
    bytes: int
    leases: int = 0


def test_each_version_is_where_the_cache_says_and_on_the_way_if_somebody_holds_a_lease_on_it() -> None:
    rows = [
        Row("acme", "a", "resident", 10, 1),
        Row("acme", "b", "staging", 20, 1),
        Row("acme", "c", "host", 30),
        Row("acme", "d", "host", 40, 2),
        Row("blue", "a", "absent", 50, 1),
        Row("blue", "b", "absent", 60),
    ]
    assert whereabouts(rows) == {
        ("acme", "a"): Whereabouts(Place.RESIDENT, 10),
        ("acme", "b"): Whereabouts(Place.STAGING, 20),
        ("acme", "c"): Whereabouts(Place.HOST, 30),
        ("acme", "d"): Whereabouts(Place.STAGING, 40),
        ("blue", "a"): Whereabouts(Place.STAGING, 50),
        ("blue", "b"): Whereabouts(Place.ABSENT, 60),
    }


def test_a_tier_that_nobody_knows_is_an_error() -> None:
    with pytest.raises(ValueError, match="orbit"):
        whereabouts([Row("acme", "a", "orbit", 1)])
