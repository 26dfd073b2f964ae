"""What workers may do to a loader: nothing that another worker would notice."""

from __future__ import annotations

import json
import queue
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adapterd.gpu_cache.host.interface import Failure, Origin
from adapterd.gpu_cache.host.process import connection, session
from adapterd.gpu_cache.host.process.backoff import GIVE_UP_AFTER, Backoff
from adapterd.gpu_cache.host.process.books import MAX_LOSSES
from adapterd.gpu_cache.host.process.client import HostClient
from adapterd.gpu_cache.host.process.frames import FrameReader
from adapterd.gpu_cache.host.process.link import table_of
from adapterd.gpu_cache.host.process.messages import (
    PROTOCOL,
    Failed,
    Fetch,
    Hello,
    Known,
    Refusal,
    Release,
    Resolve,
    Table,
    Verified,
    Verify,
    WantTable,
    Welcome,
    encode,
    from_loader,
)
from adapterd.loader.errors import AdapterdError, Code
from adapterd.loader.identity import Ref
from adapterd.loader.trust.policy import TrustStore
from contracts.host_user import SECONDS, HostUser, held_bytes
from fakes.adapters import PAGE_BYTES, MemoryLoader, image_bytes, make_base
from fakes.devices import Barrier
from fakes.leftovers import threads_and_files
from fakes.loader_thread import SOURCE, LoadersTrust, LoaderThread


@pytest.fixture
def loader() -> MemoryLoader:
    return MemoryLoader()


@pytest.fixture
def serving(loader: MemoryLoader, tmp_path: Path) -> Iterator[LoaderThread]:
    before = threads_and_files()
    serving = LoaderThread(_folder(tmp_path) / "s", loader)
    yield serving
    serving.stop()
    assert threads_and_files() == before


@pytest.fixture
def worker(serving: LoaderThread, loader: MemoryLoader) -> Iterator[HostClient]:
    worker = serving.worker(loader.base)
    yield worker
    worker.close(SECONDS)


def _folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


class Stranger:
    """A socket whose bytes the test chooses."""

    def __init__(self, serving: LoaderThread) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(SECONDS)
        self.socket.connect(str(serving.path))
        self._reader, self._heard = FrameReader(), list[Any]()

    def say(self, *messages: Any) -> None:
        self.socket.sendall(b"".join(encode(message) for message in messages))

    def hear(self) -> Any:
        while not self._heard:
            data = self.socket.recv(1 << 16)
            if not data:
                raise EOFError
            self._heard += [from_loader(frame) for frame in self._reader.feed(data)]
        return self._heard.pop(0)

    def answer(self) -> Any:
        """The next message that is none about usage."""
        while type(heard := self.hear()).__name__ == "Usage":
            pass
        return heard

    def enter(self, loader: MemoryLoader) -> Stranger:
        self.say(_hello(loader))
        if isinstance(heard := self.hear(), WantTable):
            self.say(Table(table_of(loader.base)))
            heard = self.hear()
        assert isinstance(heard, Welcome)
        return self

    @property
    def hung_up(self) -> bool:
        try:
            while True:
                self.hear()
        except (EOFError, ConnectionError):
            self.socket.close()
            return True


def _hello(loader: MemoryLoader) -> Hello:
    return Hello(PROTOCOL, TrustStore().digest, SOURCE, PAGE_BYTES, "auto", loader.base.pin)


def _works(worker: HostClient, loader: MemoryLoader) -> None:
    version = loader.publish("acme/a", 2)
    (image,) = HostUser(worker).images(version.resolved)
    assert held_bytes(image) == image_bytes(version.digest, 2)


@pytest.mark.parametrize(
    "data",
    ids=["http", "ones", "short", "release", "table", "brackets"],
    argvalues=[
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 64,
        b"\0\0\0\4\0\0\0\0",
        encode(Release(1)),
        encode(Table(b"{}")),
        b"\0\0\0\x0c\0\0\0\x08" + b"[" * 8,
    ],
)
def test_garbage_ends_its_own_connection_only(
    serving: LoaderThread, worker: HostClient, loader: MemoryLoader, data: bytes
) -> None:
    early, late = Stranger(serving), Stranger(serving).enter(loader)
    early.socket.sendall(data)
    late.socket.sendall(data if data != encode(Release(1)) else b"\xff" * 8)
    assert early.hung_up
    assert late.hung_up
    _works(worker, loader)


