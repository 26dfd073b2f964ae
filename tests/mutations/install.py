"""Puts a mutant in the place of a function, in this process only: the source on disk is never changed."""

from __future__ import annotations

import importlib
from types import CodeType, FunctionType

from mutations.sites import ROOT, Mutant


def install(mutant: Mutant) -> None:
    """Everybody who has the function, by whatever name, runs the mutant's code from now on."""
    path = ROOT / mutant.path
    outermost = mutant.function.partition(".<locals>")[0]
    code = _find(compile(mutant.apply(path.read_text()), str(path), "exec", dont_inherit=True), outermost)
    _function(mutant.module, outermost).__code__ = code


def _function(module: str, qualname: str) -> FunctionType:
    found: object = importlib.import_module(module)
    for name in qualname.split("."):
        found = vars(found)[name]
    found = getattr(found, "fget", None) or getattr(found, "__func__", found)
    while hasattr(found, "__wrapped__"):
        found = found.__wrapped__
    assert isinstance(found, FunctionType), f"{qualname} of {module} is {found!r}"
    return found


def _find(code: CodeType, qualname: str) -> CodeType:
    inner = [c for c in code.co_consts if isinstance(c, CodeType)]
    for each in inner:
        if each.co_qualname == qualname:
            return each
        if qualname.startswith(each.co_qualname + "."):
            return _find(each, qualname)
    raise LookupError(qualname)
