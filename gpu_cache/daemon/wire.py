"""The lines themselves: messages into bytes and back."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from adapterd.gpu_cache.daemon.messages import PROTOCOL, A, Answer, Request, Strict
from adapterd.loader.errors import Code, Failed, Problem, error, error_from, reject

_REQUESTS: TypeAdapter[Request] = TypeAdapter(Annotated[Request, Field(discriminator="request")])


class _ProblemFields(Strict):
    code: str
    severity: Literal["reject", "warn"]
    where: str
    message: str
    hint: str

    def as_problem(self) -> Problem:
        """Raises ValueError on a code that is not known here."""
        return Problem(Code(self.code), self.severity, self.where, self.message, self.hint)


class _Refusal(Strict):
    protocol: Literal[1] = PROTOCOL
    ok: Literal[False] = False
    problems: tuple[_ProblemFields, ...] = Field(min_length=1)


class _Reply(BaseModel):
    """Only what tells the two kinds of answer apart."""

    protocol: Literal[1]
    ok: bool


def request_line(request: Request) -> bytes:
    return request.model_dump_json().encode() + b"\n"


def parse_request(line: bytes) -> Request:
    """Raises Failed (REQUEST_INVALID, REF_INVALID), every mistake a problem. No value but a REF is repeated."""
    try:
        return _REQUESTS.validate_json(line)
    except ValidationError as e:
        problems = [
            reject(Code.REQUEST_INVALID, ".".join(map(str, mistake["loc"])) or "request", mistake["msg"])
            for mistake in e.errors(include_input=False, include_context=False, include_url=False)
        ]
        raise Failed(*problems) from None


def answer_line(answer: Answer) -> bytes:
    return answer.model_dump_json().encode() + b"\n"


def refusal_line(problems: tuple[Problem, ...]) -> bytes:
    told = tuple(_ProblemFields(**problem.as_json()) for problem in problems)  # type: ignore[arg-type]
    return _Refusal(problems=told).model_dump_json().encode() + b"\n"


def parse_answer(line: bytes, kind: type[A]) -> A:
    """What the daemon said, if it is a `kind`.

    Raises:
        AdapterdError: what the daemon refused.
        Unavailable: SERVER_ERROR if these are not words of this protocol.
    """
    try:
        if _Reply.model_validate_json(line).ok:
            return kind.model_validate_json(line)
        problems = [told.as_problem() for told in _Refusal.model_validate_json(line).problems]
    except ValueError:
        raise error(
            Code.SERVER_ERROR, "daemon", "its answer is not understood", "Use an adapterctl of the worker's version."
        ) from None
    raise error_from(problems)
