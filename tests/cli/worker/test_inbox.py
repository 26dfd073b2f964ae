"""Lines and commands on their way to the loop: none of them, however many, keeps steps from running or fills memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import cast

import pytest

from adapterd.cli.worker.clients import LineClient
from adapterd.cli.worker.inbox import MAX_LINES, Inbox
from adapterd.cli.worker.loop import ServingLoop
from adapterd.cli.worker.stdin import LineReader
from adapterd.cli.worker.tally import Progress


class Loop:
    """Counts its steps, and is drained when it is told."""

    def __init__(self, after: int = 1 << 30) -> None:
        self.steps, self.after, self.done = 0, after, list[int]()
        self.drained = False

    def step(self) -> Progress:
        self.steps += 1
        self.drained = self.drained or self.steps >= self.after
        return Progress.RAN

    def drain(self) -> None:
        self.drained = True


def serve(inbox: Inbox, loop: Loop) -> None:
    inbox.serve(cast(ServingLoop, loop))


def command(run: Callable[[Loop], None]) -> Callable[[ServingLoop], None]:
    return cast(Callable[[ServingLoop], None], run)


def test_commands_that_kept_coming_kept_steps_from_running() -> None:
    inbox, loop = Inbox(), Loop(after=3)

    def again(_: Loop) -> None:
        inbox.put(command(again))

    inbox.put(command(again))
    serve(inbox, loop)
    assert loop.steps == 3


def test_lines_that_nobody_did_yet_filled_the_memory() -> None:
    """The reader waits; once the loop has ended it does not wait any more."""
    inbox, loop, read = Inbox(), Loop(), list[int]()
    many = 3 * MAX_LINES

    def read_all() -> None:
        for number in range(many):
            inbox.put_line(command(lambda loop, number=number: loop.done.append(number)))  # type: ignore[misc]
            read.append(number)
        inbox.put(command(Loop.drain))

    reader = threading.Thread(target=read_all)
    reader.start()
    while len(read) < MAX_LINES:
        os.sched_yield()
    assert len(read) == MAX_LINES
    serve(inbox, loop)
    reader.join(20)
    assert loop.done == list(range(many))
    for _ in range(2 * MAX_LINES):
        inbox.put_line(command(Loop.drain))


def test_a_reader_that_waits_for_room_is_let_go_when_the_loop_ends() -> None:
    inbox, loop = Inbox(), Loop(after=1)
    reader = threading.Thread(target=lambda: [inbox.put_line(command(lambda _: None)) for _ in range(9 * MAX_LINES)])
    reader.start()
    serve(inbox, loop)
    reader.join(20)
    assert not reader.is_alive()


class Breaking:
    """Text that cannot be read."""

    def encode(self, text: str) -> list[int]:
        raise ZeroDivisionError(text)

    def decode(self, tokens: object) -> str:
        return ""


def test_a_tokenizer_that_broke_left_a_worker_that_heard_nothing_more(capsys: pytest.CaptureFixture[str]) -> None:
    import sys

    inbox, loop = Inbox(), Loop()
    client = LineClient(inbox, sys.stdout, Breaking(), frozenset())
    client.on_line(7, b'{"id": "1", "tenant": "acme", "text": "x", "max_tokens": 1}')
    inbox.put(command(Loop.drain))
    serve(inbox, loop)
    told = capsys.readouterr().out
    assert '"code":"INTERNAL"' in told
    assert '"line":7' in told


def test_a_descriptor_above_a_thousand_is_read_and_its_end_is_told() -> None:
    reading, writing = os.pipe()
    high = os.dup2(reading, 1500) if _may_open(1500) else reading
    heard, ended = list[tuple[int, bytes | None]](), threading.Event()
    with LineReader(high, lambda number, line: heard.append((number, line)), ended.set):
        os.write(writing, b"one\n\ntwo")
        os.close(writing)
        assert ended.wait(20)
    assert heard == [(1, b"one"), (3, b"two")]
    for each in {reading, high}:
        os.close(each)


def _may_open(number: int) -> bool:
    import resource

    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] > number
