"""JSON lines: what a client writes, and what it reads back. `docs/worker.md` has the fields."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from adapterd.cli.worker.models import Text
from adapterd.cli.worker.requests import Ended, Reason, Request, Token, Wish
from adapterd.loader.errors import AdapterdError, Code, Problem, error
from adapterd.loader.formats.json_strict import JsonRules, parse_object

MAX_LINE_BYTES = 1 << 20
MAX_ID = 128

_BAD = Code.REQUEST_INVALID
_RULES = JsonRules(
    where="line", max_bytes=MAX_LINE_BYTES, max_depth=4, max_values=1 << 18,
    invalid=_BAD, duplicate=_BAD, too_deep=_BAD, too_large=_BAD, too_many=_BAD, bad_number=_BAD,
)  # fmt: skip

Verb = Literal["cancel", "pause", "resume"]
_VERBS: tuple[Verb, ...] = ("cancel", "pause", "resume")
_FIELDS = frozenset(
    {"id", "tenant", "ref", "composition", "prompt", "text", "max_tokens", "temperature", "seed", "stop"}
)


@dataclass(frozen=True, slots=True)
class Control:
    """What is to be done with an open request."""

    verb: Verb
    id: str


class BadLineError(Exception):
    """A line that is not understood. `id` is the request it names, if it names one."""

    def __init__(self, name: str | None, fault: AdapterdError) -> None:
        super().__init__(str(fault))
        self.id, self.problems = name, fault.problems


def parse_line(line: bytes, text: Text | None, stop: frozenset[int]) -> Request | Control:
    """One line of a client.

    Args:
        line: with or without its end.
        text: the model's tokenizer, for requests that bring text.
        stop: what ends an answer beside the request's own `stop`.

    Raises:
        BadLineError: REQUEST_INVALID.
    """
    name: str | None = None
    try:
        fields = parse_object(line.strip(), _RULES)
        if not fields.keys().isdisjoint(_VERBS):
            return _control(fields)
        name = _field(fields, "id", _is_id, f"a text of 1 to {MAX_ID} characters")
        return _request(fields, name, text, stop)
    except AdapterdError as fault:
        raise BadLineError(name, fault) from fault


def token_line(event: Token, piece: str | None) -> dict[str, object]:
    """One token; `text` only where there is a tokenizer."""
    body: dict[str, object] = {"id": event.id, "index": event.index, "token": event.token}
    return body if piece is None else {**body, "text": piece}


def ended_line(event: Ended) -> dict[str, object]:
    """The last line of a request: `done`, or `error`."""
    if event.reason is Reason.FAILED:
        return error_line(event.id, event.problems)
    applied = [{"version_digest": digest, "weight": weight} for digest, weight in event.applied]
    return {"id": event.id, "done": event.reason.value, "tokens": event.tokens, "applied": applied}


def error_line(name: str | None, problems: tuple[Problem, ...], line: int | None = None) -> dict[str, object]:
    """What is wrong with a request, or with a line; `problems` has all that is, `error` the first."""
    body: dict[str, object] = {"id": name, "error": problems[0].as_json(), "problems": [p.as_json() for p in problems]}
    return body if line is None else {**body, "line": line}


def dump(body: Mapping[str, object]) -> str:
    """One line, plain ASCII, so that no terminal or pipe can bend it."""
    return json.dumps(body, ensure_ascii=True, separators=(",", ":")) + "\n"


def _control(fields: Mapping[str, Any]) -> Control:
    if len(fields) != 1:
        raise error(_BAD, "line", "cancel, pause and resume stand alone in their line")
    ((verb, _),) = fields.items()
    name = _field(fields, verb, _is_id, "the id of a request")
    return Control(next(v for v in _VERBS if v == verb), name)


def _request(fields: Mapping[str, Any], name: str, text: Text | None, stop: frozenset[int]) -> Request:
    unknown = sorted(fields.keys() - _FIELDS)
    if unknown:
        raise error(_BAD, unknown[0][:MAX_ID], "is no field of a request", f"Known are {', '.join(sorted(_FIELDS))}.")
    return Request(
        id=name,
        tenant=_field(fields, "tenant", _is_text, "a tenant's name"),
        wish=_wish(fields),
        prompt=_prompt(fields, text),
        max_tokens=_field(fields, "max_tokens", _is_int, "a whole number"),
        temperature=float(_field(fields, "temperature", _is_number, "a number", 0.0)),
        seed=_field(fields, "seed", _is_int, "a whole number", 0),
        stop=stop | frozenset(_field(fields, "stop", _are_ints, "a list of token ids", [])),
    )


def _wish(fields: Mapping[str, Any]) -> Wish:
    ref, parts = fields.get("ref"), fields.get("composition")
    if ref is not None and parts is not None:
        raise error(_BAD, "composition", "a request has a ref or a composition, not both")
    if parts is None:
        _field(fields, "ref", _is_ref, "a REF, or null for the base", None)
        return None if ref is None else str(ref)
    _field(fields, "composition", _are_parts, 'a list of {"ref": REF, "weight": number}')
    return tuple((part["ref"], float(part["weight"])) for part in parts)


def _prompt(fields: Mapping[str, Any], text: Text | None) -> list[int]:
    if ("prompt" in fields) == ("text" in fields):
        raise error(_BAD, "prompt", "a request has either prompt (token ids) or text")
    if "prompt" in fields:
        return list(_field(fields, "prompt", _are_ints, "a list of token ids"))
    written = _field(fields, "text", _is_text, "a text")
    if text is None:
        raise error(_BAD, "text", "the model's directory has no tokenizer", "Give token ids in prompt.")
    return list(text.encode(written))


_REQUIRED = object()


def _field(
    fields: Mapping[str, Any], name: str, fits: Callable[[object], bool], wanted: str, default: object = _REQUIRED
) -> Any:
    value = fields.get(name, default)
    if value is _REQUIRED:
        raise error(_BAD, name, f"is missing; it is {wanted}")
    if value is not default and not fits(value):
        raise error(_BAD, name, f"must be {wanted}")
    return value


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_id(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_ID


def _is_ref(value: object) -> bool:
    return value is None or isinstance(value, str)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_ints(value: object) -> bool:
    return isinstance(value, list) and all(_is_int(each) for each in value)


def _are_parts(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(part, dict)
        and part.keys() == {"ref", "weight"}
        and _is_text(part["ref"])
        and _is_number(part["weight"])
        for part in value
    )