def test_half_a_message_holds_up_nobody(serving: LoaderThread, worker: HostClient, loader: MemoryLoader) -> None:
    half = Stranger(serving)
    half.socket.sendall(encode(_hello(loader))[:-3])
    _works(worker, loader)
    half.socket.close()
    _works(worker, loader)


def test_a_table_that_is_none_or_anothers_is_refused(serving: LoaderThread, loader: MemoryLoader) -> None:
    for table in (b"", b"[]", b"[" * 100_000, json.dumps({"schema": "x"}).encode(), table_of(make_base("c" * 40))):
        stranger = Stranger(serving)
        stranger.say(_hello(loader), Table(table))
        assert stranger.hung_up
    assert serving.host is None


def test_a_number_is_used_once(serving: LoaderThread, worker: HostClient, loader: MemoryLoader) -> None:
    loader.barriers["resolve"] = Barrier()
    stranger, asked = Stranger(serving).enter(loader), Resolve(7, "acme", (Ref.parse("acme/x"),))
    stranger.say(asked, asked)
    assert stranger.hung_up
    loader.barriers.pop("resolve").open()
    _works(worker, loader)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"protocol": PROTOCOL + 1}, "protocol"),
        ({"trust": "0" * 64}, "trust"),
        ({"source": "0" * 64}, "source"),
        ({"page_bytes": 2 * PAGE_BYTES}, "page_bytes"),
    ],
)
def test_a_worker_that_goes_by_something_else_is_refused_with_the_reason(
    serving: LoaderThread, loader: MemoryLoader, change: dict[str, Any], where: str
) -> None:
    stranger = Stranger(serving)
    stranger.say(replace(_hello(loader), **change))
    refusal = stranger.hear()
    assert isinstance(refusal, Refusal)
    assert (refusal.problems[0].code, refusal.problems[0].where) == (Code.LOADER_MISMATCH, where)
    assert stranger.hung_up


def test_a_client_that_is_refused_says_so_at_once_and_leaves_nothing(
    serving: LoaderThread, loader: MemoryLoader
) -> None:
    with pytest.raises(AdapterdError) as refused:
        serving.worker(loader.base, source="0" * 64)
    assert refused.value.code is Code.LOADER_MISMATCH
    assert "fake-loader" in {thread.name for thread in threading.enumerate()}
    assert "adapterd-host-client" not in {thread.name for thread in threading.enumerate()}


