"""Python's collector of cycles, kept out of the steps.

It comes after so many objects more than have gone, 700 by default, and follows all that the young ones refer to: the
token lists of all requests that are new by then, while rows that decode wait. The loop makes no cycles, and as many
objects go as come. So a number that such a loop never reaches keeps the collector away, and cycles that others make are
collected all the same, more of them at once.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG_OBJECTS = 50_000
"""So many objects more than have gone: ten thousand open requests may come at once without it."""


@contextmanager
def seldom_collected() -> Iterator[None]:
    """To be entered once all is loaded: what is there by then is not looked at any more.

    What somebody else had put aside before, such as a process that this one was forked from, stays so.
    """
    before, *older = gc.get_threshold()
    aside = gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    gc.set_threshold(max(before, YOUNG_OBJECTS) if before else 0, *older)
    try:
        yield
    finally:
        gc.set_threshold(before, *older)
        if not aside:
            gc.unfreeze()
