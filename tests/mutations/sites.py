"""Where the cache could forget something: found from the source, so that new code cannot be left out.

A mutant is one small change of one file, as a piece of text and what takes its place. The kinds:

* `port`: a call of the device port. A wait, a copy, a zeroing is left out; a mark is recorded in a stream
  in which nothing happens, so that it comes too early.
* `currency`: a look at whether something is still what it was (generations, changes of trust, dead entries).
  It answers yes without looking, or no.
* `count`: something is counted, taken, given back, put on a list or taken off. It is left out.
* `state`: an attribute is set. It is left out.
* `guard`: a condition is turned round, or one of its parts is left out.

The first three are looked for in all of `gpu_cache/`; the last two in the modules that keep the cache's books.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "gpu_cache"

NOT_MUTATED = {
    "gpu_cache/engine/reference.py": "what other kernels are compared with; it knows neither leases nor pages",
    "gpu_cache/cuda_device.py": "runs on a GPU only; tests/gpu/ holds it against the contract of devices",
    "gpu_cache/cuda_driver.py": "as cuda_device.py",
    "gpu_cache/cuda_runtime.py": "as cuda_device.py",
}
"""Files that are left out, and why."""

NO_DEVICE = re.compile(r"lock|changed|condition|barrier|process|thread")
"""Receivers of calls with the port's names that are no device: condition variables, processes."""
BOOKS = {"records", "fences", "slots", "pages", "tickets", "leases", "lease_book"}
"""Whoever keeps or imports one of these keeps the cache's books."""
ONLY_TOLD = {"Place", "LeaseState", "Lease", "Resident", "StepTicket"}
"""What these modules tell everybody: who imports no more reads reports, and keeps no books."""
CURRENCY = re.compile(r"generation|trust_changes|^_?dead$|^joined$|^revoked$")
TAKES = {
    "add", "append", "clear", "discard", "drop", "evict", "extend", "forget", "give_back", "note", "pop", "popleft",
    "release", "remove", "revoke", "setdefault", "take", "update", "pin", "unpin", "cancel",
}  # fmt: skip
"""Methods that change what somebody holds."""

Span = tuple[int, int, int, int]
"""First line, its column, last line, its column (columns in bytes, as `ast` counts)."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change. `path` is relative to the root, `function` the function's qualified name, `line` for people."""

    path: str
    function: str
    line: int
    kind: str
    operator: str
    before: str
    after: str
    span: Span

    @property
    def module(self) -> str:
        return "adapterd." + self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def outermost(self) -> str:
        """The function that is replaced: that in which it is, at the level of a module or a class."""
        return self.function.partition(".<locals>")[0]

    @property
    def name(self) -> str:
        return f"{self.path}:{self.line} {self.kind}/{self.operator}"

    def apply(self, source: str) -> str:
        """The file with the change."""
        lines = source.encode().splitlines(keepends=True)
        first, begin, last, end = self.span
        lines[first - 1 : last] = [lines[first - 1][:begin] + self.after.encode() + lines[last - 1][end:]]
        return b"".join(lines).decode()


@cache
def source(path: str) -> str:
    """The file as it was when it was first asked for: finding and applying mutants must see the same lines."""
    return (ROOT / path).read_text()


def changed() -> list[str]:
    """Files that are not what they were when they were read: nothing that was found out about them counts."""
    paths = (p.relative_to(ROOT).as_posix() for p in sorted(PACKAGE.rglob("*.py")))
    return [path for path in paths if (ROOT / path).read_text() != source(path)]


def find_all() -> list[Mutant]:
    """Every mutant of the package, in the order of files and lines."""
    paths = (p.relative_to(ROOT).as_posix() for p in sorted(PACKAGE.rglob("*.py")))
    return [mutant for path in paths if path not in NOT_MUTATED for mutant in find(path, source(path))]


def find(path: str, source: str) -> list[Mutant]:
    """The mutants of one file."""
    tree = ast.parse(source)
    finder = _Finder(path, source, port_methods(), keeps_books(path, tree))
    finder.visit(tree)
    return sorted(set(finder.found), key=lambda m: (m.span, m.operator, m.after))


def port_methods() -> frozenset[str]:
    """What a device can be asked to enqueue: the methods of the port that take a stream."""
    tree = ast.parse((PACKAGE / "device.py").read_text())
    device = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Device")
    methods = [n for n in device.body if isinstance(n, ast.FunctionDef)]
    return frozenset(m.name for m in methods if any(a.arg in {"stream", "streams"} for a in m.args.args))


def keeps_books(path: str, tree: ast.Module) -> bool:
    """Whether the module is one of those that keep the cache's books; the engine only reads them."""
    own = path.removeprefix("gpu_cache/").removesuffix(".py").replace("/", ".")
    if own.startswith("engine"):
        return False
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module]
    holding = {n.module.rpartition(".")[2] for n in imports if n.module and {a.name for a in n.names} - ONLY_TOLD}
    return bool((holding | {own.rpartition(".")[2]}) & BOOKS)


