"""Regexes of strangers: on RE2, which is linear in the text, and only what RE2 and Python's `re` read alike.

PEFT hands the config's patterns to Python's `re`, which backtracks: `(([a-z.])+)+!` takes longer than
the age of the universe on one module path. RE2 has no lookahead, which real configs use at their
start to leave towers out (`^(?!vision)…`); those are split off and each part runs on RE2 (ARCHITECTURE, Mechanisms).
No time-outs anywhere: a verdict is deterministic.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import re2

from adapterd.loader.errors import Code, error
from adapterd.loader.formats.text import shown

# An alternation of a few hundred full module paths takes about 12 KB and 6,600 instructions. RE2 steps
# through a whole program per character where its automaton does not fit into memory, so both are capped.
MAX_PATTERN_CHARS = 16_384
MAX_INSTRUCTIONS = 16_384
MAX_LOOKAHEADS = 8
TARGET_MEMORY = 32 << 20
# A key of rank_pattern is a module path with an operator here and there, and there may be many of them.
MAX_PART_CHARS = 512
PART_MEMORY = 1 << 19

_TOKEN = re.compile(
    r"(?P<escape>\\.)"
    r"|(?P<set>\[\^?\]?(?:\\.|[^\]\\])*+(?:\]|\\?\Z))"
    r"|(?P<open>\((?:\?(?:[:=!>]|<[=!]|P<\w+>|[A-Za-z-]*[:)]|.))?)"
    r"|(?P<close>\))"
    r"|(?P<either>\|)"
    r"|(?P<repeat>[*+?]|\{\d*,?\d*\})"
    r"|(?P<literal>.)",
    re.DOTALL,
)
# Groups that both engines read alike; lookaheads are handled before. Of two groups with one name RE2 makes
# nothing, so there are no names.
_GROUP = re.compile(r"\((?:\?(?::|[ims]+(?:-[ims]+)?:|-[ims]+:))?")
_LEADING_FLAGS = re.compile(r"\(\?[ims]+\)")
# Letters after a backslash that mean one thing to both; punctuation stands for itself.
_SHARED_ESCAPES = frozenset("dDwWsSbBAntrfva")
# Places, not characters: Python refuses to repeat them.
_PLACES = frozenset({"^", "$", r"\b", r"\B", r"\A"})
_MALFORMED = (
    "missing", "unexpected )", "trailing \\", "no argument for repetition", "invalid character class",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Token:
    """A piece of a pattern: the name of its group in `_TOKEN`, its text and where it ends."""

    kind: str
    text: str
    end: int


@dataclass(frozen=True, slots=True)
class Matcher:
    """A compiled pattern: lookaheads (wanted or not, each at the start of the name), then the body."""

    lookaheads: tuple[tuple[bool, Any], ...]
    body: Any

    def fullmatch(self, name: str) -> bool:
        """Whether Python's `re.fullmatch(pattern, name)` would match. `name` is ASCII without newlines."""
        ahead = all((part.match(name) is not None) == wanted for wanted, part in self.lookaheads)
        return ahead and self.body.fullmatch(name) is not None


def compile_target(pattern: str, where: str) -> Matcher:
    """A `target_modules` or `exclude_modules` regex, for `fullmatch`.

    Raises:
        Refused: CONFIG_BAD_VALUE where it is no regex, CONFIG_UNSAFE_REGEX where RE2 cannot run it or would
            read it otherwise than Python.
    """
    _check_length(pattern, where, MAX_PATTERN_CHARS)
    lookaheads, body = _split_lookaheads(pattern, where)
    _check_shared(body, where, flags_allowed=True)
    for _, part in lookaheads:
        _check_shared(part, where)
    compiled = tuple((wanted, _re2(part, where, TARGET_MEMORY)) for wanted, part in lookaheads)
    return Matcher(compiled, _re2(body, where, TARGET_MEMORY))


def compile_part(pattern: str, template: str, where: str, *, captures: bool = False) -> Any:
    """A pattern that PEFT puts into one of its own: `template` with `{}` where it goes. For `match`.

    Raises:
        Refused: see `compile_target`.
    """
    _check_length(pattern, where, MAX_PART_CHARS)
    _check_shared(pattern, where)
    _re2(pattern, where, PART_MEMORY)  # on its own first: `a)|(b` is none, though the whole may be
    return _re2(template.replace("{}", pattern), where, PART_MEMORY, captures=captures)


def tokens(pattern: str) -> Iterator[Token]:
    """The pattern in pieces. An unclosed set reaches to the end and is left to RE2 to refuse."""
    for found in _TOKEN.finditer(pattern):
        yield Token(found.lastgroup or "literal", found.group(), found.end())


def _check_length(pattern: str, where: str, most: int) -> None:
    if len(pattern) > most:
        message = f"a pattern of {len(pattern)} characters, at most {most}"
        raise error(Code.CONFIG_BAD_VALUE, where, message)


