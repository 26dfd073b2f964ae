"""Compositions: what one row gets. Asked for by REFs and weights, normalised to versions and weights.

The rule stands in ARCHITECTURE.md, Vocabulary.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from adapterd.loader.errors import Code, error
from adapterd.loader.identity import BasePin, Ref, VersionKey
from adapterd.loader.manifest import Manifest

PREFIX_TYPE = b"adapterd.prefix/1"

MOST_WEIGHT = (2 - 2**-23) * 2.0**127
"""The largest float32 (IEEE 754): kernels read weights as such."""

Wish = str | Sequence[tuple[str, float]] | None
"""What `acquire` takes: a REF, a list of (REF, weight), or None for the base."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One component as the caller named it. `weight` is finite."""

    ref: Ref
    weight: float


@dataclass(frozen=True, slots=True)
class Component:
    """One component of a normalised composition. `weight` is finite and not zero."""

    key: VersionKey
    weight: float


def parse_wish(wish: Wish, max_components: int) -> tuple[Asked, ...]:
    """Raises Failed: REF_INVALID, COMPOSITION_INVALID."""
    if wish is None:
        return ()
    if isinstance(wish, str):
        return (Asked(Ref.parse(wish), 1.0),)
    if len(wish) > max_components:
        raise error(
            Code.COMPOSITION_INVALID,
            "composition",
            f"{len(wish)} components, at most {max_components} are served",
        )
    return tuple(Asked(Ref.parse(ref), _finite(ref, weight)) for ref, weight in wish)


def normalise(parts: Iterable[tuple[VersionKey, float]]) -> tuple[Component, ...]:
    """Equal versions summed (exactly, so that the order asked does not matter), zero weights dropped, by digest.

    Raises Failed (COMPOSITION_INVALID) if a sum is not finite.
    """
    weights: dict[VersionKey, list[float]] = {}
    for key, weight in parts:
        weights.setdefault(key, []).append(weight)
    summed = [(key, _sum(key, each)) for key, each in weights.items()]
    return tuple(Component(key, w) for key, w in sorted(summed, key=lambda kw: kw[0].digest) if w != 0.0)


def total_rank(manifests: Iterable[Manifest]) -> int:
    """The largest rank that any module gets from all of them together."""
    ranks: dict[str, int] = {}
    for manifest in manifests:
        for module in manifest.modules:
            ranks[module.name] = ranks.get(module.name, 0) + module.rank
    return max(ranks.values(), default=0)


def prefix_key(tenant: str, base: BasePin, components: Sequence[Component]) -> bytes:
    """The bytes that a prefix or KV cache may use as this lease's part of its key (I11).

    Each field is preceded by its length (8 bytes, big-endian); weights are IEEE 754 doubles in hex. Equal
    keys mean equal outputs; no field is of the caller's making but the tenant, which the worker knows.
    """
    fields = [
        PREFIX_TYPE,
        tenant.encode(),
        base.id.encode(),
        base.revision.encode(),
        base.module_table_digest.encode(),
    ]
    for component in components:
        fields += [component.key.digest.encode(), struct.pack(">d", component.weight).hex().encode()]
    return b"".join(struct.pack(">Q", len(field)) + field for field in fields)


def _finite(ref: str, weight: float) -> float:
    if isinstance(weight, int | float) and not isinstance(weight, bool) and abs(weight) <= MOST_WEIGHT:
        return float(weight)
    raise error(Code.COMPOSITION_INVALID, str(ref)[:160], f"weight {weight!r:.60} is no finite float32")


def _sum(key: VersionKey, weights: Sequence[float]) -> float:
    try:
        total = math.fsum(weights)
    except OverflowError:
        total = math.inf
    if abs(total) <= MOST_WEIGHT:
        return total
    raise error(
        Code.COMPOSITION_INVALID,
        f"sha256:{key.digest}",
        "the weights of this version do not sum to a finite float32",
    )
