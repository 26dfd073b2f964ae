"""Puts a mutant in the place of a function, in this process only: the source on disk is never changed."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterable
from types import CodeType, FunctionType

from mutations.sites import ROOT, Mutant, source

REACHED = "__reached__"


def install(mutant: Mutant) -> None:
    """Everybody who has the function, by whatever name, runs the mutant's code from now on."""
    code = compile(mutant.apply(source(mutant.path)), str(ROOT / mutant.path), "exec", dont_inherit=True)
    _function(mutant.module, mutant.outermost).__code__ = _find(code, mutant.outermost)


def install_probes(mutants: Iterable[Mutant], reached: set[str]) -> None:
    """From now on each function that a mutant would replace puts its `place` into `reached` when it is called."""
    files: dict[str, dict[str, Mutant]] = {}
    for mutant in mutants:
        files.setdefault(mutant.path, {})[mutant.outermost] = mutant
    for path, functions in files.items():
        tree = ast.parse(source(path))
        _put_probes(tree, "", {name: place(mutant) for name, mutant in functions.items()})
        code = compile(ast.fix_missing_locations(tree), str(ROOT / path), "exec", dont_inherit=True)
        for name, mutant in functions.items():
            function = _function(mutant.module, name)
            function.__globals__[REACHED] = reached
            function.__code__ = _find(code, name)


def place(mutant: Mutant) -> str:
    """Names the function that the mutant replaces."""
    return f"{mutant.path}::{mutant.outermost}"


def _put_probes(tree: ast.Module | ast.ClassDef, prefix: str, places: dict[str, str]) -> None:
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            _put_probes(node, f"{prefix}{node.name}.", places)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            named = places.get(prefix + node.name)
            if named is not None:
                node.body.insert(0, ast.parse(f"{REACHED}.add({named!r})").body[0])


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