def _split_lookaheads(pattern: str, where: str) -> tuple[list[tuple[bool, str]], str]:
    """`^(?!A)(?=B)C` as [(False, A), (True, B)] and `C`."""
    rest = pattern[1:] if pattern.startswith(("^(?!", "^(?=")) else pattern
    parts: list[tuple[bool, str]] = []
    while rest.startswith(("(?!", "(?=")):
        end = _end_of_group(rest)
        if end is None:
            raise error(Code.CONFIG_BAD_VALUE, where, f"not a regex: {shown(pattern, 80)!r} has an open group")
        parts.append((rest[2] == "=", rest[3 : end - 1]))
        rest = rest[end:]
    # `^(?!A)B|C` is `(^(?!A)B)|C`: the lookahead would guard one branch only.
    if len(parts) > MAX_LOOKAHEADS:
        _unsafe(where, f"{len(parts)} lookaheads, at most {MAX_LOOKAHEADS}")
    if parts and _has_branches(rest):
        _unsafe(where, "a lookahead before branches; write ^(?!A)(?:B|C)")
    return parts, rest


def _end_of_group(pattern: str) -> int | None:
    depth = 0
    for token in tokens(pattern):
        depth += (token.kind == "open" and not _LEADING_FLAGS.fullmatch(token.text)) - (token.kind == "close")
        if depth == 0:
            return token.end
    return None


def _has_branches(pattern: str) -> bool:
    depth = 0
    for token in tokens(pattern):
        depth += (token.kind == "open" and not token.text.endswith(")")) - (token.kind == "close")
        if depth == 0 and token.kind == "either":
            return True
    return False


def _check_shared(pattern: str, where: str, *, flags_allowed: bool = False) -> None:
    """Refuse what RE2 and `re` read differently, and repeated repetitions, on which `re` may never finish."""
    open_groups: list[bool] = [False]  # for each open group: does it hold an unbounded repetition?
    closed: bool | None = None  # the same for the group that has just been closed
    before = ""
    start = 0
    for token in tokens(pattern):
        unbounded = token.kind == "repeat" and (token.text in ("*", "+") or token.text.endswith(",}"))
        if unbounded and closed:
            _unsafe(
                where,
                f"a repetition of a repetition at character {token.end}; PEFT might never finish",
            )
        if token.kind == "repeat" and before in _PLACES:
            _unsafe(where, f"nothing to repeat at character {token.end}")
        open_groups[-1] |= unbounded
        closed, before = None, token.text
        match token.kind:
            case "open":
                _check_group(token.text, where, leading=flags_allowed and start == 0)
                if not token.text.endswith(")"):
                    open_groups.append(False)
            case "close" if len(open_groups) > 1:
                closed = open_groups.pop()
                open_groups[-1] |= closed
            case _:
                _check_piece(token, where)
        start = token.end


def _check_group(text: str, where: str, *, leading: bool) -> None:
    if not (_GROUP.fullmatch(text) or (leading and _LEADING_FLAGS.fullmatch(text))):
        _unsafe(where, f"the group {shown(text, 20)!r} is not supported; lookaheads only at the very start")


def _check_piece(token: Token, where: str) -> None:
    if token.kind == "escape":
        _check_escape(token.text[1], where)
    elif token.kind == "repeat" and token.text.startswith("{,"):
        _unsafe(where, "a repetition without a lower bound ({,n}) is read differently by different engines")
    elif token.kind == "set":
        if "[:" in token.text:
            _unsafe(where, "POSIX classes ([[:alpha:]]) are read differently by different engines")
        for escape in re.findall(r"\\(.)", token.text, re.DOTALL):
            _check_escape(escape, where)


def _check_escape(letter: str, where: str) -> None:
    if letter.isalnum() and letter not in _SHARED_ESCAPES:
        _unsafe(where, f"the escape \\{shown(letter, 10)} is not supported")


def _unsafe(where: str, why: str) -> NoReturn:
    raise error(
        Code.CONFIG_UNSAFE_REGEX, where, why,
        "List the modules by name, or use a plain pattern such as .*\\.(q_proj|v_proj).",
    )  # fmt: skip


def _options(memory: int, *, captures: bool) -> Any:
    options = re2.Options()
    options.log_errors = False
    options.max_mem = memory
    options.never_capture = not captures
    return options


def _re2(pattern: str, where: str, memory: int, *, captures: bool = False) -> Any:
    try:
        compiled = re2.compile(pattern, _options(memory, captures=captures))
    except re2.error as failure:
        said = failure.args[0] if failure.args else ""
        reason = said.decode("utf-8", "replace") if isinstance(said, bytes) else str(said)
    else:
        re2.purge()  # its cache would keep the memory of 128 strangers' patterns
        if compiled.programsize > MAX_INSTRUCTIONS:
            _unsafe(where, f"the pattern takes {compiled.programsize} instructions, at most {MAX_INSTRUCTIONS}")
        return compiled
    if reason.startswith(_MALFORMED):
        raise error(Code.CONFIG_BAD_VALUE, where, f"not a regex: {shown(reason, 100)}")
    _unsafe(where, f"RE2 cannot run it: {shown(reason, 100)}")
