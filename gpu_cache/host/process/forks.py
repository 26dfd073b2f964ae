"""What a forked child of this process must not have: it would speak for its parent, and outlive it.

A socket or a lock ends with the last process that has it open. A child that was forked (a data loader's, say) has all
of them, and so a worker that is killed would not be seen to be gone as long as a child of its lives: its loader would
stay, what it held would stay held, and its socket would stay taken. `subprocess` closes them by itself.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Closable(Protocol):
    def close(self) -> object: ...


_ours: weakref.WeakSet[Closable] = weakref.WeakSet()


def keep_from_children(*held: Closable) -> None:
    """Closes them in every child that is forked from now on, as long as they are open here."""
    for each in held:
        _ours.add(each)


def _in_child() -> None:
    for each in list(_ours):
        each.close()
    _ours.clear()


os.register_at_fork(after_in_child=_in_child)
