"""Who runs next: the one place to put another scheduler in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from adapterd.loader.errors import Problem


class Candidate(Protocol):
    """What a scheduler sees of a request."""

    @property
    def id(self) -> str: ...

    @property
    def tenant(self) -> str: ...

    @property
    def arrival(self) -> int:
        """Requests are counted as they come, and keep their number when they are paused."""
        ...

    @property
    def started(self) -> bool:
        """Whether it holds keys and values."""
        ...

    @property
    def pending(self) -> int:
        """Rows that it could run now: the rest of the prompt, or 1; 0 while its very last token is under way."""
        ...

    @property
    def most_tokens(self) -> int:
        """Keys and values that it may come to need."""
        ...

    @property
    def adapter_bytes(self) -> Mapping[str, int]:
        """Bytes in VRAM by version digest, in the composition's order; empty for the base, and before it is ready."""
        ...

    @property
    def names(self) -> frozenset[str] | None:
        """Its tenant's adapters that it asks for, by name; None if they cannot be had."""
        ...


C = TypeVar("C", bound=Candidate)


@dataclass(frozen=True, slots=True)
class Choice(Generic[C]):
    """One step.

    Attributes:
        run: requests in row order, and how many rows each runs, 1 to `pending`.
        refused: those that can never run, and why.
    """

    run: Sequence[tuple[C, int]]
    refused: Sequence[tuple[C, Problem]] = ()


class Scheduler(Protocol):
    """Looked at before every step; it picks, and changes nothing about a request."""

    def admit(self, waiting: Sequence[C], idle: Sequence[C]) -> Sequence[C]:
        """Which requests may ask the cache for their adapter now. The base's are not asked about: they wait for none.

        Args:
            waiting: in order of arrival; not empty.
            idle: others that have asked and have not started.
        """
        ...

    def choose(self, ready: Sequence[C], max_rows: int) -> Choice[C]:
        """The next step.

        Args:
            ready: those that have what they need to run, in order of arrival; not empty.
            max_rows: of the step.
        """
        ...


@dataclass(frozen=True, slots=True)
class FirstComeFirstServed:
    """In order of arrival. A request that has started keeps its seat until it ends or is paused.

    Attributes:
        seats: requests that run at once. One whose last token is under way has left its seat.
        ahead: requests that have asked for their adapter and have not started; more would only fill VRAM.
    """

    seats: int = 16
    ahead: int = 16

    def admit(self, waiting: Sequence[C], idle: Sequence[C]) -> Sequence[C]:
        """See `Scheduler`."""
        return waiting[: max(self.ahead - len(idle), 0)]

    def choose(self, ready: Sequence[C], max_rows: int) -> Choice[C]:
        """See `Scheduler`. Who decodes comes before who has a prompt to run, so that one prompt stalls nobody."""
        decoding: list[tuple[C, int]] = []
        prompts: list[C] = []
        waiting: list[C] = []
        for each in ready:
            if not each.started:
                waiting.append(each)
            elif each.pending == 1:
                decoding.append((each, 1))
            elif each.pending:
                prompts.append(each)
        seats = max(self.seats - len(decoding) - len(prompts), 0)
        chosen, left = decoding[:max_rows], max_rows - len(decoding)
        for each in sorted([*prompts, *waiting[:seats]], key=lambda c: (c.pending > 1, c.arrival)):
            if left > 0:
                chosen.append((each, min(each.pending, left)))
                left -= chosen[-1][1]
        return Choice(chosen)
