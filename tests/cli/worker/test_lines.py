"""JSON lines in and out."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from adapterd.cli.worker.lines import (
    MAX_LINE_BYTES,
    BadLineError,
    Control,
    dump,
    ended_line,
    parse_line,
    token_line,
)
from adapterd.cli.worker.models import Bytes, TextStream
from adapterd.cli.worker.requests import Ended, Reason, Request, Token
from adapterd.cli.worker.stdin import LineReader
from adapterd.loader.errors import Code, reject

GOOD: dict[str, Any] = {"id": "a", "tenant": "acme", "ref": "acme/finance", "prompt": [1, 2], "max_tokens": 4}


def parse(fields: object) -> Request | Control:
    return parse_line(json.dumps(fields).encode(), Bytes(), frozenset({0}))


def test_a_request_as_it_is_written() -> None:
    assert parse(GOOD) == Request("a", "acme", "acme/finance", [1, 2], 4, stop=frozenset({0}))
    more = {"composition": [{"ref": "acme/x", "weight": 1}], "ref": None, "temperature": 1, "seed": 5, "stop": [9]}
    assert parse({**GOOD, **more}) == Request(
        "a", "acme", (("acme/x", 1.0),), [1, 2], 4, temperature=1.0, seed=5, stop=frozenset({0, 9})
    )
    base = {k: v for k, v in GOOD.items() if k not in {"ref", "prompt"}}
    assert parse({**base, "text": "hé"}) == Request("a", "acme", None, [104, 195, 169], 4, stop=frozenset({0}))
    assert parse({"pause": "a"}) == Control("pause", "a")


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"id": ""}, "id"), ({"id": 3}, "id"), ({"id": "x" * 129}, "id"), ({"id": ...}, "id"),
        ({"tenant": ...}, "tenant"), ({"tenant": None}, "tenant"), ({"ref": 3}, "ref"),
        ({"composition": []}, "composition"), ({"composition": 3, "ref": None}, "composition"),
        ({"composition": [{"ref": "a/b"}], "ref": None}, "composition"),
        ({"composition": [{"ref": "a/b", "weight": True}], "ref": None}, "composition"),
        ({"prompt": ...}, "prompt"), ({"prompt": "1"}, "prompt"), ({"prompt": [True]}, "prompt"),
        ({"prompt": [1.0]}, "prompt"), ({"text": "x"}, "prompt"), ({"prompt": ..., "text": 3}, "text"),
        ({"max_tokens": ...}, "max_tokens"), ({"max_tokens": "4"}, "max_tokens"), ({"max_tokens": True}, "max_tokens"),
        ({"temperature": "1"}, "temperature"), ({"seed": 1.5}, "seed"), ({"stop": [None]}, "stop"),
        ({"surprise": 1}, "surprise"), ({"cancel": "a"}, "line"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named(change: dict[str, Any], where: str) -> None:
    fields = {k: v for k, v in {**GOOD, **change}.items() if v is not ...}
    with pytest.raises(BadLineError) as caught:
        parse(fields)
    assert [(p.code, p.where) for p in caught.value.problems] == [(Code.REQUEST_INVALID, where)]
    assert caught.value.id == ("a" if change.get("id", "a") == "a" and where != "line" else None)


@pytest.mark.parametrize("line", [b"{", b"[]", b"\xff", b'{"id":1,"id":2}', b"[" * 100, b'{"id":NaN}', b'"cancel"'])
def test_what_is_no_object_is_refused(line: bytes) -> None:
    with pytest.raises(BadLineError) as caught:
        parse_line(line, None, frozenset())
    assert caught.value.problems[0].code is Code.REQUEST_INVALID


def test_text_needs_a_tokenizer() -> None:
    with pytest.raises(BadLineError) as caught:
        parse_line(b'{"id":"a","tenant":"acme","text":"hi","max_tokens":1}', None, frozenset())
    assert "no tokenizer" in caught.value.problems[0].message


def test_answers_are_one_line_of_ascii() -> None:
    assert dump(token_line(Token("é", 0, 7), "\n")) == '{"id":"\\u00e9","index":0,"token":7,"text":"\\n"}\n'
    assert token_line(Token("a", 0, 7), None) == {"id": "a", "index": 0, "token": 7}
    done = ended_line(Ended("a", Reason.LENGTH, 4, applied=(("d" * 64, 1.0),)))
    assert done == {
        "id": "a", "done": "length", "tokens": 4, "applied": [{"version_digest": "d" * 64, "weight": 1.0}]
    }  # fmt: skip
    problem = reject(Code.NOT_FOUND, "acme/x", "no")
    failed = ended_line(Ended("a", Reason.FAILED, 0, (problem,)))
    assert failed == {"id": "a", "error": problem.as_json(), "problems": [problem.as_json()]}


def test_text_comes_in_whole_characters() -> None:
    stream = TextStream(Bytes())
    assert [stream.piece(byte) for byte in "aé€".encode()] == ["a", "", "é", "", "", "€"]


def read(*writes: bytes) -> list[tuple[int, bytes | None] | None]:
    """What a reader tells about these writes; None is the end."""
    told: list[tuple[int, bytes | None] | None] = []
    reading, writing = os.pipe()
    with LineReader(reading, lambda number, line: told.append((number, line)), lambda: told.append(None)) as reader:
        for data in writes:
            os.write(writing, data)
        os.close(writing)
        reader._thread.join()
    os.close(reading)
    return told


def test_lines_are_cut_at_their_ends() -> None:
    assert read(b"a\nb", b"c\n\n  \nlast") == [(1, b"a"), (2, b"bc"), (5, b"last"), None]
    assert read() == [None]


def test_a_line_that_is_too_long_is_thrown_away() -> None:
    parts = [b"x" * 60_000] * (MAX_LINE_BYTES // 60_000 + 5)
    assert read(b"a\n", *parts, b"\nb\n") == [(1, b"a"), (2, None), (3, b"b"), None]


def test_a_reader_ends_though_nobody_writes() -> None:
    reading, writing = os.pipe()
    told: list[str] = []
    with LineReader(reading, lambda *_: told.append("line"), lambda: told.append("end")):
        pass
    assert told == ["end"]
    os.close(reading)
    os.close(writing)
