"""Real loader processes over a real folder of signed versions: started, killed, shared, ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from adapterd.gpu_cache import AdapterCache, CacheConfig
from adapterd.gpu_cache.host.interface import Failure, Origin
from adapterd.gpu_cache.host.process.client import HostClient
from adapterd.gpu_cache.host.process.opening import open_client
from adapterd.gpu_cache.host.process.settings import LoaderSettings, settings_of
from adapterd.loader.errors import AdapterdError, Code
from adapterd.loader.identity import Ref
from adapterd.loader.limits import MIB
from adapterd.loader.sources import FolderSource, Resolved
from adapterd.loader.trust.policy import TrustStore
from contracts.host_user import HostUser, held_bytes
from fakes.leftovers import mapped_slabs, threads_and_files
from fakes.publisher import FolderPublisher
from fakes.toy_models import LINEARS, toy_spec

MODULE = "adapterd.gpu_cache.host.process"
REF = "acme/finance"
DEADLINE = 60.0


@pytest.fixture
def publisher(tmp_path: Path) -> FolderPublisher:
    publisher = FolderPublisher(tmp_path / "published", toy_spec())
    publisher.publish("acme", "finance", modules=LINEARS, rank=19, alpha=4, seed=1)
    return publisher


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Threads, descriptors, mappings, folders, processes."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    before, slabs = threads_and_files(), mapped_slabs()
    yield
    for thread in threading.enumerate():
        if thread.name == "adapterd-loader-reaper":
            thread.join(DEADLINE)  # with the shared loader that it waits for
    assert threads_and_files() == before
    assert mapped_slabs() <= slabs
    assert list((tmp_path / "tmp").iterdir()) == []
    assert _loaders_of(tmp_path) == []


def _config(tmp_path: Path, **settings: object) -> CacheConfig:
    return CacheConfig(
        vram_bytes=8 * MIB,
        host_bytes=8 * MIB,
        loader="process",
        store=tmp_path / "store",
        **settings,  # type: ignore[arg-type]
    )


def _open(stack: ExitStack, tmp_path: Path, publisher: FolderPublisher, **settings: object) -> HostClient:
    trust = settings.pop("trust", publisher.trust)
    return stack.enter_context(
        open_client(_config(tmp_path, **settings), publisher.source, trust, publisher.base)  # type: ignore[arg-type]
    )


def _version(publisher: FolderPublisher) -> Resolved:
    return publisher.source.resolve(Ref.parse(REF), "acme")


def _loaders_of(tmp_path: Path) -> list[int]:
    """Loader processes of this test that are alive, by their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_text().split("\0")
        except OSError:
            continue
        if words[1:3] == ["-m", MODULE] and any(word.startswith(str(tmp_path)) for word in words):
            found.append(int(folder.name))
    return found


def _until(holds: Callable[[], bool]) -> None:
    """Another process has to do it, and tells nobody."""
    end = time.monotonic() + DEADLINE
    while not holds():
        assert time.monotonic() < end, "it never came to pass"
        os.sched_yield()


