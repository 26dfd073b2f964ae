"""The requests that are open, by state, and what their callers are to be told.

Everything about a request may end it, at any moment, and its caller may do anything when it is told, such as ending
another one. So nothing is told while something is under way: events are put down in order, and `tell` hands them out
when the books are straight. Whoever changes many requests goes by their state of the moment.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from adapterd.cli.worker.generation import Generation, State
from adapterd.cli.worker.prefix import PrefixCache
from adapterd.cli.worker.requests import Ended, Event, Reason
from adapterd.loader.errors import Code, Problem, error


class Roll:
    """Open requests. For one thread.

    Attributes:
        ended: requests by reason, since the start.

    Args:
        prefix: where keys and values go that may serve others.
    """

    def __init__(self, prefix: PrefixCache) -> None:
        self.ended: Counter[Reason] = Counter()
        self._prefix = prefix
        self._open: dict[str, Generation] = {}
        self._by_state: dict[State, list[Generation]] = {}
        self._untold: deque[tuple[Generation, Event]] = deque()
        self._telling = False

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, name: object) -> bool:
        return name in self._open

    @property
    def all(self) -> Sequence[Generation]:
        """In order of arrival; a copy."""
        return list(self._open.values())

    @property
    def telling(self) -> bool:
        """Whether a caller is being told something now."""
        return self._telling

    def find(self, name: str) -> Generation:
        """Raises NotFound if no such request is open."""
        found = self._open.get(name)
        if found is None:
            raise error(Code.NOT_FOUND, name[:160], "no such request is open")
        return found

    def of(self, state: State) -> Sequence[Generation]:
        """Those in this state, in order of arrival. It stays as it is when one of them leaves the state."""
        found = self._by_state.get(state)
        if found is None:
            found = self._by_state[state] = [each for each in self._open.values() if each.state is state]
        return found

    def add(self, each: Generation) -> None:
        self._open[each.id] = each
        self._by_state.pop(each.state, None)

    def move(self, each: Generation, state: State) -> None:
        """Into another state."""
        self._by_state.pop(each.state, None)
        self._by_state.pop(state, None)
        each.state = state

    # Ends

    def end(self, each: Generation, reason: Reason, problems: tuple[Problem, ...] = ()) -> None:
        """The only way out. Does nothing the second time."""
        if each.state is State.ENDED:
            return
        if reason is not Reason.FAILED:
            self.remember(each)
        self.move(each, State.ENDED)
        del self._open[each.id]
        self.ended[reason] += 1
        try:
            each.free()
        finally:
            self.put(each, Ended(each.id, reason, each.generated, problems, each.applied))

    def fail(self, each: Generation, problems: tuple[Problem, ...]) -> None:
        self.end(each, Reason.FAILED, problems)

    def remember(self, each: Generation) -> None:
        """Into the prefix cache, but nothing of a forward that is under way: it may fail, or be unsound.

        It is only a cache: where there is no memory for it, it is emptied.
        """
        if not each.landed:
            return
        try:
            self._prefix.keep(each.prefix_key, each.known[: each.landed], each.kv)
        except RuntimeError:
            self._prefix.clear()

    # What callers hear

    def put(self, each: Generation, event: Event) -> None:
        """To be told with the next `tell`."""
        self._untold.append((each, event))

    def tell(self) -> None:
        """Tells all that is to be told, in order, and what comes up meanwhile. A caller's own call does nothing.

        Raises what a caller's sink has raised, the first of them, once all are told. It ends that request.
        """
        if self._telling:
            return
        faults: list[Exception] = []
        self._telling = True
        try:
            while self._untold:
                each, event = self._untold.popleft()
                try:
                    each.sink(event)
                except Exception as fault:  # noqa: BLE001 - the caller's; raised once the books are in order
                    faults.append(fault)
                    self.end(each, Reason.CANCELLED)
        finally:
            self._telling = False
        if faults:
            raise faults[0]
