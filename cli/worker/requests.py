"""What a caller asks of the worker, and what the worker answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from adapterd.loader.errors import AdapterdError, Problem
from adapterd.loader.identity import Ref

Wish = str | tuple[tuple[str, float], ...] | None
"""A REF, a composition as (REF, weight), or None for the base."""


def names_of(wish: Wish, tenant: str) -> frozenset[str] | None:
    """The tenant's adapters that it names; None if it names what cannot be had."""
    refs = (wish,) if isinstance(wish, str) else [ref for ref, _ in wish or ()]
    try:
        parsed = [Ref.parse(ref) for ref in refs]
    except AdapterdError:
        return None
    return frozenset(ref.name for ref in parsed) if all(ref.tenant == tenant for ref in parsed) else None


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate.

    Attributes:
        id: of the caller's choice, unique among open requests.
        tenant: who asks; a REF of another tenant is not found.
        wish: the adapter, the composition, or the base.
        prompt: token ids, at least one.
        max_tokens: how many to generate at most, at least one.
        temperature: 0 is greedy; otherwise the softmax is sharpened or flattened by it.
        seed: of the sampling. Equal seeds, prompts and adapters give equal tokens, whatever else is in the batch.
        stop: token ids that end the answer; the one that ends it is still part of it.
    """

    id: str
    tenant: str
    wish: Wish
    prompt: Sequence[int]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    stop: frozenset[int] = frozenset()


class Reason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token; `index` counts from 0."""

    id: str
    index: int
    token: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The last event of a request.

    Attributes:
        tokens: how many were generated.
        problems: why it failed; empty otherwise.
        applied: (version digest, weight) of what its rows got, as the lease had it; empty for the base, and for
            a request that never ran.
    """

    id: str
    reason: Reason
    tokens: int
    problems: tuple[Problem, ...] = ()
    applied: tuple[tuple[str, float], ...] = ()


Event = Token | Ended
Sink = Callable[[Event], None]
"""Called on the loop's thread, in order. What it raises ends its request, and then goes to the loop's caller."""
