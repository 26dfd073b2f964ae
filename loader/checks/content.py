"""The bytes themselves: are they the ones that were promised, are they numbers, do they do anything?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from adapterd.loader.checks.findings import several
from adapterd.loader.checks.pairs import Pair
from adapterd.loader.effect import Effect, NotFinite, measure
from adapterd.loader.errors import Code, Problem, reject, warn
from adapterd.loader.formats.files import FileReader, Package, file_entries
from adapterd.loader.formats.text import shown
from adapterd.loader.identity import FileEntry
from adapterd.loader.scaling import Effective

HALF_LARGEST = float(np.finfo(np.float16).max)
"""65504: values above do not survive a cast to the narrowest dtype that adapters are served in."""

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
            message = f"has SHA-256 {actual.sha256}, {shown(digest, 64)} was declared"
            yield reject(Code.HASH_MISMATCH, shown(name), message, "The file changed on its way; send it again.")


@dataclass(frozen=True, slots=True)
class Content:
    """What reading the values gave: ‖scaling · B A‖_F by module, and problems."""

    norms: Mapping[str, float]
    problems: tuple[Problem, ...]


def read_content(reader: FileReader, pairs: Sequence[Pair], scalings: Mapping[str, Effective]) -> Content:
    """Read every value of every pair, in the order of `pairs`."""
    effects: dict[str, Effect] = {}
    broken: list[NotFinite] = []
    for pair in pairs:
        found = measure(reader, pair.a, pair.b, scalings[pair.module].scaling)
        if isinstance(found, NotFinite):
            broken.append(found)
        else:
            effects[pair.module] = found
    problems = [*map(_not_finite, broken)] if broken else [*_zero(effects), *_suspect(effects)]
    return Content({module: e.norm for module, e in effects.items()}, tuple(problems))


def _not_finite(found: NotFinite) -> Problem:
    first = f"the first is {found.value} at [{found.row}, {found.column}]"
    message = f"values that are not finite: {found.count}, {first}"
    return reject(Code.NONFINITE, shown(found.tensor), message, "The training diverged, or the file is damaged.")


def _zero(effects: Mapping[str, Effect]) -> Iterator[Problem]:
    zero = sorted(m for m, e in effects.items() if e.zero)
    if zero and len(zero) == len(effects):
        hint = "Was it saved before training, or from the wrong object? It can be allowed by name: ZERO_DELTA."
        message = f"scaling · B · A is zero in all {len(zero)} adapted modules: the adapter does nothing"
        yield reject(Code.ZERO_DELTA, shown(_group(zero, ()) or zero[0]), message, hint)
    elif zero:
        group = _group(zero, effects.keys() - set(zero))
        what = f"all {len(zero)} adapted modules of {group}" if group else several(map(shown, zero))
        message = f"no effect at all: {what}; {len(effects) - len(zero)} other modules have one"
        yield warn(Code.ZERO_DELTA, shown(group or zero[0]), message)


def _group(zero: Sequence[str], others: Iterable[str]) -> str:
    """The folder of modules that all of `zero` lie in and none of `others`; empty if there is none."""
    if len(zero) < 2:
        return ""
    steps = zip(zero[0].split("."), zero[-1].split("."), strict=False)  # sorted: all others lie between
    group = ".".join(a for a, _ in takewhile(lambda step: step[0] == step[1], steps))
    return "" if any(f"{other}.".startswith(f"{group}.") for other in others) else group


def _suspect(effects: Mapping[str, Effect]) -> Iterator[Problem]:
    alive = {m: e for m, e in effects.items() if not e.zero}
    large = [m for m, e in alive.items() if e.largest > HALF_LARGEST]
    drowning = [m for m, e in alive.items() if e.ratio < DROWNING_RATIO]
    if large:
        values = f"values up to {alive[large[0]].largest:.3g}"
        message = f"{several(map(shown, large))} hold {values}, float16 ends at 65504"
        yield warn(Code.SCALE_SUSPECT, shown(large[0]), message, "Was the file written with another byte order?")
    if drowning:
        where = several(map(shown, drowning))
        message = f"A and B nearly cancel in {where}; in half precision the effect would drown"
        yield warn(Code.SCALE_SUSPECT, shown(drowning[0]), message, "Serve it in float32.")