def _served(
    tmp_path: Path, publisher: FolderPublisher, *flags: str, socket: Path | None = None
) -> subprocess.Popen[bytes]:
    """A loader as an operator starts it; returns once it listens."""
    run = tmp_path / "run"
    run.mkdir(mode=0o700, exist_ok=True)
    trust = tmp_path / "trust.json"
    if not trust.exists():
        publisher.trust.save(trust)
    settings = LoaderSettings(
        source=settings_of(publisher.source), trust=trust, store=tmp_path / "store", slab_bytes=8 * MIB
    )
    (tmp_path / "loader.json").write_bytes(settings.as_json())
    config, socket = str(tmp_path / "loader.json"), str(run / "s")
    command = [sys.executable, "-m", MODULE, "--config", config, "--socket", socket, *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    assert process.stderr is not None
    while b"serving" not in (line := process.stderr.readline()):
        assert line, f"the loader ended with {process.wait()}"
    return process


def _ended(process: subprocess.Popen[bytes]) -> int:
    status = process.wait(DEADLINE)
    assert process.stderr is not None
    process.stderr.close()
    return status


# The whole way


def test_the_cache_over_a_process_has_the_bytes_that_the_cache_over_threads_has(
    publisher: FolderPublisher, tmp_path: Path
) -> None:
    arenas = []
    for loader in ("thread", "process"):
        config = CacheConfig(vram_bytes=8 * MIB, host_bytes=8 * MIB, loader=loader)  # type: ignore[arg-type]
        with AdapterCache(config, base=publisher.base, source=publisher.source, trust=publisher.trust) as cache:
            lease = cache.acquire(REF, tenant="acme").wait(DEADLINE)
            ((resident, _),) = lease.composition
            assert len(resident.manifest.modules) == len(LINEARS)
            whole = cache.arena.numpy()
            arenas.append([bytes(whole[page * MIB : (page + 1) * MIB]) for page in resident.pages])
            lease.release()
    assert arenas[0] == arenas[1]
    assert any(arenas[0][0])


def test_a_long_temporary_folder_does_not_matter(
    publisher: FolderPublisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / "tmp" / ("long" * 20)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with ExitStack() as stack:
        client = _open(stack, tmp_path, publisher)
        assert HostUser(client).images(_version(publisher))
    long.rmdir()


def test_a_loader_does_not_import_torch() -> None:
    code = f"import sys, {MODULE}.__main__, adapterd.loader.store, adapterd.loader.pack, adapterd.loader.sources\n"
    code += "print([n for n in ('torch', 'transformers', 'sqlalchemy') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_running_loader_has_not_mapped_torch(publisher: FolderPublisher, tmp_path: Path) -> None:
    with ExitStack() as stack:
        client = _open(stack, tmp_path, publisher)
        HostUser(client).images(_version(publisher))
        assert "torch" not in Path(f"/proc/{client.loader_process}/maps").read_text()


def test_the_token_is_not_on_the_command_line_and_not_in_the_environment(tmp_path: Path) -> None:
    from adapterd.loader.sources import RegistrySource

    with RegistrySource("http://127.0.0.1:1", "adrw_do_not_show") as source, ExitStack() as stack:
        trust = TrustStore()
        client = stack.enter_context(open_client(_config(tmp_path), source, trust, toy_spec()))
        for name in ("cmdline", "environ"):
            assert b"do_not_show" not in Path(f"/proc/{client.loader_process}/{name}").read_bytes()
        assert "do_not_show" not in "".join(p.read_text() for p in (tmp_path / "tmp").rglob("*.json"))


# Killed


def test_a_killed_loader_is_started_again_and_what_is_held_stays_readable(
    publisher: FolderPublisher, tmp_path: Path
) -> None:
    slabs = mapped_slabs()
    with ExitStack() as stack:
        client, version = _open(stack, tmp_path, publisher), _version(publisher)
        user, first = HostUser(client), client.loader_process
        held = user.fetch(version)
        (image,) = held.answer()
        before = held_bytes(image)
        assert first is not None
        os.kill(first, signal.SIGKILL)
        waiting = [user.fetch(version) for _ in range(20)]
        images = [asked.answer()[0] for asked in waiting]
        assert client.loader_process != first
        assert {id(each.slab) for each in images} == {id(client.slab)}
        assert image.slab is not client.slab
        assert held_bytes(image) == before == held_bytes(images[0])
        assert images[0].origin in {Origin.DISK, Origin.PACKED}
        assert len(mapped_slabs() - slabs) == 2
        client.release(held.number)
        del image, held
        assert len(mapped_slabs() - slabs) == 1


@pytest.mark.parametrize("after", [0, 1, 3, 10])
def test_a_loader_killed_in_the_middle_of_things_delays_them_only(
    publisher: FolderPublisher, tmp_path: Path, after: int
) -> None:
    with ExitStack() as stack:
        client, version = _open(stack, tmp_path, publisher), _version(publisher)
        user = HostUser(client)
        asked = [user.fetch(version) for _ in range(40)]
        for one in asked[:after]:
            one.answer()
        os.kill(client.loader_process or 0, signal.SIGKILL)
        for one in asked[after:]:
            assert held_bytes(one.answer()[0])
        for one in asked:
            client.release(one.number)


def test_a_loader_that_keeps_dying_makes_requests_fail(publisher: FolderPublisher, tmp_path: Path) -> None:
    """It cannot start any more: its trust file is gone. What is held stays readable, and a new start is found."""
    publisher.trust.save(tmp_path / "trust.json")
    trust = TrustStore.load(tmp_path / "trust.json")
    (tmp_path / "run").mkdir(mode=0o700)
    with ExitStack() as stack:
        client = _open(stack, tmp_path, publisher, loader_socket=tmp_path / "run/s", trust=trust)
        user = HostUser(client)
        held = user.fetch(_version(publisher))
        (image,) = held.answer()
        before = held_bytes(image)
        (tmp_path / "trust.json").rename(tmp_path / "kept.json")
        os.kill(client.loader_process or 0, signal.SIGKILL)
        assert user.resolve(REF).problem().code is Code.TRUST_NOT_CONFIGURED
        assert held_bytes(image) == before
        (tmp_path / "kept.json").rename(tmp_path / "trust.json")
        _until(lambda: not isinstance(user.resolve(REF).answer(), Failure))
        client.release(held.number)


@pytest.mark.parametrize("where", ["folder", "file"])
def test_a_starter_that_starts_nothing_is_told_of(publisher: FolderPublisher, tmp_path: Path, where: str) -> None:
    (tmp_path / "run").write_bytes(b"")
    with pytest.raises(AdapterdError) as refused, ExitStack() as stack:
        socket = tmp_path / ("run/s" if where == "folder" else "run")
        _open(stack, tmp_path, publisher, loader_socket=socket, trust=TrustStore())
    assert refused.value.code is Code.LOADER_UNAVAILABLE


def _worker_program(tmp_path: Path, publisher: FolderPublisher, socket: Path | None) -> list[str]:
    """A worker process that opens a client, holds an image, says so and waits to be killed."""
    publisher.trust.save(tmp_path / "trust.json")
    publisher.base.save(tmp_path / "base.json")
    code = f"""
        import sys
        from pathlib import Path
        from queue import SimpleQueue
        from adapterd.gpu_cache import CacheConfig
        from adapterd.gpu_cache.host.process.opening import open_client
        from adapterd.loader import BaseSpec, FolderSource, Ref, TrustStore
        here = Path({str(tmp_path)!r})
        socket = {socket and str(socket)!r}
        config = CacheConfig(host_bytes=8 << 20, loader="process", store=here / "store", loader_socket=socket)
        source, trust = FolderSource({str(publisher.root)!r}), TrustStore.load(here / "trust.json")
        with open_client(config, source, trust, BaseSpec.load(here / "base.json")) as client:
            answers = SimpleQueue()
            client.fetch([source.resolve(Ref.parse({REF!r}), "acme")], "acme", answers.put)
            print(len(answers.get(timeout=60)), flush=True)
            sys.stdin.read()
    """
    return [sys.executable, "-c", textwrap.dedent(code)]


def test_a_killed_worker_leaves_no_loader_of_its_own(publisher: FolderPublisher, tmp_path: Path) -> None:
    command = _worker_program(tmp_path, publisher, None)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # short enough for the path of a socket
        own = Path(folder)
        environment = os.environ | {"TMPDIR": folder}
        worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        assert worker.stdout is not None
        assert worker.stdin is not None
        assert worker.stdout.readline() == b"1\n"
        assert len(_loaders_of(own)) == 1
        worker.kill()
        worker.wait(DEADLINE)
        worker.stdout.close()
        worker.stdin.close()
        _until(lambda: _loaders_of(own) == [] and not any(own.iterdir()))


def test_a_killed_worker_lets_go_of_what_it_held_at_a_shared_loader(publisher: FolderPublisher, tmp_path: Path) -> None:
    serving = _served(tmp_path, publisher, "--keep")
    command = _worker_program(tmp_path, publisher, tmp_path / "run/s")
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert worker.stdout is not None
    assert worker.stdin is not None
    assert worker.stdout.readline() == b"1\n"
    worker.kill()
    worker.wait(DEADLINE)
    worker.stdout.close()
    worker.stdin.close()
    with ExitStack() as stack:
        trust = TrustStore.load(tmp_path / "trust.json")
        client = _open(stack, tmp_path, publisher, loader_socket=tmp_path / "run/s", trust=trust)
        version = _version(publisher)
        assert HostUser(client).images(version)[0].origin is Origin.HOST
        client.forget(version.key)  # goes at once: nobody holds it
        _until(lambda: client.usage().images == {})
    serving.terminate()
    assert _ended(serving) == 0


# Shared and ended


def test_workers_share_one_loader_that_the_first_has_started(publisher: FolderPublisher, tmp_path: Path) -> None:
    publisher.trust.save(tmp_path / "trust.json")
    (tmp_path / "run").mkdir(mode=0o700)
    trust, socket = TrustStore.load(tmp_path / "trust.json"), tmp_path / "run/s"
    with ExitStack() as second:
        with ExitStack() as first:
            one = _open(first, tmp_path, publisher, loader_socket=socket, trust=trust)
            two = _open(second, tmp_path, publisher, loader_socket=socket, trust=trust)
            assert two.loader_process is None
            mine = HostUser(one).images(_version(publisher))[0]
            its = HostUser(two).images(_version(publisher))[0]
            assert (mine.pages, its.origin) == (its.pages, Origin.HOST)
            assert held_bytes(mine) == held_bytes(its)
            del mine, one
        assert HostUser(two).images(_version(publisher))[0].slab is its.slab  # it outlives who started it
        del its, two
    _until(lambda: _loaders_of(tmp_path) == [])


def test_a_second_loader_on_a_socket_says_so_and_ends(publisher: FolderPublisher, tmp_path: Path) -> None:
    serving = _served(tmp_path, publisher, "--keep")
    command = [sys.executable, "-m", MODULE, "--config", str(tmp_path / "loader.json")]
    done = subprocess.run([*command, "--socket", str(tmp_path / "run/s")], capture_output=True, text=True, check=False)
    assert done.returncode == 7
    assert "another loader serves this socket" in done.stderr
    serving.kill()
    _ended(serving)
    again = _served(tmp_path, publisher)  # the dead one's socket is replaced
    again.send_signal(signal.SIGTERM)
    assert _ended(again) == 0
    assert not (tmp_path / "run/s").exists()


@pytest.mark.parametrize(("keep", "stays"), [(True, True), (False, False)])
def test_a_service_stays_and_others_go_with_their_last_worker(
    publisher: FolderPublisher, tmp_path: Path, keep: bool, stays: bool
) -> None:
    serving = _served(tmp_path, publisher, *(["--keep"] if keep else []))
    trust = TrustStore.load(tmp_path / "trust.json")
    for _ in range(2 if stays else 1):
        with ExitStack() as stack:
            client = _open(stack, tmp_path, publisher, loader_socket=tmp_path / "run/s", trust=trust)
            HostUser(client).images(_version(publisher))
            del client
    if stays:
        serving.terminate()
    assert _ended(serving) == 0


def test_a_loader_that_cannot_start_says_why(publisher: FolderPublisher, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o755)
    publisher.trust.save(tmp_path / "trust.json")
    trust = TrustStore.load(tmp_path / "trust.json")
    with pytest.raises(AdapterdError) as refused, ExitStack() as stack:
        _open(stack, tmp_path, publisher, loader_socket=tmp_path / "run/s", trust=trust)
    assert refused.value.code is Code.SETTINGS_INVALID
    assert "not ours alone" in refused.value.problem.message
    with pytest.raises(AdapterdError) as refused, ExitStack() as stack:
        _open(stack, tmp_path, publisher, loader_socket=tmp_path / "none/s", trust=TrustStore())
    assert refused.value.code is Code.LOADER_UNAVAILABLE  # nobody may start it without a trust file


def test_a_worker_with_another_source_or_trust_is_refused(publisher: FolderPublisher, tmp_path: Path) -> None:
    serving = _served(tmp_path, publisher, "--keep")
    trust = TrustStore.load(tmp_path / "trust.json")
    for source, trusting in ((FolderSource(tmp_path), trust), (publisher.source, TrustStore())):
        config = _config(tmp_path, loader_socket=tmp_path / "run/s")
        with pytest.raises(AdapterdError) as refused, open_client(config, source, trusting, publisher.base):
            pass
        assert refused.value.code is Code.LOADER_MISMATCH
    serving.terminate()
    _ended(serving)


# Trust


def test_a_revocation_in_the_trust_file_reaches_all_workers(publisher: FolderPublisher, tmp_path: Path) -> None:
    serving = _served(tmp_path, publisher, "--keep")
    trust = TrustStore.load(tmp_path / "trust.json")
    with ExitStack() as stack:
        client = _open(stack, tmp_path, publisher, loader_socket=tmp_path / "run/s", trust=trust)
        user, version = HostUser(client), _version(publisher)
        user.images(version)
        changes = client.trust_changes
        good = (tmp_path / "trust.json").read_bytes()
        (tmp_path / "trust.json").write_text("{")
        serving.send_signal(signal.SIGHUP)
        user.images(version)  # a file that does not hold takes nothing away
        (tmp_path / "trust.json").write_bytes(good)
        publisher.trust.revoke_key(trust.tenant("acme").publishers[0].key.key_id)
        publisher.trust.save(tmp_path / "trust.json")
        serving.send_signal(signal.SIGHUP)
        _until(lambda: client.trust_changes > changes)
        assert user.verify(version).problem().code is Code.KEY_REVOKED
        serving.kill()
        _ended(serving)
        # The next loader is believed, too, though the worker's own store is that of the start.
        assert user.verify(version).problem().code is Code.KEY_REVOKED


def test_a_loader_of_ones_own_trusts_what_the_worker_trusts_at_once(publisher: FolderPublisher, tmp_path: Path) -> None:
    with ExitStack() as stack:
        client, version = _open(stack, tmp_path, publisher), _version(publisher)
        user, changes = HostUser(client), client.trust_changes
        user.images(version)
        publisher.trust.revoke_key(publisher.trust.tenant("acme").publishers[0].key.key_id)
        assert client.trust_changes > changes
        assert user.verify(version).problem().code is Code.KEY_REVOKED
