"""Other names of a base's modules: what another version of its library, or a model around it, calls them.

`query` became `q_proj`; a model with a head keeps as `roberta.encoder.…` what the bare one has as
`encoder.…`. An adapter that was trained under the old names fits the base all the same, if somebody
says which name is which. The base's operator does, by name, when the base is registered; an adapter
binds to one naming as a whole (`checks.naming`), and nothing is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from adapterd.loader.base_fields import fields, invalid, is_module_path, parse_json, read_file
from adapterd.loader.formats.text import shown
from adapterd.loader.identity import NAME_PATTERN

PRIMARY = "primary"
"""The naming of the base's own table, so no alternative's name."""
MAX_ALTERNATIVES = 16
MAX_RULES_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Alternative:
    """A second table of a base: the first one with some modules under other names.

    Attributes:
        name: what manifests call it.
        renames: (name in this table, the base's own path), sorted; each of both sides once. Modules that
            are not listed keep their own path.
    """

    name: str
    renames: tuple[tuple[str, str], ...]

    def as_json(self) -> dict[str, Any]:
        """The inverse of `from_json`."""
        return {"name": self.name, "renames": dict(self.renames)}

    @classmethod
    def of(cls, name: str, renames: Mapping[str, str]) -> Alternative:
        """An alternative of renames in any order; `BaseSpec` checks it."""
        return cls(name, tuple(sorted(renames.items())))

    @classmethod
    def from_json(cls, value: object, where: str) -> Alternative:
        """Raises Failed (BASE_TABLE_INVALID) at the field at fault."""
        body = fields(value, where, {"name": str, "renames": dict})
        return cls.of(body["name"], _strings(body["renames"], f"{where}.renames"))


def check_alternatives(alternatives: Sequence[Alternative], paths: Iterable[str]) -> None:
    """Whether each is a table of its own that cannot be taken for the first one.

    Raises:
        Failed: BASE_TABLE_INVALID for a name that is none, twice or `primary`; for a rename of a module that
            the base lacks, to a name that the base's own table has, or of one module twice.
    """
    if len(alternatives) > MAX_ALTERNATIVES:
        raise invalid("alternatives", f"{len(alternatives)} alternative tables, at most {MAX_ALTERNATIVES}")
    if any(a.name >= b.name for a, b in pairwise(alternatives)):
        raise invalid("alternatives", "must be sorted by name, each name once")
    own = frozenset(paths)
    for alternative in alternatives:
        _check(alternative, own)


def _check(alternative: Alternative, own: frozenset[str]) -> None:
    where = f"alternatives.{shown(alternative.name, 64)}"
    if not re.fullmatch(NAME_PATTERN, alternative.name) or alternative.name == PRIMARY:
        raise invalid(where, f"an alternative is called {NAME_PATTERN}, and not {PRIMARY}")
    if not alternative.renames:
        raise invalid(where, "renames nothing")
    taken: dict[str, str] = {}
    for name, path in alternative.renames:
        if not is_module_path(name):
            raise invalid(f"{where}.{shown(name)}", "is not a module path")
        if path not in own:
            raise invalid(f"{where}.{shown(name)}", f"{shown(path)} is not in the base's module table")
        if name in own:
            raise invalid(f"{where}.{shown(name)}", "is a name of the base's own table, too: which one would be meant?")
        if path in taken:
            raise invalid(f"{where}.{shown(name)}", f"{shown(path)} is called {shown(taken[path])}, too")
        taken[path] = name


# ------------------------------------------------------------------ rules, for people to write

_RULES: Mapping[str, type] = {"renames": dict, "prefixes": dict, "parts": dict}


def load_alternative(name: str, path: Path, modules: Iterable[str]) -> Alternative:
    """An alternative from a rule file, for the base with `modules`.

    The file is a JSON object with one or more of

    * `renames`: {a module's full name in the alternative table: its path in the base}
    * `prefixes`: {how names begin in the alternative: how they begin in the base}, as in
      `{"encoder.": "roberta.encoder."}`
    * `parts`: {one part of a name in the alternative: that part in the base}, as in `{"query": "q_proj"}`

    Parts are applied after the prefix. Rules are spelled out over the table here, once: what the base
    carries, and what its digest covers, are the renames.

    Raises:
        NotFound: PATH_NOT_FOUND. Failed: BASE_TABLE_INVALID for a file that is none of that, and for a rule
            that fits no module of the base.
    """
    body = fields(parse_json(read_file(path, MAX_RULES_BYTES), path.name), path.name, {}, _RULES)
    rules = {kind: _strings(body.get(kind, {}), f"{path.name}.{kind}") for kind in _RULES}
    renames = _spelled_out(rules["prefixes"], rules["parts"], list(modules), path.name)
    listed = rules["renames"]
    taken = set(listed.values())
    others = {old: own for old, own in renames.items() if own not in taken}
    if twice := sorted(listed.keys() & others.keys()):
        raise invalid(f"{path.name}.renames.{shown(twice[0])}", f"a rule gives this name to {others[twice[0]]}")
    return Alternative.of(name, {**others, **listed})


def _spelled_out(
    prefixes: Mapping[str, str], parts: Mapping[str, str], modules: Sequence[str], where: str
) -> dict[str, str]:
    if len(set(prefixes.values())) < len(prefixes) or len(set(parts.values())) < len(parts):
        raise invalid(where, "two rules are about the same names of the base")
    old_part = {own: old for old, own in parts.items()}
    used: set[str] = set()
    renames: dict[str, str] = {}
    for module in modules:
        start = max((own for own in prefixes.values() if module.startswith(own)), key=len, default=None)
        old_start = next((old for old, own in prefixes.items() if own == start), "")
        rest = module.removeprefix(start or "").split(".")
        used.update({start} if start is not None else (), old_part.keys() & set(rest))
        old = old_start + ".".join(old_part.get(part, part) for part in rest)
        if old in renames:
            raise invalid(f"{where}.{shown(old)}", f"the rules give {renames[old]} and {module} one name")
        if old != module:
            renames[old] = module
    for own in (*prefixes.values(), *parts.values()):
        if own not in used:
            raise invalid(f"{where}.{shown(own)}", "fits no module of the base")
    return renames


def _strings(value: Mapping[str, object], where: str) -> dict[str, str]:
    for name, text in value.items():
        if not isinstance(text, str):
            raise invalid(f"{where}.{shown(name)}", "must be a string")
    return {name: str(text) for name, text in value.items()}
