"""What a fuzz target is: bytes in, one word about them out, and a Defect where a rule of ours does not hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st


class Defect(Exception):
    """Our code broke a promise on this input. Anything else that leaves a target and is no refusal counts, too."""


@dataclass(frozen=True)
class Target:
    """One entry to hostile bytes.

    Attributes:
        run: judges one input and returns an outcome's word: `accepted`, a code, or `stricter CODE`. Raises
            Defect, or whatever our code raised that it should not have.
        grammar: inputs that know the format.
        instrumented: packages whose coverage guides atheris.
        words: tokens of the format, for atheris's mutator.
    """

    name: str
    run: Callable[[bytes], str]
    grammar: st.SearchStrategy[bytes]
    instrumented: tuple[str, ...]
    words: tuple[bytes, ...] = ()


def target(name: str) -> Target:
    """The target called `name`. Imported late: atheris instruments modules as they are imported."""
    return _MAKERS[name]()


def names() -> tuple[str, ...]:
    """All targets."""
    return tuple(_MAKERS)


def _header() -> Target:
    from fuzz import header

    return header.TARGET


def _config() -> Target:
    from fuzz import config

    return config.TARGET


def _oms() -> Target:
    from fuzz import trust

    return trust.OMS


def _admission() -> Target:
    from fuzz import trust

    return trust.ADMISSION


def _package() -> Target:
    from fuzz import package

    return package.TARGET


_MAKERS: dict[str, Any] = {
    "header": _header, "config": _config, "oms": _oms, "admission": _admission, "package": _package,
}  # fmt: skip
