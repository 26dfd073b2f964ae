"""One pass over a tensor file: each stretch of it is read once, and hashed and measured from the same memory.

So the bytes that are checked are the bytes that are hashed. A digest takes a file's bytes in order and keeps one thread
busy; pairs are measured in any order, by whoever has nothing to hash. No thread waits while there is work, and no
more than a few stretches are in memory, whatever the file's size. Pairs that lie in no stretch are read again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from adapterd.loader.checks.pairs import Pair
from adapterd.loader.checks.stretches import Stretch, cut
from adapterd.loader.effect import Measured, Source
from adapterd.loader.formats.files import FileReader, read_into

HELD_BYTES = 32 << 20
"""Of all stretches that are in memory at a time."""

FEWEST, MOST = 2, 4
"""Stretches in memory: one is hashed while one is measured, and one or two wait."""

Job = Callable[[], None]


@dataclass(slots=True)
class Held:
    """A stretch in memory, a `Source` for what lies in it; `users` have not done with it.

    Attributes:
        memory: what it lies in, and more.
    """

    stretch: Stretch
    memory: memoryview
    users: int

    @property
    def data(self) -> memoryview:
        return self.memory[: self.stretch.nbytes]

    def read_at(self, offset: int, length: int) -> memoryview:
        begin = offset - self.stretch.begin
        return self.memory[begin : begin + length]


class OnePass:
    """The work on one file, for any number of threads: each calls `work`, and when all have returned all is done."""

    def __init__(
        self,
        reader: FileReader,
        pairs: Sequence[Pair],
        measure: Callable[[Source, Pair], Measured],
        digest: Callable[[memoryview], None] | None,
    ) -> None:
        """`digest` gets all bytes of the file, in order, from one thread at a time; None: nothing but pairs is read."""
        every, apart = cut(reader.size, pairs)
        self._measured: dict[int, Measured] = {}
        self._reader, self._pairs, self._measure, self._digest = reader, pairs, measure, digest
        self._unread = deque(s for s in every if digest or s.pairs)
        self._undigested: deque[Held] = deque()
        self._unmeasured: deque[Held] = deque()
        self._apart = deque(apart)
        self._memories = _memories(max((s.nbytes for s in self._unread), default=0))
        self._jobs = 0
        self._reading = self._digesting = self._failed = False
        self._changed = threading.Condition()

    def work(self) -> None:
        """Do what nobody else does until nothing is left, or a thread has failed. Raises what a job raised."""
        while (job := self._next()) is not None:
            failed = True
            try:
                job()
                failed = False
            finally:
                with self._changed:
                    self._jobs -= 1
                    self._failed |= failed
                    self._changed.notify_all()

    def results(self) -> tuple[Measured, ...]:
        """What came out, in the order of the pairs, once all is done."""
        return tuple(self._measured[number] for number in range(len(self._pairs)))

    def _next(self) -> Job | None:
        with self._changed:
            while not self._failed:
                job = self._choose()
                if job is not None:
                    self._jobs += 1
                    return job
                if not self._jobs:
                    break
                self._changed.wait()
            return None

    def _choose(self) -> Job | None:
        """What others wait for comes first: the digest, bytes for it, then what keeps memory from being free."""
        if self._undigested and not self._digesting:
            self._digesting = True
            return partial(self._take, self._undigested.popleft())
        if self._readable() and not self._undigested:
            return self._start_reading()
        if self._unmeasured:
            return partial(self._measure_held, self._unmeasured.popleft())
        if self._readable():
            return self._start_reading()
        return partial(self._measure_one, self._reader, self._apart.popleft()) if self._apart else None

    def _readable(self) -> bool:
        """In the order of the file, so one at a time."""
        return bool(self._unread and self._memories) and not self._reading

    def _start_reading(self) -> Job:
        self._reading = True
        return partial(self._read, self._unread.popleft(), self._memories.pop())

    def _read(self, stretch: Stretch, memory: memoryview) -> None:
        held = Held(stretch, memory, bool(self._digest) + bool(stretch.pairs))
        read_into(self._reader, stretch.begin, held.data)
        with self._changed:
            self._reading = False
            if self._digest:
                self._undigested.append(held)
            if stretch.pairs:
                self._unmeasured.append(held)

    def _take(self, held: Held) -> None:
        assert self._digest
        self._digest(held.data)
        with self._changed:
            self._digesting = False
            self._let_go(held)

    def _measure_held(self, held: Held) -> None:
        for number in held.stretch.pairs:
            self._measure_one(held, number)
        with self._changed:
            self._let_go(held)

    def _measure_one(self, source: Source, number: int) -> None:
        self._measured[number] = self._measure(source, self._pairs[number])

    def _let_go(self, held: Held) -> None:
        held.users -= 1
        if not held.users:
            self._memories.append(held.memory)


def _memories(nbytes: int) -> list[memoryview]:
    """Room for as many stretches of that size as may be in memory; none of it is touched before it is read into."""
    count = min(max(HELD_BYTES // max(nbytes, 1), FEWEST), MOST)
    return [np.empty(nbytes, np.uint8).data for _ in range(count)]
