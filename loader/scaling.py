"""The effective scaling of each module: computed once, at admission, and stored (I5).

Rank and alpha come from the config's patterns as PEFT resolves them (`formats.targets`); here is what
they amount to, and whether that is a number to trust.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from adapterd.loader.errors import Code, Problem, warn
from adapterd.loader.formats.peft_config import PeftConfig
from adapterd.loader.formats.targets import Scales, scaling
from adapterd.loader.formats.text import shown

SUSPECT_SCALING = 100.0
"""alpha/r is 0.5 to 2 by habit; 64 is the most in published recipes. Above, a digit too many is likely."""


@dataclass(frozen=True, slots=True)
class Effective:
    """Rank, alpha and scaling of one module. A rank is at least 1, so what fits alpha fits the scaling."""

    rank: int
    alpha: float
    scaling: float


@dataclass(frozen=True, slots=True)
class Scalings:
    """The scalings of an adapter's modules.

    Attributes:
        by_module: one for each module asked for.
        unused: (field, pattern) of the config that gave no module its value.
    """

    by_module: Mapping[str, Effective]
    unused: tuple[tuple[str, str], ...]


def effective(config: PeftConfig, modules: Iterable[str]) -> Scalings:
    """Resolve rank, alpha and scaling for full module paths.

    Raises:
        Refused: CONFIG_UNSAFE_REGEX, CONFIG_BAD_VALUE; not for a config from `parse_config`.
    """
    scales = Scales(config)
    by_module: dict[str, Effective] = {}
    used: set[tuple[str, str | None]] = set()
    for module in modules:
        found = scales.of(module)
        used |= {("rank_pattern", found.rank_key), ("alpha_pattern", found.alpha_key)}
        # 16 and 16.0 are one alpha, in the scaling and in every digest.
        alpha = float(found.alpha)
        factor = scaling(alpha, found.rank, use_rslora=config.use_rslora)
        by_module[module] = Effective(found.rank, alpha, factor)
    keys = [("rank_pattern", k) for k, _ in config.rank_pattern]
    keys += [("alpha_pattern", k) for k, _ in config.alpha_pattern]
    return Scalings(by_module, tuple(key for key in keys if key not in used))


def scaling_problems(scalings: Scalings) -> Iterator[Problem]:
    """Remarks on scalings that nobody means, one a kind, about the first module; and on unused patterns."""
    listed = list(scalings.by_module.items())
    large = [(m, e) for m, e in listed if abs(e.scaling) > SUSPECT_SCALING]
    negative = [(m, e) for m, e in listed if e.scaling < 0]
    if large:
        message = f"{_about(large)} is more than {SUSPECT_SCALING:g}"
        yield warn(Code.SCALE_SUSPECT, "lora_alpha", message, "Is alpha meant to be that large?")
    if negative:
        yield warn(Code.SCALE_SUSPECT, "lora_alpha", f"{_about(negative)} is negative and turns the change around")
    for field, key in scalings.unused:
        message = f"{field} has the pattern '{shown(key, 80)}', which gives no module its value"
        yield warn(Code.CONFIG_TENSOR_DISAGREE, f"{field}.{shown(key, 80)}", message)


def _about(found: list[tuple[str, Effective]]) -> str:
    module, one = found[0]
    more = f" (and of {len(found) - 1} more modules)" if len(found) > 1 else ""
    return f"the scaling {one.scaling:g} of {shown(module)}{more}"
