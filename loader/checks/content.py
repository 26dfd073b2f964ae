"""The bytes themselves: are they the ones that were promised, are they numbers, do they do anything?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from adapterd.loader.checks.findings import several
from adapterd.loader.checks.pairs import Pair
from adapterd.loader.effect import Effect, Measured, NotFinite, Zero, not_finite
from adapterd.loader.errors import Code, Problem, reject, warn
from adapterd.loader.formats.files import FileReader, Package, file_entries
from adapterd.loader.formats.text import shown
from adapterd.loader.identity import FileEntry

HALF_LARGEST = float(np.finfo(np.float16).max)
"""65504: values above do not survive a cast to the narrowest dtype that adapters are served in."""

SINGLE_LARGEST = float(np.finfo(np.float32).max)
"""The engine accumulates in float32: a delta with a norm above this one is infinite there for ordinary inputs."""

SUSPECT_GAIN = 256.0
"""Root mean square of a module's delta for inputs of mean square one. A base's own linears keep the size of what
they get (that is what their initialisation is for), and trained deltas stay below them. Hidden states have single
values some hundred times their root mean square (https://arxiv.org/abs/2402.17762): 256 × 256 is above 65504."""

DROWNING_RATIO = float(np.finfo(np.float16).eps)
"""‖BA‖ below this part of ‖A‖‖B‖ is lost in rounding once A and B are cast to half precision."""


def hash_problems(package: Package, files: Iterable[FileEntry], declared: Mapping[str, str]) -> Iterator[Problem]:
    """Hashes and sizes that were stated, against the bytes.

    Args:
        files: what will be stored; entries that the caller has hashed before are compared by size.
        declared: name → SHA-256 in hex, as the uploader claims it.
    """
    found = {f.path: f for f in files}
    for name, entry in found.items():
        size = package.open(name).size
        if size != entry.size:
            message = f"{size} bytes are there, {entry.size} were hashed"
            yield reject(Code.HASH_MISMATCH, shown(name), message)
    beside = [n for n in package.names() if n in declared and n not in found and not n.endswith("/")]
    found |= {f.path: f for f in file_entries(package, beside)}  # stated, but not stored
    for name, digest in sorted(declared.items()):
        actual = found.get(name)
        if actual is None:
            yield reject(Code.HASH_MISMATCH, shown(name), "a hash is declared for it, but it is not in the package")
        elif actual.sha256 != digest.lower():
            yield hash_mismatch(name, actual.sha256, digest)


def hash_mismatch(name: str, actual: str, declared: str) -> Problem:
    """What the uploader said of a file does not hold."""
    message = f"has SHA-256 {actual}, {shown(declared, 64)} was declared"
    return reject(Code.HASH_MISMATCH, shown(name), message, "The file changed on its way; send it again.")


@dataclass(frozen=True, slots=True)
class Content:
    """What reading the values gave: ‖scaling · B A‖_F by module, and problems."""

    norms: Mapping[str, float]
    problems: tuple[Problem, ...]


def judge_content(reader: FileReader, pairs: Sequence[Pair], measured: Iterable[Measured]) -> Content:
    """What the values of `pairs` say, from what was `measured` of each."""
    effects: dict[str, Effect] = {}
    broken: list[NotFinite] = []
    for pair, found in zip(pairs, measured, strict=True):
        if isinstance(found, NotFinite):
            broken.append(found)
            other = not_finite(reader, pair.b) if found.tensor == pair.a.name else None
            broken += [other] if other is not None else []
        else:
            effects[pair.module] = found
    problems = [*map(_not_finite, broken)] if broken else [*_zero(effects), *_suspect(effects)]
    return Content({module: e.norm for module, e in effects.items()}, tuple(problems))


def _not_finite(found: NotFinite) -> Problem:
    first = f"the first is {found.value} at [{found.row}, {found.column}]"
    message = f"values that are not finite: {found.count}, {first}"
    return reject(Code.NONFINITE, shown(found.tensor), message, "The training diverged, or the file is damaged.")


_NOT_TRAINED = (
    "PEFT starts from a lora_B of zeros, so the file was saved before training, or from another object than was trained"
)
_SAVE_AGAIN = "Save the trained model again with save_pretrained, or take a later checkpoint."
_ALLOWED_BY_NAME = "Meant as it is? Allow it by name: `--allow ZERO_DELTA`."


def _zero(effects: Mapping[str, Effect]) -> Iterator[Problem]:
    causes = {m: e.cause for m, e in sorted(effects.items()) if e.cause is not None}
    zero = list(causes)
    if zero and len(zero) == len(effects):
        yield _all_zero(zero, Counter(causes.values()))
    elif zero:
        group = _group(zero, effects.keys() - set(zero))
        what = f"all {len(zero)} adapted modules {_in(group)}" if group else several(map(shown, zero))
        why = _why(Counter(causes.values()))
        message = f"no effect at all: {what} ({why}); {len(effects) - len(zero)} other modules have one"
        hint = "Was that part frozen, or never reached in training?" if set(causes.values()) == {Zero.B} else ""
        yield warn(Code.ZERO_DELTA, shown(group or zero[0]), message, hint)


def _all_zero(zero: Sequence[str], causes: Mapping[Zero, int]) -> Problem:
    message = f"no effect in all {len(zero)} adapted modules ({_why(causes)}): the adapter does nothing"
    if set(causes) == {Zero.B}:
        hint = f"{_NOT_TRAINED}. {_SAVE_AGAIN} {_ALLOWED_BY_NAME}"
    elif set(causes) == {Zero.SCALING}:
        hint = f"Write the lora_alpha it was trained with into adapter_config.json. {_ALLOWED_BY_NAME}"
    else:
        hint = f"{_SAVE_AGAIN} {_ALLOWED_BY_NAME}"
    return reject(Code.ZERO_DELTA, shown(_group(zero, ()) or zero[0]), message, hint)


def _why(causes: Mapping[Zero, int]) -> str:
    """`lora_B is zero`, or with numbers where there are several reasons."""
    if len(causes) == 1:
        return next(iter(causes)).value
    return ", ".join(f"{cause.value} in {causes[cause]}" for cause in Zero if cause in causes)


def _group(zero: Sequence[str], others: Iterable[str]) -> str:
    """What all of `zero` have in common and none of `others`: a folder (`encoder.`), or the last part of their
    names (`*.v_proj`); empty if there is nothing."""
    if len(zero) < 2:
        return ""
    others = list(others)
    steps = zip(zero[0].split("."), zero[-1].split("."), strict=False)  # sorted: all others lie between
    folder = ".".join(a for a, _ in takewhile(lambda step: step[0] == step[1], steps))
    if folder and not any(f"{other}.".startswith(f"{folder}.") for other in others):
        return folder
    kinds = {name.rpartition(".")[2] for name in zero}
    kind = kinds.pop()
    return "" if kinds or any(other.rpartition(".")[2] == kind for other in others) else f"*.{kind}"


def _in(group: str) -> str:
    return f"called {shown(group[2:])}" if group.startswith("*.") else f"of {shown(group)}"


def _suspect(effects: Mapping[str, Effect]) -> Iterator[Problem]:
    alive = {m: e for m, e in effects.items() if not e.zero}
    large = [m for m, e in alive.items() if e.largest > HALF_LARGEST]
    loud = [m for m, e in alive.items() if e.gain > SUSPECT_GAIN and e.largest <= HALF_LARGEST]
    drowning = [m for m, e in alive.items() if e.ratio < DROWNING_RATIO]
    if large:
        values = f"values up to {alive[large[0]].largest:.3g}"
        message = f"{several(map(shown, large))} hold {values}, float16 ends at 65504"
        yield warn(Code.SCALE_SUSPECT, shown(large[0]), message, "Was the file written with another byte order?")
    if loud:
        yield _loud(loud, alive)
    if drowning:
        where = several(map(shown, drowning))
        message = f"A and B nearly cancel in {where}; in half precision the effect would drown"
        yield warn(Code.SCALE_SUSPECT, shown(drowning[0]), message, "Serve it in float32.")


def _loud(loud: Sequence[str], effects: Mapping[str, Effect]) -> Problem:
    """Factors may be harmless each, and their scaled product overflow all the same."""
    worst = max(loud, key=lambda m: (effects[m].gain, m))
    effect = effects[worst]
    if effect.norm > SINGLE_LARGEST:
        end = "which float32 does not hold: outputs would be infinite"
    elif effect.gain > HALF_LARGEST:
        end = "which float16 does not hold: outputs would be infinite there"
    else:
        end = "where a base's own modules give about 1"
    more = f" (and {len(loud) - 1} more modules)" if len(loud) > 1 else ""
    message = f"scaling · B · A{more} gives outputs of about {effect.gain:.3g} for inputs of size 1, {end}"
    return warn(
        Code.SCALE_SUSPECT, shown(worst), message, "Check lora_alpha, r and use_rslora, and that training converged."
    )