class _Finder(ast.NodeVisitor):
    def __init__(self, path: str, source: str, port: frozenset[str], books: bool) -> None:
        self.found: list[Mutant] = []
        self._path, self._source, self._port, self._books = path, source, port, books
        self._scope: list[str] = []

    # Where we are

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        bases = {ast.unparse(b).partition("[")[0] for b in node.bases}
        if "Protocol" not in bases:
            self._inside(node, node.name)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        before = self._books
        self._books &= node.name != "__init__"  # there things get their first value, nothing is decided
        self._inside(node, node.name, "<locals>")
        self._books = before

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def _inside(self, node: ast.AST, *names: str) -> None:
        self._scope += names
        self.generic_visit(node)
        del self._scope[-len(names) :]

    def visit_Assert(self, node: ast.Assert) -> None:
        """What must hold anyway: without it nothing changes."""

    # Statements

    def visit_Expr(self, node: ast.Expr) -> None:
        call = node.value
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            if self._is_port(call):
                self._add(node, "port", "drop", "pass")
            elif call.func.attr in TAKES and _is_state(call.func.value):
                self._add(node, "count", "drop", "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Attribute | ast.Subscript):
            self._add(node, "count", "drop", "pass")
        self.generic_visit(node)

    def visit_Delete(self, node: ast.Delete) -> None:
        if any(isinstance(t, ast.Subscript) and _is_state(t.value) for t in node.targets):
            self._add(node, "count", "drop", "pass")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        targets = [t for each in node.targets for t in (each.elts if isinstance(each, ast.Tuple) else [each])]
        if all(isinstance(t, ast.Subscript) and _is_state(t.value) for t in targets):
            self._add(node, "count", "drop", "pass")
        elif self._books and all(isinstance(t, ast.Attribute) for t in targets):
            self._drop_assignment(node, targets)
        self.generic_visit(node)

    def _drop_assignment(self, node: ast.Assign, targets: list[ast.expr]) -> None:
        """Whole; and of `a.x, a.y = 1, 2` each pair on its own."""
        value = node.value
        if len(node.targets) == 1 and isinstance(value, ast.Tuple) and len(value.elts) == len(targets) > 1:
            pairs = [f"{ast.unparse(t)} = {ast.unparse(v)}" for t, v in zip(targets, value.elts, strict=True)]
            for left_out, target in enumerate(targets):
                kept = "; ".join(p for i, p in enumerate(pairs) if i != left_out)
                self._add(node, "state", f"drop {ast.unparse(target)}", kept)
        elif not any(isinstance(n, ast.Call) and self._is_port(n) for n in ast.walk(value)):
            self._add(node, "state", "drop", "pass")

    # Expressions

    def visit_Call(self, node: ast.Call) -> None:
        if self._is_port(node) and isinstance(node.func, ast.Attribute) and node.func.attr == "record":
            device = ast.unparse(node.func.value)
            self._add(node, "port", "early", f"{device}.record({device}.new_stream())")
        if isinstance(node.func, ast.Attribute) and node.func.attr == "current" and node.args:
            self._answers(node)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if any(CURRENCY.search(name) for name in _names(node)):
            self._answers(node)
        else:
            self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr in {"dead", "_dead", "revoked"} and isinstance(node.ctx, ast.Load):
            self._answers(node)
        self.generic_visit(node)

    def _answers(self, node: ast.expr) -> None:
        for answer in ("True", "False"):
            self._add(node, "currency", answer.lower(), answer)

    # Guards

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) != "TYPE_CHECKING":
            self._negate(node.test)
            self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            if self._books and not _is_type_guard(test):
                self._add(test, "guard", "always", "True")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        if self._books:
            word = " and " if isinstance(node.op, ast.And) else " or "
            for left_out, value in enumerate(node.values):
                kept = [self._text(v) for v in node.values if v is not value]
                after = "(" + word.join(f"({k})" for k in kept) + ")"
                self._add(node, "guard", f"without part {left_out + 1}", after)
        self.generic_visit(node)

    def _negate(self, test: ast.expr) -> None:
        if self._books and not isinstance(test, ast.BoolOp) and not _is_type_guard(test):
            names = _names(test) if isinstance(test, ast.Compare) else set()
            if not any(CURRENCY.search(name) for name in names):
                self._add(test, "guard", "negate", f"(not ({self._text(test)}))")

    # Helpers

    def _is_port(self, node: ast.Call) -> bool:
        if not isinstance(node.func, ast.Attribute) or node.func.attr not in self._port:
            return False
        receiver = node.func.value
        last = receiver.attr if isinstance(receiver, ast.Attribute) else getattr(receiver, "id", "")
        return last == "device" or last.endswith("_device") or not (NO_DEVICE.search(last) or not node.args)

    def _text(self, node: ast.AST) -> str:
        text = ast.get_source_segment(self._source, node)
        assert text is not None
        return text

    def _add(self, node: ast.stmt | ast.expr, kind: str, operator: str, after: str) -> None:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        span = (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)
        if "<locals>" not in self._scope:
            return  # a constant of the module
        function = ".".join(self._scope).removesuffix(".<locals>")
        self.found.append(
            Mutant(self._path, function, node.lineno, kind, operator, self._text(node), after, span)
        )  # fmt: skip


def _is_state(node: ast.expr) -> bool:
    """Whether the receiver belongs to an object: a local list is nobody's book."""
    return any(isinstance(n, ast.Attribute) for n in ast.walk(node))


def _names(node: ast.AST) -> set[str]:
    found = {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
    return found | {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def _is_type_guard(test: ast.expr) -> bool:
    """`isinstance` and the like: turned round, the function cannot run at all."""
    return isinstance(test, ast.Call) and isinstance(test.func, ast.Name) and test.func.id == "isinstance"
