"""PEFT's rules for which modules an adapter covers, and with which rank and alpha.

Sources: `check_target_module_exists` in peft/tuners/tuners_utils.py, `get_pattern_key` in
peft/utils/other.py and `_create_and_replace` in peft/tuners/lora/model.py, peft 0.21.2.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from adapterd.loader.formats.config_values import LAYER_TEMPLATE
from adapterd.loader.formats.pattern_table import PatternTable, dotted_suffixes
from adapterd.loader.formats.peft_config import PeftConfig
from adapterd.loader.formats.regex import Matcher, compile_part, compile_target

# Which number in a name is its layer, where no layers_pattern says so.
ANY_LAYER = re.compile(r".*?\.[^.]*\.(?P<idx>\d+)\.")


@dataclass(frozen=True, slots=True)
class NameSet:
    """A list of names (exact, or a suffix at a dot) or a regex (the whole name)."""

    names: frozenset[str]
    pattern: Matcher | None

    @classmethod
    def of(cls, value: Sequence[str] | str, where: str) -> Self:
        """Raises Refused, see `regex.compile_target`."""
        if isinstance(value, str):
            return cls(frozenset(), compile_target(value, where))
        return cls(frozenset(value), None)

    def matching(self, name: str) -> frozenset[str]:
        """The listed names that cover `name`."""
        return self.names.intersection(dotted_suffixes(name))

    def covers(self, name: str) -> bool:
        if self.pattern is not None:
            return self.pattern.fullmatch(name)
        return bool(self.matching(name))


class Targets:
    """Which modules the config says the adapter covers.

    With `all_linear`, `covers` answers for exclusions only: the caller adds that the module is an nn.Linear
    or Conv1D and not the model's output embedding.
    """

    def __init__(self, config: PeftConfig) -> None:
        """Raises Refused (CONFIG_UNSAFE_REGEX, CONFIG_BAD_VALUE); not for a config from `parse_config`."""
        self.all_linear = config.all_linear
        self._targets = NameSet.of(() if self.all_linear else config.target_modules, "target_modules")
        self._excluded = NameSet.of(config.exclude_modules, "exclude_modules")
        self._layers = None if config.layers_to_transform is None else frozenset(config.layers_to_transform)
        self._layer_patterns: list[Any] = [
            compile_part(p, LAYER_TEMPLATE, "layers_pattern", captures=True) for p in config.layers_pattern
        ] or [ANY_LAYER]

    def covers(self, module: str) -> bool:
        """Whether PEFT would adapt `module` (its full name in the base)."""
        if self._excluded.covers(module):
            return False
        if self.all_linear:
            return True
        # An exact name is taken whatever its layer: PEFT looks at layers_to_transform for suffixes only.
        if module in self._targets.names:
            return True
        return self._targets.covers(module) and self._layer_wanted(module)

    def entries_for(self, module: str) -> frozenset[str]:
        """The entries of a `target_modules` list that take `module`; empty where none does, or a regex."""
        return self._targets.matching(module) if self.covers(module) else frozenset()

    @property
    def entries(self) -> frozenset[str]:
        """All entries of a `target_modules` list."""
        return self._targets.names

    def _layer_wanted(self, module: str) -> bool:
        if self._layers is None:
            return True
        for pattern in self._layer_patterns:
            found = pattern.match(module)
            if found is not None:
                return int(found.group("idx")) in self._layers
        return False


@dataclass(frozen=True, slots=True)
class Scale:
    """Rank and alpha of one module, and the pattern keys that gave them (None: `r` and `lora_alpha`)."""

    rank: int
    alpha: float
    rank_key: str | None
    alpha_key: str | None


class Scales:
    """Rank and alpha per module, as PEFT resolves them."""

    def __init__(self, config: PeftConfig) -> None:
        self._config = config
        self._ranks: Mapping[str, int] = dict(config.rank_pattern)
        self._alphas: Mapping[str, float] = dict(config.alpha_pattern)
        self._rank_table = PatternTable(list(self._ranks), "rank_pattern")
        self._alpha_table = PatternTable(list(self._alphas), "alpha_pattern")

    def of(self, module: str) -> Scale:
        """For the module's full name in the base. Raises Refused, see `PatternTable.first`."""
        rank_key, alpha_key = self._rank_table.first(module), self._alpha_table.first(module)
        rank = self._config.r if rank_key is None else self._ranks[rank_key]
        alpha = self._config.lora_alpha if alpha_key is None else self._alphas[alpha_key]
        return Scale(rank, alpha, rank_key, alpha_key)


def scaling(alpha: float, rank: int, *, use_rslora: bool) -> float:
    """alpha/r, or alpha/sqrt(r) with rank-stabilised LoRA (https://arxiv.org/abs/2312.03732)."""
    return alpha / math.sqrt(rank) if use_rslora else alpha / rank
