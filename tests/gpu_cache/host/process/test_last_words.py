"""What a loader says just before it goes is heard, though it was left to a step: answers, and why it refuses us."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from adapterd.gpu_cache.host.interface import Failure
from adapterd.gpu_cache.host.process.backoff import Backoff
from adapterd.gpu_cache.host.process.books import Books, Pending
from adapterd.gpu_cache.host.process.conversations import Conversations, Terms
from adapterd.gpu_cache.host.process.frames import FrameReader
from adapterd.gpu_cache.host.process.hearing import Hearing
from adapterd.gpu_cache.host.process.inbox import Inbox
from adapterd.gpu_cache.host.process.link import Link
from adapterd.gpu_cache.host.process.messages import Failed, Refusal, Resolve, encode
from adapterd.gpu_cache.host.process.reaching import Reach, Waiting
from adapterd.gpu_cache.host.process.silence import Silence
from adapterd.gpu_cache.host.process.slab import OwnedSlab, SharedSlab
from adapterd.gpu_cache.host.process.worker_trust import WorkerTrust
from adapterd.loader.errors import Code, reject
from adapterd.loader.identity import Ref
from adapterd.loader.trust.policy import TrustStore
from fakes.adapters import PAGE_BYTES, make_base

WRONG = (reject(Code.NOT_FOUND, "acme/a", "there is none"),)
REFUSED = (reject(Code.LOADER_MISMATCH, "loader", "it goes by something else"),)


class Conversation:
    """A worker's, with a loader that this test speaks for; a step has just heard of answers, and no time goes by."""

    def __init__(self, path: Path) -> None:
        self.ours, self.loaders = socket.socketpair()
        owned = OwnedSlab(PAGE_BYTES, PAGE_BYTES)
        self.slab = SharedSlab.mapped(owned.descriptor, PAGE_BYTES, PAGE_BYTES)
        owned.close()
        self.base, self.books, self.waiting = make_base(), Books(), Waiting(self.now)
        backoff = Backoff(self.now)
        self.hearing = Hearing(self.books, backoff.worked)
        inbox = Inbox(self.hearing.take, self.waiting.wake, self.now)
        inbox.deliver(1)
        self.conversations = Conversations(
            Terms(self.base, "auto", PAGE_BYTES, "5" * 64, WorkerTrust(TrustStore(), None)),
            books=self.books,
            hearing=self.hearing,
            inbox=inbox,
            reach=Reach(path, None, shared=True, waiting=self.waiting),
            waiting=self.waiting,
            backoff=backoff,
            silence=Silence(self.now),
            clock=self.now,
        )

    def now(self) -> float:
        return 50.0

    def talk(self) -> None:
        self.conversations._talk(Link(self.ours, self.slab, "", FrameReader(), ()), self.base)

    def close(self) -> None:
        self.waiting.close()
        self.loaders.close()


@pytest.fixture
def conversation(tmp_path: Path) -> Iterator[Conversation]:
    found = Conversation(tmp_path / "socket")
    yield found
    found.close()


def test_an_answer(conversation: Conversation) -> None:
    heard: list[object] = []
    conversation.books.ask(Pending(Resolve(7, "acme", (Ref.parse("acme/a"),)), heard.append))
    conversation.loaders.sendall(encode(Failed(7, WRONG)))
    conversation.loaders.shutdown(socket.SHUT_WR)
    conversation.talk()
    assert heard == [Failure(WRONG)]
    assert not conversation.books.owed


def test_why_it_refuses_us(conversation: Conversation) -> None:
    conversation.loaders.sendall(encode(Refusal(REFUSED)))
    conversation.loaders.shutdown(socket.SHUT_WR)
    conversation.talk()
    assert conversation.conversations.down == REFUSED
