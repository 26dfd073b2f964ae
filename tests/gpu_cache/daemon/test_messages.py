from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapterd.gpu_cache.daemon.messages import (
    MAX_LINE_BYTES,
    AskDrain,
    AskEvict,
    AskPin,
    AskPrefetch,
    AskStatus,
    AskWatch,
    DrainAnswer,
    Request,
    StatusAnswer,
)
from adapterd.gpu_cache.daemon.wire import answer_line, parse_answer, parse_request, refusal_line, request_line
from adapterd.loader.errors import AdapterdError, Code, Conflict, Failed, Unavailable, reject
from adapterd.loader.identity import Ref

LONGEST = Ref("t" * 64, "n" * 64, "a" * 64, "0" * 64)


@pytest.mark.parametrize(
    "request_",
    [
        AskStatus(),
        AskPrefetch(ref=LONGEST, to="host"),
        AskPin(ref=Ref.parse("acme/a")),
        AskEvict(ref=LONGEST),
        AskDrain(on=False),
        AskWatch(feed="f" * 64, since=(1 << 63) - 1, wait_seconds=60),
    ],
)
def test_what_is_said_is_understood(request_: Request) -> None:
    line = request_line(request_)
    assert line.count(b"\n") == 1
    assert len(line) < MAX_LINE_BYTES / 4
    assert parse_request(line) == request_


@given(st.one_of(st.binary(max_size=200), st.text(max_size=200).map(lambda text: text.encode())))
def test_anything_is_a_request_or_a_typed_refusal(line: bytes) -> None:
    with pytest.raises(Failed):
        parse_request(line)


def test_a_refusal_never_repeats_what_was_said() -> None:
    with pytest.raises(Failed) as refused:
        parse_request(b'{"protocol": 1, "request": "drain", "on": "SECRET"}')
    assert "SECRET" not in str(refused.value)


def test_answers_and_refusals_come_back_as_they_were() -> None:
    assert parse_answer(answer_line(DrainAnswer(draining=True, drained=False)), DrainAnswer).draining
    problem = reject(Code.REF_CONFLICT, "acme/a", "moved", "Look.")
    with pytest.raises(Conflict) as refused:
        parse_answer(refusal_line((problem,)), DrainAnswer)
    assert refused.value.problems == (problem,)


@pytest.mark.parametrize(
    "line",
    [
        b"", b"hello", b"{}", b'{"protocol": 1}', b'{"protocol": 2, "ok": true}', b'{"protocol": 1, "ok": true}',
        b'{"protocol": 1, "ok": false}', b'{"protocol": 1, "ok": false, "problems": []}', b"[" * 100_000,
        refusal_line((reject(Code.CONFLICT, "a", "b"),)).replace(b"CONFLICT", b"SOMETHING_NEW"),
        answer_line(DrainAnswer(draining=True, drained=False)), b"\xff\xfe",
    ],
)  # fmt: skip
def test_an_answer_of_somebody_else_is_a_typed_error(line: bytes) -> None:
    with pytest.raises(AdapterdError) as strange:
        parse_answer(line, StatusAnswer)
    assert isinstance(strange.value, Unavailable)
    assert strange.value.code is Code.SERVER_ERROR