def test_a_worker_that_does_not_read_is_dropped_and_others_are_served(
    serving: LoaderThread, worker: HostClient, loader: MemoryLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is read from it once too much is unsent; beyond a bound it goes."""
    monkeypatch.setattr(connection, "PAUSE_BYTES", 1 << 40)
    monkeypatch.setattr(connection, "MAX_UNSENT_BYTES", 1 << 16)
    deaf = Stranger(serving).enter(loader)
    deaf.socket.setblocking(False)
    asked = b"".join(encode(Resolve(n, "acme", (Ref.parse(f"blue/{'x' * 60}"),) * 8)) for n in range(4000))
    for _ in range(2000):
        try:
            asked = asked[deaf.socket.send(asked) :]
        except BlockingIOError:
            _works(worker, loader)
        except ConnectionError:
            break
        if not asked:
            break
    deaf.socket.settimeout(SECONDS)
    assert deaf.hung_up
    _works(worker, loader)


def test_a_worker_that_reads_slowly_is_only_asked_to_wait(
    serving: LoaderThread, loader: MemoryLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "PAUSE_BYTES", 1 << 12)
    slow = Stranger(serving).enter(loader)
    asked = [Resolve(n, "acme", (Ref.parse("blue/x"),)) for n in range(3000)]
    sending = threading.Thread(target=slow.say, args=asked)
    sending.start()
    heard = [slow.answer().request for _ in asked]
    sending.join(SECONDS)
    assert sorted(heard) == list(range(3000))
    slow.socket.close()


def test_ten_thousand_requests_at_once_are_all_answered(worker: HostClient, loader: MemoryLoader) -> None:
    version = loader.publish("acme/a", 2)
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    numbers = [worker.fetch([version.resolved], "acme", answers.put) for _ in range(10_000)]
    outcomes = [answers.get(timeout=SECONDS) for _ in numbers]
    assert not any(isinstance(outcome, Failure) for outcome in outcomes)
    assert len({id(images[0].manifest) for images in outcomes}) == 1  # decoded once
    for number in numbers:
        worker.release(number)
    assert len(worker._books) == 0
    assert loader.calls.count("fill acme/a") == 1


def test_one_worker_has_so_many_requests_and_no_more(
    serving: LoaderThread, loader: MemoryLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "MAX_REQUESTS", 2)
    version = loader.publish("acme/a").resolved
    greedy = Stranger(serving).enter(loader)
    greedy.say(*(Verify(n, "acme", version) for n in (1, 2, 3)))
    heard = {type(message): message for message in (greedy.answer() for _ in range(4))}
    assert set(heard) == {Known, Verified, Failed}
    assert (heard[Failed].request, heard[Failed].problems[0].code) == (3, Code.QUEUE_FULL)
    greedy.say(Release(1), Verify(4, "acme", version))
    assert greedy.answer() == Verified(4, heard[Known].facts)
    greedy.socket.close()


def test_facts_are_told_once_and_no_more_of_them_are_kept_than_is_bounded(
    serving: LoaderThread, loader: MemoryLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "MAX_KNOWN", 2)
    versions = [loader.publish(f"acme/{name}").resolved for name in "abc"]
    asking = Stranger(serving).enter(loader)
    told, dropped = [], []
    for number, index in enumerate([0, 1, 0, 2, 0, 1]):
        asking.say(Fetch(number, "acme", (versions[index],), 0))
        while isinstance(heard := asking.answer(), Known):
            told.append(index)
            dropped += heard.drop
    assert told == [0, 1, 2, 1]  # the least recently named one had to go
    assert len(dropped) == 2
    asking.socket.close()


def test_two_workers_share_what_is_packed_and_one_that_goes_lets_go_of_it(
    serving: LoaderThread, worker: HostClient, loader: MemoryLoader
) -> None:
    version, large = loader.publish("acme/a", 4), loader.publish("acme/b", 8)
    other = serving.worker(loader.base)
    first, second = HostUser(worker), HostUser(other)
    mine, its = first.fetch(version.resolved), second.fetch(version.resolved)
    assert mine.answer()[0].pages == its.answer()[0].pages
    assert loader.calls.count("fill acme/a") == 1
    waiting = first.fetch(large.resolved)
    worker.release(mine.number)
    first.verify(large.resolved).answer()
    assert waiting.silent  # the other holds it
    other.close(SECONDS)
    assert held_bytes(waiting.answer()[0]) == image_bytes(large.digest, 8)


def test_workers_of_two_bases_and_dtypes_have_their_own_images(
    serving: LoaderThread, worker: HostClient, loader: MemoryLoader
) -> None:
    version = loader.publish("acme/a", 2).resolved
    HostUser(worker).images(version)
    half = serving.worker(loader.base, dtype="F16")
    assert HostUser(half).images(version)[0].origin is not Origin.HOST
    assert HostUser(half).images(version)[0].origin is Origin.HOST
    half.close(SECONDS)


def test_a_reload_of_one_worker_leaves_the_others_their_images(
    serving: LoaderThread, worker: HostClient, loader: MemoryLoader
) -> None:
    """They go with the last worker that serves the base."""
    old, version = loader.base, loader.publish("acme/a", 2).resolved
    other = serving.worker(old)
    HostUser(other).images(version)
    loader.base = make_base("b" * 40)
    new = loader.publish("acme/a", 2).resolved
    worker.rebase(loader.base)
    HostUser(worker).images(new)
    loader.base = old
    assert HostUser(other).images(version)[0].origin is Origin.HOST
    loader.base = make_base("b" * 40)
    other.rebase(loader.base)
    assert HostUser(other).images(new)[0].origin is Origin.HOST
    assert serving.host is not None
    assert set(serving.host.usage().images) == {new.key}
    other.close(SECONDS)


def test_a_worker_that_left_serves_no_base(serving: LoaderThread, worker: HostClient, loader: MemoryLoader) -> None:
    version = loader.publish("acme/a", 2).resolved
    other = serving.worker(loader.base)
    HostUser(other).images(version)
    other.close(SECONDS)
    HostUser(worker).resolve("acme/a").answer()  # by then the loader has noticed
    loader.base = make_base("b" * 40)
    worker.rebase(loader.base)
    HostUser(worker).images(loader.publish("acme/b", 2).resolved)
    assert serving.host is not None
    assert version.key not in serving.host.usage().images


def test_requests_survive_the_loader(serving: LoaderThread, worker: HostClient, loader: MemoryLoader) -> None:
    """What is held stays readable, what waits is asked again, and the next image is in the next slab."""
    version, late = loader.publish("acme/a", 2), loader.publish("acme/late", 2)
    user = HostUser(worker)
    held = user.fetch(version.resolved)
    (image,) = held.answer()
    barrier = loader.barriers["prepare acme/late"] = Barrier()
    waiting = user.fetch(late.resolved)
    barrier.await_arrival()
    before, changes = worker.slab, worker.trust_changes
    serving.hang_up()
    del loader.barriers["prepare acme/late"]
    barrier.open()
    serving.stop()
    again = LoaderThread(serving.path, loader)
    (second,) = waiting.answer()
    assert held_bytes(second) == image_bytes(late.digest, 2)
    assert second.slab is worker.slab is not before
    assert image.slab is before
    assert held_bytes(image) == image_bytes(version.digest, 2)
    assert worker.trust_changes > changes  # verified by a loader that is gone
    worker.release(held.number)
    assert HostUser(worker).images(version.resolved)[0].slab is worker.slab
    worker.close(SECONDS)
    again.stop()


def test_without_a_loader_requests_fail_after_a_while_and_one_that_comes_back_is_found(
    serving: LoaderThread, loader: MemoryLoader
) -> None:
    tries: list[float] = []

    class Quick(Backoff):
        def failed(self) -> None:
            super().failed()
            tries.append(self.pause)

    worker = serving.worker(loader.base, backoff=Quick(lambda: 0.0, first=0.001))
    user, version = HostUser(worker), loader.publish("acme/a")
    serving.stop()
    assert user.verify(version.resolved).problem().code is Code.LOADER_UNAVAILABLE
    assert len(tries) >= GIVE_UP_AFTER
    assert user.resolve("acme/a").problem().code is Code.LOADER_UNAVAILABLE
    again = LoaderThread(serving.path, loader)
    while isinstance(user.resolve("acme/a").answer(), Failure):
        pass
    _works(worker, loader)
    worker.close(SECONDS)
    again.stop()


def test_after_the_end_everything_fails(worker: HostClient) -> None:
    worker.close(SECONDS)
    worker.close(SECONDS)
    assert HostUser(worker).resolve("acme/a").problem().code is Code.CACHE_CLOSED


class Doomed:
    """Starts loaders that end as soon as anybody asks them something."""

    def __init__(self, path: Path) -> None:
        self.path, self.started = path, list[LoaderThread]()
        self._ending = threading.Lock()  # the next one comes when the one before has gone

    def start(self, _readable: object) -> None:
        loader, ending = MemoryLoader(), self._ending
        with ending:
            serving = LoaderThread(self.path, loader)
        self.started.append(serving)

        class Deadly:
            def stop(self) -> None:
                with ending:
                    serving.hang_up()
                    serving.unlist()

        loader.barriers["resolve"] = Deadly()  # type: ignore[assignment]


def test_a_request_that_loaders_die_of_fails_after_so_many(tmp_path: Path) -> None:
    starter, base = Doomed(_folder(tmp_path) / "s"), make_base()
    worker = HostClient(
        starter.path, base=base, dtype="auto", page_bytes=PAGE_BYTES, source=SOURCE, trust=LoadersTrust(MemoryLoader()),
        starter=starter, backoff=Backoff(lambda: 0.0, first=0.001),  # type: ignore[arg-type]
    )  # fmt: skip
    asked = HostUser(worker).resolve("acme/a")
    assert asked.problem().code is Code.LOADER_UNAVAILABLE
    assert MAX_LOSSES <= len(starter.started) <= MAX_LOSSES + 1
    worker.close(SECONDS)
    for serving in starter.started:
        serving.stop()
