"""How much of the base an adapter adapts: its linears by their last names, and their weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from adapterd.loader.base_model import BaseSpec
from adapterd.loader.checks.fit import SERVED, head_paths


@dataclass(frozen=True, slots=True)
class Kind:
    """All linears of one last name, such as `q_proj`: how many there are, and how many are adapted."""

    name: str
    adapted: int
    of: int

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, "adapted": self.adapted, "of": self.of}


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a base that is adapted; embeddings and the output head, which are not served, do not count.

    Attributes:
        kinds: sorted by name.
        weights: of the adapted linears, as a part of all linears' weights, 0 to 1.
    """

    kinds: tuple[Kind, ...]
    weights: float

    @property
    def adapted(self) -> int:
        return sum(kind.adapted for kind in self.kinds)

    @property
    def linears(self) -> int:
        return sum(kind.of for kind in self.kinds)

    def as_json(self) -> dict[str, Any]:
        kinds = [kind.as_json() for kind in self.kinds]
        return {"adapted": self.adapted, "linears": self.linears, "weights": round(self.weights, 6), "kinds": kinds}


def share_of(adapted: Iterable[str], base: BaseSpec) -> Share:
    """`adapted`: paths of the base's own modules, as a manifest has them."""
    heads, chosen = head_paths(base), set(adapted)
    linears = [m for m in base.modules if m.kind in SERVED and m.path not in heads]
    every = Counter(m.path.rpartition(".")[2] for m in linears)
    mine = Counter(m.path.rpartition(".")[2] for m in linears if m.path in chosen)
    whole = sum(m.in_features * m.out_features for m in linears)
    part = sum(m.in_features * m.out_features for m in linears if m.path in chosen)
    kinds = tuple(Kind(name, mine[name], every[name]) for name in sorted(every))
    return Share(kinds, part / whole if whole else 0.0)
