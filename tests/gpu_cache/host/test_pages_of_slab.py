from __future__ import annotations

import random

import pytest

from adapterd.gpu_cache.host.pages import SlabPages


def test_one_run_is_preferred_and_scattered_pages_serve_otherwise() -> None:
    slab = SlabPages(8)
    assert slab.take(3) == (0, 1, 2)
    assert slab.take(3) == (3, 4, 5)
    slab.give_back((0, 1, 2))
    assert slab.take(2) == (0, 1)
    assert slab.take(3) == (2, 6, 7)
    assert slab.take(1) is None
    assert slab.free == 0


def test_random_use_keeps_the_books() -> None:
    slab, chosen = SlabPages(20), random.Random(1)
    held: list[tuple[int, ...]] = []
    for _ in range(500):
        if held and chosen.random() < 0.5:
            slab.give_back(held.pop(chosen.randrange(len(held))))
            continue
        wanted = chosen.randint(1, 6)
        free = 20 - sum(map(len, held))
        pages = slab.take(wanted)
        assert (pages is None) == (wanted > free)
        if pages is not None:
            held.append(pages)
        everything = [page for taken in held for page in taken]
        assert len(set(everything)) == len(everything)
        assert slab.free == 20 - len(everything)


def test_a_page_is_not_freed_twice() -> None:
    slab = SlabPages(2)
    slab.take(1)
    slab.give_back((0,))
    with pytest.raises(AssertionError, match="free already"):
        slab.give_back((0,))
