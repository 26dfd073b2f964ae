"""The client on stdin and stdout: its lines become commands for the loop, the loop's events become its lines."""

from __future__ import annotations

from typing import TextIO

from adapterd.cli.worker.inbox import Inbox
from adapterd.cli.worker.lines import (
    MAX_LINE_BYTES,
    BadLineError,
    Control,
    dump,
    ended_line,
    error_line,
    parse_line,
    token_line,
)
from adapterd.cli.worker.loop import ServingLoop
from adapterd.cli.worker.models import Text, TextStream
from adapterd.cli.worker.requests import Event, Request, Sink, Token
from adapterd.loader.errors import AdapterdError, Code, Problem, reject


class LineClient:
    """Reads on the reader's thread, writes on the loop's thread only.

    A line that is wrong gets an answer of its own and harms nobody. Once stdout takes no more, everything that
    is open ends, and `lost` says why.

    Attributes:
        lost: what happened to `output`, or None.

    Args:
        inbox: of the loop.
        output: where lines go, flushed one by one.
        text: the model's tokenizer, if it has one.
        stop: token ids that end an answer.
    """

    def __init__(self, inbox: Inbox, output: TextIO, text: Text | None, stop: frozenset[int]) -> None:
        self._inbox, self._output, self._text, self._stop = inbox, output, text, stop
        self.lost: OSError | None = None

    def on_line(self, number: int, line: bytes | None) -> None:
        """One line, None for one that was too long. Called on the reader's thread."""
        if line is None:
            self._refuse(
                None, (reject(Code.REQUEST_INVALID, "line", f"is longer than {MAX_LINE_BYTES} bytes"),), number
            )
            return
        try:
            parsed = parse_line(line, self._text, self._stop)
        except BadLineError as bad:
            self._refuse(bad.id, bad.problems, number)
            return
        except Exception as bug:  # noqa: BLE001 - a tokenizer's, say: it is that line's trouble
            problem = reject(Code.INTERNAL, "line", f"it cannot be read: {type(bug).__name__}")
            self._refuse(None, (problem,), number)
            return
        self._inbox.put_line(lambda loop: self._do(loop, parsed, number))

    def on_end(self) -> None:
        """There are no more lines. Called on the reader's thread."""
        self._inbox.put(ServingLoop.drain)

    def _do(self, loop: ServingLoop, parsed: Request | Control, number: int) -> None:
        try:
            if isinstance(parsed, Request):
                loop.submit(parsed, self._sink())
            elif parsed.verb == "cancel":
                loop.cancel(parsed.id)
            elif parsed.verb == "pause":
                loop.pause(parsed.id)
            else:
                loop.resume(parsed.id)
        except AdapterdError as fault:
            self._write(error_line(parsed.id, fault.problems, number))

    def _sink(self) -> Sink:
        stream = TextStream(self._text) if self._text is not None else None

        def tell(event: Event) -> None:
            if isinstance(event, Token):
                self._write(token_line(event, stream.piece(event.token) if stream else None))
            else:
                self._write(ended_line(event))

        return tell

    def _refuse(self, name: str | None, problems: tuple[Problem, ...], number: int) -> None:
        self._inbox.put_line(lambda _: self._write(error_line(name, problems, number)))

    def _write(self, body: dict[str, object]) -> None:
        if self.lost is not None:
            return
        try:
            self._output.write(dump(body))
            self._output.flush()
        except OSError as fault:
            self.lost = fault
            self._inbox.put(ServingLoop.close)
