"""`rank_pattern` and `alpha_pattern`: which key's value holds for a module.

PEFT tries `re.match(rf"(.*\\.)?({key})$", name)` key by key and takes the first that matches
(`get_pattern_key` in peft/utils/other.py). Keys are regexes, but nearly all are plain module paths,
thousands of them in adapters with learned ranks; those are looked up.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from adapterd.loader.errors import Code, error
from adapterd.loader.formats.regex import compile_part
from adapterd.loader.formats.text import shown

KEY_TEMPLATE = r"(.*\.)?({})$"
# Keys with operators are tried one by one, on every module.
MAX_REGEX_KEYS = 128
# Comparisons of keys that fit a name only if a dot stands for another character; honest configs need none.
MAX_COMPARISONS = 100_000

_PATH = re.compile(r"(\^?)((?:[A-Za-z0-9_]|\\?\.)+)(\$?)")
_ESCAPED_DOT = "\0"


def dotted_suffixes(name: str) -> Iterator[str]:
    """`a.b.c`, `b.c`, `c`: all that a name of PEFT's kind may end with at a dot."""
    yield name
    at = name.find(".")
    while at >= 0:
        yield name[at + 1 :]
        at = name.find(".", at + 1)


@dataclass(frozen=True, slots=True)
class PathKey:
    """A key that is a module path: letters, dots (any character), escaped dots (`_ESCAPED_DOT` in `text`)."""

    position: int
    anchored: bool
    text: str

    @classmethod
    def read(cls, key: str, position: int) -> Self | None:
        """None for a key with any other operator."""
        found = _PATH.fullmatch(key)
        if found is None:
            return None
        return cls(position, bool(found[1]), found[2].replace("\\.", _ESCAPED_DOT))

    @property
    def path(self) -> str:
        """What it matches where each dot is a dot."""
        return self.text.replace(_ESCAPED_DOT, ".")

    def matches(self, suffix: str) -> bool:
        """For a suffix of the same length."""
        return all(k in (".", s) or (k == _ESCAPED_DOT and s == ".") for k, s in zip(self.text, suffix, strict=True))


class PatternTable:
    """The keys of one field, in stored order.

    A dot in a key is any character: a path may match a suffix of its own length that has fewer dots. Those
    candidates are compared one by one, and too many of them are refused.
    """

    def __init__(self, keys: Sequence[str], where: str) -> None:
        """Raises Refused (CONFIG_BAD_VALUE, CONFIG_UNSAFE_REGEX), see `regex.compile_part`."""
        self._keys = tuple(keys)
        self._where = where
        self._paths: dict[tuple[str, bool], int] = {}
        self._by_length: dict[int, dict[int, list[PathKey]]] = {}  # length, then number of dots
        self._regexes: list[tuple[int, Any]] = []
        self._comparisons = 0
        for position, key in enumerate(keys):
            path = PathKey.read(key, position)
            if path is None:
                self._add_regex(key, position)
            else:
                self._add_path(path)

    def _add_path(self, key: PathKey) -> None:
        self._paths.setdefault((key.path, key.anchored), key.position)
        same_length = self._by_length.setdefault(len(key.text), {})
        same_length.setdefault(key.path.count("."), []).append(key)

    def _add_regex(self, key: str, position: int) -> None:
        if len(self._regexes) == MAX_REGEX_KEYS:
            message = f"more than {MAX_REGEX_KEYS} patterns that are not plain module paths"
            raise error(Code.CONFIG_BAD_VALUE, self._where, message)
        self._regexes.append((position, compile_part(key, KEY_TEMPLATE, f"{self._where}.{shown(key, 60)}")))

    def first(self, name: str) -> str | None:
        """The key whose value holds for the module `name`, or None.

        Raises:
            Refused: CONFIG_BAD_VALUE where the keys differ from names in nothing but dots, too many times.
        """
        best = min(self._positions(name), default=None)
        return None if best is None else self._keys[best]

    def _positions(self, name: str) -> Iterator[int]:
        for suffix in dotted_suffixes(name):
            whole = suffix == name
            for anchored in (False, True) if whole else (False,):
                if (suffix, anchored) in self._paths:
                    yield self._paths[suffix, anchored]
            for key in self._near(suffix):
                if (whole or not key.anchored) and key.matches(suffix):
                    yield key.position
        for position, pattern in self._regexes:
            if pattern.match(name) is not None:
                yield position
                break

    def _near(self, suffix: str) -> Iterator[PathKey]:
        """The keys that may match `suffix` with a dot that stands for another character."""
        for dots, keys in self._by_length.get(len(suffix), {}).items():
            if dots > suffix.count("."):
                self._comparisons += len(keys)
                if self._comparisons > MAX_COMPARISONS:
                    message = "the patterns differ from module names in dots only, too often to tell apart"
                    raise error(Code.CONFIG_BAD_VALUE, self._where, message)
                yield from keys
